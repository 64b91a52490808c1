"""The record of a dequantised checkpoint, and the identity of a quantised one."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.store.run_dir import json_object

RECORD = "dequantised.json"  # File in the folder of a complete checkpoint.
FORMAT = 1  # Changes if the same files give other weights.
SAMPLES = 64
SAMPLE_BYTES = 4096
EDGE_BYTES = 1 << 20


def identity_of(small: list[Path], weights: list[Path], settings: Mapping[str, str]) -> str:
    """Return a digest of a quantised checkpoint.

    It contains small files whole. A file of weights counts by name, size, time of its last change
    and samples of its content: reading all of it would take minutes at each start.
    """
    digest = hashlib.sha256(json.dumps({"format": FORMAT, **settings}).encode())
    for path in sorted(small):
        digest.update(f"{path.name}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in sorted(weights):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            for number in range(SAMPLES):
                file.seek(number * status.st_size // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
            file.seek(max(0, status.st_size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of `RECORD`: the checkpoint that a folder was made of."""

    source: str  # Path of the quantised file or folder.
    method: str  # As in "gguf (Q4_K)".
    dtype: str
    num_bytes: int  # Bytes of the weights.
    sha256: str  # Digest of the weights; "" for an outline.
    files: dict[str, int]  # Name of each file of weights -> its bytes.
    folder: str  # The folder in the cache, also in an outline.
    needed_bytes: int = 0  # Bytes that the cache needs for it; 0: it is complete.

    def describe(self) -> str:
        """Return the source, the target and the folder as text."""
        size = f"{self.num_bytes / 1e9:,.2f} GB"
        return f"{self.source} ({self.method}) as {self.dtype}, {size} in {self.folder}"


def read_record(folder: Path) -> Record | None:
    """Return the record of a folder with dequantised weights, None for another folder."""
    tree: dict[str, Any] = json_object(folder / RECORD)
    try:
        return Record(**tree) if tree else None
    except TypeError:  # Fields of another version.
        return None


def is_complete(folder: Path) -> bool:
    """Return whether a folder has all files of its record with their sizes."""
    record = read_record(folder)
    if record is None:
        return False
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    return sizes == record.files
