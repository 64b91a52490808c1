"""The manifest of a copy: the files of a run, each as a list of stored parts.

A manifest is written after all its parts. Its file name contains the digest of its content, so a
manifest that was written in part is recognized and ignored.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.config.knobs import FILE_NAME
from common.errors import ConfigError
from common.text import is_path_inside
from learner.journal.journal import JournalPosition
from learner.training.shards import MANIFEST as SHARDS

FORMAT = 1
FOLDER = "manifests"
_NAME = re.compile(r"(\d{9})-([0-9a-f]{16})\.json")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A part of a file. The digest is the name of the stored object."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a copy. `mtime_ns` 0: the file may grow or be replaced."""

    size: int
    mtime_ns: int = 0
    parts: list[StoredPart] = field(default_factory=list[StoredPart])


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyManifest:
    """A whole copy of a run."""

    format: int
    number: int
    run: str  # Name of the run.
    id: str  # Random id of the run, so that runs of the same name have copies of their own.
    at: float  # Unix time of the cut.
    journal: JournalPosition  # Synced end of the journal.
    pruned_before: int  # The journal's files with smaller numbers were removed.
    files: dict[str, StoredFile]

    def encode(self) -> bytes:
        """Return the content of the manifest's file."""
        plain = asdict(self) | {"journal": self.journal.plain()}
        return json.dumps(plain, separators=(",", ":")).encode()

    def digests(self) -> Iterator[tuple[str, int]]:
        """Yield the digest and the size of each part."""
        for file in self.files.values():
            for part in file.parts:
                yield part.digest, part.size

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files.values())

    @property
    def checkpoint(self) -> int:
        """Version of the newest checkpoint, -1 without one."""
        matches = (re.match(r"checkpoints/step-(\d+)/COMPLETE$", name) for name in self.files)
        return max((int(match[1]) for match in matches if match), default=-1)

    @property
    def split_checkpoints(self) -> list[int]:
        """Versions of the checkpoints whose other files are on the nodes of the learner."""
        matches = (re.match(rf"checkpoints/step-(\d+)/{SHARDS}$", name) for name in self.files)
        return sorted(int(match[1]) for match in matches if match)


_MANIFEST: TypeAdapter[CopyManifest] = TypeAdapter(CopyManifest)


def split_text(versions: list[int]) -> str:
    """Return a note about checkpoints that a copy has in part, by their versions."""
    steps = ", ".join(map(str, versions))
    return (
        f"the checkpoints of step {steps} lack the files on other nodes"
        " (learner.checkpoint_shards=own_node), which a restart or `run.py gather` needs"
    )


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()


def file_name(number: int, content: bytes) -> str:
    """Return the name of a manifest's file."""
    return f"{number:09d}-{digest_of(content)[:16]}.json"


def number_of(name: str) -> int | None:
    """Return the number in the name of a manifest's file; None for another file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def decode(name: str, content: bytes) -> CopyManifest | None:
    """Return a manifest; None if its content is incomplete or damaged.

    Raises: ConfigError: another version of the product wrote it, or it names a file outside of the
        run directory.
    """
    number = number_of(name)
    if number is None or file_name(number, content) != name:
        return None
    try:
        plain: Any = json.loads(content)
        if (format := plain.get("format")) != FORMAT:
            raise ConfigError(f"{name}: the copy has format {format}, this version reads {FORMAT}")
        journal = JournalPosition.of_plain(plain["journal"])
        manifest = _MANIFEST.validate_python(plain | {"journal": journal})
    except (ValidationError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{name}: not a manifest of a copy ({error!r:.200})") from error
    if not FILE_NAME.fits(manifest.run):
        raise ConfigError(
            f"{name}: the name of the run {manifest.run!r} must be {FILE_NAME.phrase}"
        )
    for path, file in manifest.files.items():
        is_inside = is_path_inside(path)
        has_digests = all(_DIGEST.fullmatch(part.digest) for part in file.parts)
        has_sizes = min([part.size for part in file.parts], default=0) >= 0
        has_sizes = has_sizes and sum(part.size for part in file.parts) == file.size
        if not is_inside or not has_digests or not has_sizes:
            raise ConfigError(f"{name}: the entry {path!r} is not valid")
    return manifest
