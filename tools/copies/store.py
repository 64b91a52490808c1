"""The store of a copy: a folder or URL with parts named by their digest, and manifests."""

import logging
import posixpath
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar
from urllib.parse import urlsplit

from common.errors import ConfigError
from tools.copies.manifest import FOLDER, CopyManifest, decode, digest_of, file_name, number_of

logger = logging.getLogger(__name__)

KEY = "journal.copy_to"
OBJECTS = "objects"
NUM_THREADS = 4  # Number of requests at once.
NUM_TRIES = 3  # Tries of one request.
RETRY_S = 0.5  # Seconds before the second try; the wait doubles with each one.
T = TypeVar("T")
R = TypeVar("R")


def open_target(url: str, *, key: str = KEY) -> tuple[Any, str]:
    """Return the file system of a folder or URL, and the path in it. It makes no request.

    Credentials are read by the backend from its own environment variables and files.

    Raises: ConfigError: the URL has a password, its scheme is unknown, or the package of its
        backend is not installed.
    """
    # Imported here, because few runs make a copy.
    import fsspec  # pyright: ignore[reportMissingTypeStubs]

    backends: Any = fsspec
    scheme = urlsplit(url).scheme or "file"
    shown = _shown(url)
    if shown != url:
        raise ConfigError(
            f"{key}={shown}: must contain no password. The backend of {scheme} reads credentials"
            " from its environment variables and its own files"
        )
    try:
        backends.get_filesystem_class(scheme)
        return backends.url_to_fs(url)
    except ImportError as error:
        text = f"{error}".rstrip(".")
        raise ConfigError(f"{key}={shown}: its backend is not installed ({text})") from error
    except ValueError as error:
        raise ConfigError(f"{key}={shown}: not a usable folder or URL ({error})") from error


def check_target(url: str) -> None:
    """Check that another process can copy a run to a folder or URL. Raises: ConfigError."""
    open_target(url)
    if urlsplit(url).scheme == "memory":
        raise ConfigError(f"{KEY}={url}: the memory of a process is lost at its end; name a folder")


def _shown(url: str) -> str:
    """Return the URL without its password."""
    return re.sub(r"(?<=://)([^/@:]*):[^/]*@", r"\1:hidden@", url)


class StoreFailed(OSError):
    """A request to a store failed several times."""


class ObjectStore:
    """The files below a URL. Each request is repeated a few times before its error is raised.

    Parts are never changed: their names are the digests of their contents.
    """

    def __init__(self, url: str, *, key: str = KEY) -> None:
        """Make no request yet. Raises: ConfigError: the URL is not usable."""
        self.url = url.rstrip("/") if len(url) > 1 else url
        self._fs, root = open_target(url, key=key)
        self._root = str(root).rstrip("/")
        self._made: set[str] = set()  # Folders that exist.
        self._pool = ThreadPoolExecutor(NUM_THREADS, "copies")

    def close(self) -> None:
        """End the threads. A request in progress is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the names of the files in a folder with their sizes; {} without the folder."""
        path = self._path(folder)

        def request() -> dict[str, int]:
            self._fs.invalidate_cache()
            entries = self._fs.find(path, detail=True)
            return {
                posixpath.basename(name): int(entry["size"] or 0) for name, entry in entries.items()
            }

        return self._repeated(request)

    def folders(self) -> list[str]:
        """Return the names of the folders below the URL."""

        def request() -> list[str]:
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
            names = [each["name"].rstrip("/") for each in entries if each["type"] == "directory"]
            return sorted(map(posixpath.basename, names))

        return self._repeated(request)

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises: FileNotFoundError, StoreFailed."""
        return self._repeated(lambda: bytes(self._fs.cat_file(self._path(name))))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, with its folder. Raises: StoreFailed."""
        path = self._path(name)
        folder = posixpath.dirname(path)

        def request() -> None:
            if folder not in self._made:
                self._fs.makedirs(folder, exist_ok=True)
            self._made.discard(folder)  # After a failure the folder is made again.
            self._fs.pipe_file(path, content)
            self._made.add(folder)

        self._repeated(request)

    def write_part(self, content: bytes) -> str:
        """Write a part; return its digest."""
        digest = digest_of(content)
        self.write(f"{OBJECTS}/{digest}", content)
        return digest

    def read_part(self, digest: str) -> bytes:
        """Return a part. Raises: ConfigError: its content is damaged; StoreFailed."""
        content = self.read(f"{OBJECTS}/{digest}")
        if digest_of(content) != digest:
            raise ConfigError(
                f"{self.url}/{OBJECTS}/{digest}: damaged, its content has another digest"
            )
        return content

    def remove(self, names: Iterable[str]) -> None:
        """Remove files. A file that is missing is ignored."""

        def one(name: str) -> None:
            try:
                self._repeated(lambda: self._fs.rm_file(self._path(name)))
            except FileNotFoundError:
                return

        self.each(one, names)

    def each(self, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return the results of `work`, several at once, in the order of the items.

        After an error no further item begins. The error is raised when no item is in progress.
        """
        futures = [self._pool.submit(work, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    # --- manifests ----------------------------------------------------------------------------

    def write_manifest(self, manifest: CopyManifest) -> str:
        """Write a manifest, after all its parts; return the name of its file."""
        content = manifest.encode()
        name = f"{FOLDER}/{file_name(manifest.number, content)}"
        self.write(name, content)
        return name

    def manifest_names(self) -> list[str]:
        """Return the names of the manifests' files, the newest first."""
        names = [name for name in self.sizes(FOLDER) if number_of(name) is not None]
        return sorted(names, reverse=True)

    def newest_manifest(self) -> CopyManifest | None:
        """Return the newest whole manifest; None if there is none.

        Raises: ConfigError: another version of the product wrote it.
        """
        for name in self.manifest_names():
            manifest = decode(name, self.read(f"{FOLDER}/{name}"))
            if manifest is not None:
                return manifest
            logger.warning("ignored an incomplete manifest file=%s/%s", self.url, name)
        return None

    # --- requests -----------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _repeated(self, request: Callable[[], R]) -> R:
        """Return the result of a request; repeat it if it fails.

        A missing file is an answer, so it is not requested again.

        Raises: FileNotFoundError; StoreFailed: the last try failed.
        """
        for number in range(NUM_TRIES):
            try:
                return request()
            except FileNotFoundError:
                raise
            except Exception as error:
                if number + 1 == NUM_TRIES:
                    raise StoreFailed(f"{self.url}: {type(error).__name__}: {error}") from error
            time.sleep(RETRY_S * 2**number)
        raise AssertionError
