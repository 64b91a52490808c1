"""Files of a model that a joining node downloads: small, with plain names, checksummed."""

import hashlib
import re
from pathlib import Path
from typing import Protocol

from common.errors import ConfigError
from common.text import counted
from common.wire.messages import SharedFile

PART_BYTES = 1 << 20
MAX_FILE_BYTES = 128 << 20  # A tokenizer with a large vocabulary has 20 MB.
MAX_TOTAL_BYTES = 256 << 20
MAX_FILES = 64
SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # Neither weights nor code.
TEMPLATE = "chat_template.jinja"
INDEX_SUFFIX = ".index.json"  # Suffix of the index of weights in several files.


def is_shareable(name: str) -> bool:
    """Return whether a file name is allowed: no folder, not hidden, an allowed suffix."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", name) is not None
    return is_plain and name.endswith(SUFFIXES) and not name.endswith(INDEX_SUFFIX)


def list_shared(folder: Path, *, template: Path | None = None) -> list[SharedFile]:
    """Return the files of a model folder that a node needs: configuration and tokenizer.

    Args:
        template: file that is sent as the folder's chat template; None: the folder's own.

    Raises: ConfigError: the folder has no config.json, or the files exceed a limit.
    """
    paths = sorted(each for each in folder.iterdir() if each.is_file() and is_shareable(each.name))
    if not any(each.name == "config.json" for each in paths):
        raise ConfigError(f"model.path={folder}: has no config.json, which a joining node needs")
    named = {each.name: each for each in paths} | ({TEMPLATE: template} if template else {})
    files = [
        SharedFile(name=name, num_bytes=path.stat().st_size, sha256=_sha256(path))
        for name, path in sorted(named.items())
    ]
    check_bounds(files)
    return files


def check_bounds(files: list[SharedFile]) -> None:
    """Check names, number and sizes of files. Raises: ConfigError: one exceeds its limit."""
    for file in files:
        if not is_shareable(file.name) or not 0 <= file.num_bytes <= MAX_FILE_BYTES:
            raise ConfigError(
                f"file {file.name!r} of {file.num_bytes} bytes: a joining node receives only files"
                f" of a model with plain names and at most {MAX_FILE_BYTES} bytes"
            )
    names = {file.name for file in files}
    total_bytes = sum(file.num_bytes for file in files)
    if len(names) != len(files) or len(files) > MAX_FILES or total_bytes > MAX_TOTAL_BYTES:
        raise ConfigError(
            f"{counted(len(files), 'file')} of {total_bytes} bytes: a joining node receives at most"
            f" {MAX_FILES} files of {MAX_TOTAL_BYTES} bytes in total"
        )


def manifest_digest(files: list[SharedFile]) -> str:
    """Return a digest of the names, sizes and contents of these files."""
    lines = sorted(f"{each.sha256} {each.num_bytes} {each.name}\n" for each in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


class Checksummed(Protocol):
    """A file with a known size and digest."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def sha256(self) -> str: ...


def is_intact(path: Path, file: Checksummed) -> bool:
    """Return whether a local file has the size and checksum of `file`."""
    is_there = path.is_file() and path.stat().st_size == file.num_bytes
    return is_there and _sha256(path) == file.sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
