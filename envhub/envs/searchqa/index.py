"""The built-in retriever: BM25 over a corpus, in memory or memory-mapped from a saved index."""

import hashlib
import json
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from envhub.env import EnvFailure
from envhub.envs.searchqa.lines import LineFile, iterate_lines
from envhub.envs.searchqa.passages import Passage, read_passage

logger = logging.getLogger(__name__)

FORMAT = "2"  # Version of the saved index; increase it when tokens or files change.
WORD = re.compile(r"(?u)\b\w\w+\b")
MAX_QUERY_WORDS = 256
SAMPLE_BYTES = 1 << 20
STALE_PARTIAL_S = 24 * 3600.0
LINES_FILE = "lines.npy"


class Words:
    """Splits text into the stems of the index; thread-safe."""

    def __init__(self) -> None:
        # These imports with numba take half a second, which must not delay the start of a hub.
        import Stemmer
        from bm25s.stopwords import STOPWORDS_EN

        self._stemmer = Stemmer.Stemmer("english")
        self._lock = threading.Lock()  # A stemmer has state.
        self._stop_words = frozenset(STOPWORDS_EN)

    def split(self, text: str) -> list[str]:
        """Return the stems of a text in their order, without stop words."""
        words = [word for word in WORD.findall(text.lower()) if word not in self._stop_words]
        with self._lock:
            return self._stemmer.stemWords(words)


class Bm25:
    """BM25 search over passages by number; the order of results is the same on every machine."""

    def __init__(self, model: Any, words: Words) -> None:
        self._model = model
        self._words = words

    def find(self, query: str, num_passages: int) -> list[tuple[int, float]]:
        """Return numbers and scores, best first; equal scores by number; no score of 0."""
        stems = self._words.split(query)[:MAX_QUERY_WORDS]
        ids = self._model.get_tokens_ids(stems)
        if not ids:
            return []
        scores = self._model.get_scores_from_ids(ids)
        num_wanted = min(num_passages, len(scores))
        least = np.partition(scores, -num_wanted)[-num_wanted]
        numbers = np.flatnonzero((scores >= least) & (scores > 0))
        order = np.lexsort((numbers, -scores[numbers]))[:num_wanted]
        return [(int(numbers[place]), float(scores[numbers[place]])) for place in order]


def make_bm25(texts: Iterable[str], words: Words, *, show_progress: bool = False) -> Any:
    """Return bm25s's index of texts. Raises ValueError if they contain no word."""
    import bm25s

    logging.getLogger("bm25s").setLevel(logging.WARNING)
    vocabulary: dict[str, int] = {}
    # Cache of stems, which are slow to compute; None: a stop word.
    id_of_word: dict[str, int | None] = {}
    ids: list[list[int]] = []
    for text in texts:
        row = []
        for word in WORD.findall(text.lower()):
            if word not in id_of_word:
                stems = words.split(word)
                number = vocabulary.setdefault(stems[0], len(vocabulary)) if stems else None
                id_of_word[word] = number
            number = id_of_word[word]
            if number is not None:
                row.append(number)
        ids.append(row)
    if not vocabulary:
        raise ValueError("the corpus has no words")
    model = bm25s.BM25(backend="numpy")
    model.index((ids, vocabulary), create_empty_token=False, show_progress=show_progress)
    return model


class MemoryRetriever:
    """Searches passages in memory."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        words = Words()
        self._passages = passages
        texts = (f"{one.title}\n{one.text}" for one in passages)
        self._bm25 = Bm25(make_bm25(texts, words), words)

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """See `Retriever.search`."""
        return [self._passages[number] for number, _ in self._bm25.find(query, num_passages)]


class FileRetriever:
    """Searches a corpus file with its saved index; both stay on disk, memory-mapped."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        """Open the index of `corpus` below `folder`, after building it if it is missing.

        Raises: EnvFailure: the corpus cannot be read or indexed.
        """
        import bm25s

        saved = build_index(corpus, folder)
        words = Words()
        try:
            model = bm25s.BM25.load(saved, mmap=True, show_progress=False)
            self._lines = LineFile(corpus, np.load(saved / LINES_FILE, mmap_mode="r"))
        except (OSError, ValueError) as error:
            raise EnvFailure(f"index {saved} cannot be read ({error}); delete it") from error
        self._bm25 = Bm25(model, words)

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """See `Retriever.search`."""
        ranked = self._bm25.find(query, num_passages)
        try:
            return [read_passage(self._lines.line(number)) for number, _ in ranked]
        except ValueError as error:
            raise EnvFailure(f"{self._lines.path} changed since it was indexed") from error


def index_path(corpus: Path, folder: Path) -> Path:
    """Return the path of the index of the current corpus; it may not exist yet.

    The name contains a hash of size, modification time, and the first and last megabyte, so that
    the index of an older corpus is never used.

    Raises: OSError: the corpus cannot be read.
    """
    status = corpus.stat()
    with open(corpus, "rb") as file:
        first = file.read(SAMPLE_BYTES)
        file.seek(max(0, status.st_size - SAMPLE_BYTES))
        last = file.read(SAMPLE_BYTES)
    facts = [FORMAT, version("bm25s"), status.st_size, status.st_mtime_ns]
    digest = hashlib.sha256(json.dumps(facts).encode() + first + last).hexdigest()
    return folder / f"{corpus.stem}-{digest[:16]}"


def build_index(corpus: Path, folder: Path) -> Path:
    """Return the folder of the finished index, after building it if it is missing.

    It is built under another name and renamed at the end, so that no partial index is ever used.

    Raises: EnvFailure: the corpus cannot be read, a line of it is no passage, or the disk is full.
    """
    try:
        target = index_path(corpus, folder)
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            _clear_partials(folder)
            partial = Path(tempfile.mkdtemp(prefix=f"{corpus.stem}.partial-", dir=folder))
            try:
                _build(corpus, partial)
                _finish(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            _clear_older(target, corpus.stem)
    except (OSError, ValueError) as error:
        raise EnvFailure(f"corpus {corpus} cannot be indexed: {error}") from error
    return target


def _build(corpus: Path, partial: Path) -> None:
    """Write the index of a corpus to a folder."""
    logger.info("indexing corpus=%s", corpus)
    start_s = time.monotonic()
    bounds: list[tuple[int, int]] = []
    model = make_bm25(_texts(corpus, bounds), Words(), show_progress=True)
    model.save(partial, show_progress=False)
    np.save(partial / LINES_FILE, np.array(bounds, dtype=np.int64).reshape(-1, 2))
    took_s = time.monotonic() - start_s
    logger.info("indexed corpus=%s num_passages=%d took_s=%.1f", corpus, len(bounds), took_s)


def _texts(corpus: Path, bounds: list[tuple[int, int]]) -> Iterator[str]:
    """Yield the texts to index, with a progress bar on stderr.

    The bounds of each line are appended to `bounds`.
    """
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(f"reading {corpus.name}", total=corpus.stat().st_size)
        for number, (begin, end, content) in enumerate(iterate_lines(corpus), start=1):
            try:
                passage = read_passage(content)
            except ValueError as error:
                raise ValueError(f"passage {number}, byte {begin}: {error}") from error
            bounds.append((begin, end))
            if number % 1000 == 0:
                progress.update(bar, completed=end)
            yield f"{passage.title}\n{passage.text}"
        progress.update(bar, completed=corpus.stat().st_size)


def _finish(partial: Path, target: Path) -> None:
    """Move the finished index to its place, unless another process was first."""
    partial.chmod(0o755)
    try:
        partial.rename(target)
    except OSError:
        if not target.exists():  # Another process finished first, with the same result.
            raise


def _clear_partials(folder: Path) -> None:
    """Remove the remains of killed builds."""
    for path in folder.glob("*.partial-*"):
        if time.time() - path.stat().st_mtime > STALE_PARTIAL_S:
            shutil.rmtree(path, ignore_errors=True)


def _clear_older(target: Path, stem: str) -> None:
    """Remove the indexes of older versions of the same corpus."""
    name = re.compile(re.escape(stem) + r"-[0-9a-f]{16}")
    for path in target.parent.iterdir():
        if path != target and name.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
