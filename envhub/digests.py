"""Digests of the data behind an environment's items, for `EnvSpec.content`."""

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64  # Blocks of a large file that its digest covers.


def digests_of_packages(*names: str) -> dict[str, str]:
    """Return a digest of the version of each installed package, by its name."""
    digests: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):  # The requirements of the environment report it.
            digests[name] = hashlib.sha256(version(name).encode()).hexdigest()
    return digests


def digest_of_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return a digest of the names and the bytes of files below a folder, in any order."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def digest_of_sizes(folder: Path, paths: Iterable[Path]) -> str:
    """Return a digest of the names and the sizes of files below a folder, in any order."""
    lines = [f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0" for path in paths]
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def digest_of_blocks(path: Path) -> str:
    """Return a digest of the size of a file and of `NUM_BLOCKS` blocks, evenly spread over it."""
    num_bytes = path.stat().st_size
    last = max(0, num_bytes - BLOCK_BYTES)
    digest = hashlib.sha256(f"{num_bytes}\0".encode())
    with path.open("rb") as file:
        for start in sorted({last * n // (NUM_BLOCKS - 1) for n in range(NUM_BLOCKS)}):
            file.seek(start)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
