"""Resources shared by all episodes of a process: questions and retriever, created on demand."""

import os
import threading
from pathlib import Path

from common.config.envs import SearchqaOptions
from envhub.env import EnvFailure
from envhub.envs.searchqa import remote
from envhub.envs.searchqa.index import FileRetriever, MemoryRetriever, index_path
from envhub.envs.searchqa.passages import Retriever, read_passage
from envhub.envs.searchqa.questions import QuestionBank, QuestionFiles, first_faults, question_files
from envhub.envs.searchqa.world.world import the_world

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
                return remote.RemoteRetriever(options.retriever_url, timeout_s=timeout_s)
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
            remote.parse_url(options.retriever_url)
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
