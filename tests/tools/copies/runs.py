"""Runs to copy, with checkpoints, and stores that fail."""

import hashlib
import json
from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

from common.store.run_dir import RunDir
from tests.tools.dashboard.runs import make_run
from tools.copies.copier import RunCopier


def make_copied_run(root: Path, *, num: int = 8) -> RunDir:
    """Write a run with a checkpoint of step 10, a scheduler's state and keys."""
    run_dir = make_run(root, num)
    add_checkpoint(run_dir, 10)
    (root / "scheduler.json").write_text('{"log": 3, "checksum": 1, "state": {}}', encoding="utf-8")
    (root / "scheduler.3.log").write_bytes(b"events")
    (root / "date.txt").write_text("2026-01-02\n", encoding="utf-8")
    run_dir.keys.mkdir()
    (run_dir.keys / "hub_token").write_text("swordfish", encoding="utf-8")
    return run_dir


def add_checkpoint(run_dir: RunDir, version: int, *, is_temporary: bool = False) -> Path:
    """Write a complete checkpoint; its marker is the last file."""
    folder = run_dir.checkpoints / f"step-{version:06d}"
    (folder / "state").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(f"weights {version} ".encode() * 1000)
    (folder / "state" / "0.distcp").write_bytes(f"moments {version} ".encode() * 1000)
    marker = {"version": version, "is_passing": is_temporary}
    (folder / "COMPLETE").write_text(json.dumps(marker), encoding="utf-8")
    return folder


def copier_of(run_dir: RunDir, url: str, *, slice_s: float = 1e9) -> RunCopier:
    """Return a copier without a limit for checkpoints."""
    return RunCopier(run_dir, url, slice_s=slice_s)


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Killed(BaseException):
    """The end of the copying process."""


class DyingStore(MemoryFileSystem):
    """A store whose client is killed within a write: half of the content remains."""

    protocol = "dying"
    cachable = False
    writes_left = 10**9

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("dying://", "memory://"))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        cls = type(self)
        if cls.writes_left <= 0:
            super().pipe_file(path, value[: len(value) // 2])
            raise Killed
        cls.writes_left -= 1
        super().pipe_file(path, value)
