"""Resources shared by all episodes of a process: questions and retriever, created on demand."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from common.config.envs import SearchqaOptions
from common.http.blocking import request
from common.text import json_bytes, valid_text
from envhub.digests import digest_of_blocks, digest_of_files, digests_of_packages
from envhub.env import EnvFailure
from envhub.envs.searchqa.index import FileRetriever, MemoryRetriever, index_path
from envhub.envs.searchqa.passages import Passage, Retriever, make_passage, read_passage
from envhub.envs.searchqa.questions import QuestionBank, QuestionFiles, first_faults, question_files
from envhub.envs.searchqa.world.world import the_world

MAX_REPLY_BYTES = 8 << 20


class RemoteRetriever:
    """Sends `POST <url>` {queries, topk, return_scores}. No connection stays open between queries.

    For a server on another machine, the proxy of the process environment is used.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        """Parse `url`; without a path it gets `/retrieve`.

        Raises: ValueError: not an http or https URL.
        """
        self._url = parse_url(url)
        self._timeout_s = timeout_s

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """Return the server's passages, in its order; see `Retriever.search`."""
        asked = {"queries": [valid_text(query)], "topk": num_passages, "return_scores": True}
        try:
            reply = self._post(json_bytes(asked))
            return read_reply(reply)[:num_passages]
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise EnvFailure(f"retrieval server {self._url.geturl()}: {reason}") from error

    def _post(self, body: bytes) -> bytes:
        """Return the body of the answer. One deadline covers the whole exchange."""
        answer = request(
            self._url.geturl(),
            method="POST",
            body=body,
            headers={"Content-Type": "application/json"},
            timeout_s=self._timeout_s,
            max_bytes=MAX_REPLY_BYTES,
        )
        if answer.status != 200:
            raise ValueError(f"status {answer.shown}: {answer.body[:200]!r}")
        return answer.body


def parse_url(url: str) -> SplitResult:
    """Return the parts of a retrieval server's URL.

    Raises: ValueError: not an http or https URL with a host.
    """
    parts = urlsplit(url)
    _ = parts.port  # Raises ValueError if the port is no number.
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST:PORT/retrieve")
    return parts._replace(path="/retrieve") if parts.path in ("", "/") else parts


def read_reply(reply: bytes) -> list[Passage]:
    """Return the passages of an answer, {"result": [[{"document": {...}, "score": s}, ...]]}.

    Bare documents, as without `return_scores`, are accepted too.

    Raises: ValueError: another format.
    """
    parsed = json.loads(reply)
    results = parsed.get("result") if isinstance(parsed, Mapping) else None
    if not isinstance(results, list) or len(results) != 1 or not isinstance(results[0], list):
        raise ValueError("the answer is not {'result': [[...]]} with one list for one query")
    return [
        make_passage(one.get("document", one) if isinstance(one, Mapping) else one)
        for one in results[0]
    ]


INDEX_BYTES_PER_S = 1 << 19  # Slowest expected build speed, for the deadline of a first call.
BASE_MEMORY_BYTES = 4 << 30
# Measured: 5 bytes of memory per byte of the corpus while an index is built.
MEMORY_PER_CORPUS_BYTE = 8
SLACK_S = 30.0


class Library:
    """The questions and the retriever of the options; thread-safe."""

    def __init__(self, options: SearchqaOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._retriever: Retriever | None = None
        self._bank: QuestionBank | None = None

    @property
    def is_world(self) -> bool:
        """Whether the questions come from the generated world."""
        return not self.options.questions_dir

    def bank(self) -> QuestionBank:
        """Return the source of questions: the configured files, or the generated world."""
        if self._bank is None:
            folder = self.options.questions_dir
            self._bank = QuestionFiles(Path(folder)) if folder else the_world()
        return self._bank

    def retriever(self) -> Retriever:
        """Return the retriever. The first call may build an index; concurrent calls wait for it.

        Raises: EnvFailure: the corpus cannot be read or indexed, or the URL is invalid.
        """
        with self._lock:
            if self._retriever is None:
                self._retriever = self._make_retriever()
            return self._retriever

    def _make_retriever(self) -> Retriever:
        """Return the configured retriever. Raises: EnvFailure: its URL is invalid."""
        options = self.options
        if options.retriever_url:
            try:
                timeout_s = options.retriever_timeout_s
                return RemoteRetriever(options.retriever_url, timeout_s=timeout_s)
            except ValueError as error:
                raise EnvFailure(f"envs.searchqa.retriever_url: {error}") from error
        if options.corpus:
            return FileRetriever(Path(options.corpus), index_folder(options))
        return MemoryRetriever(the_world().passages())


def index_folder(options: SearchqaOptions) -> Path:
    """Return the folder that holds the indexes of the corpus."""
    corpus = Path(options.corpus)
    return Path(options.index_dir) if options.index_dir else corpus.parent / f"{corpus.name}.index"


def call_timeout_s(options: SearchqaOptions) -> float | None:
    """Return the deadline of a call, including the work of a first call.

    None: the usual deadline. The deadline for a missing index depends on the size of the corpus.
    """
    if options.retriever_url:
        return options.retriever_timeout_s + SLACK_S
    if not options.corpus:
        return None
    try:
        is_built = index_path(Path(options.corpus), index_folder(options)).exists()
        num_bytes = Path(options.corpus).stat().st_size
    except OSError:
        return None  # `faults` reports the reason.
    return None if is_built else SLACK_S + num_bytes / INDEX_BYTES_PER_S


def memory_bytes(options: SearchqaOptions) -> int:
    """Return the peak resident memory of a worker, including the build of an index."""
    try:
        corpus_bytes = Path(options.corpus).stat().st_size if options.corpus else 0
    except OSError:
        corpus_bytes = 0  # `faults` reports the reason.
    return BASE_MEMORY_BYTES + MEMORY_PER_CORPUS_BYTE * corpus_bytes


def content_of(options: SearchqaOptions) -> dict[str, str]:
    """Return the digests of the question files and of the corpus; `faults` reports absent ones.

    The passages of a retrieval server are unknown.
    """
    content: dict[str, str] = {}
    if options.questions_dir:
        folder = Path(options.questions_dir)
        files = question_files(folder)
        content["envs.searchqa.questions_dir"] = digest_of_files(folder, files)
    if options.corpus and not options.retriever_url and Path(options.corpus).is_file():
        content["envs.searchqa.corpus"] = digest_of_blocks(Path(options.corpus))
        content |= digests_of_packages("bm25s")
    return content


def faults(options: SearchqaOptions) -> list[str]:
    """Return a line with its remedy for each problem of the options' files and URL."""
    lines = []
    has_corpus = bool(options.corpus or options.retriever_url)
    if options.questions_dir:
        lines += _faults_of_questions(Path(options.questions_dir))
        if not has_corpus:
            lines.append(
                "envs.searchqa.questions_dir needs passages to search: "
                "set envs.searchqa.corpus or envs.searchqa.retriever_url"
            )
    elif has_corpus:
        lines.append(
            "envs.searchqa.corpus and retriever_url need questions about their passages: "
            "set envs.searchqa.questions_dir"
        )
    if options.retriever_url:
        try:
            parse_url(options.retriever_url)
        except ValueError as error:
            lines.append(f"envs.searchqa.retriever_url: {error}")
    elif options.corpus:
        lines += _faults_of_corpus(options)
    return lines


def _faults_of_questions(folder: Path) -> list[str]:
    """Return the problems of the folder of questions."""
    if not folder.is_dir():
        return [
            f"envs.searchqa.questions_dir={folder} is not a folder: use the one with nq_test.jsonl"
        ]
    faulty = [f"envs.searchqa.questions_dir: {line}" for line in first_faults(folder)]
    if not faulty and not question_files(folder):
        faulty = [
            f"envs.searchqa.questions_dir={folder} holds no questions: "
            "name the files <dataset>_<train|test>.jsonl, such as nq_test.jsonl"
        ]
    return faulty


def _faults_of_corpus(options: SearchqaOptions) -> list[str]:
    """Return the problems of the corpus file."""
    corpus = Path(options.corpus)
    try:
        with open(corpus, "rb") as file:
            first = next((line for line in file if not line.isspace()), None)
        if first is None:
            return [f"envs.searchqa.corpus={corpus} is empty: use a file with one passage per line"]
        read_passage(first)
    except OSError as error:
        return [f"envs.searchqa.corpus={corpus} cannot be read ({error.strerror}): use a file"]
    except ValueError as error:
        return [f"envs.searchqa.corpus={corpus}, first passage: {error}"]
    folder = index_folder(options)
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        return [f"the folder {folder} is not writable: set envs.searchqa.index_dir=FOLDER"]
    return []
