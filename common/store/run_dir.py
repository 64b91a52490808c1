"""The run directory: where every file of a run lies, and how roles find each other's addresses."""

import asyncio
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from common.errors import LongstrideError

ADDRESS_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths of one run. Owns nothing but the names."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def steps(self) -> Path:
        return self.journal / "steps.jsonl"

    @property
    def replay_point(self) -> Path:
        return self.journal / "replay_point.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.json"

    @property
    def selection(self) -> Path:
        return self.root / "selection.json"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def launch(self) -> Path:
        return self.root / "launch.json"

    @property
    def finished(self) -> Path:
        return self.root / "finished.json"

    @property
    def report(self) -> Path:
        return self.root / "report.json"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def addresses(self) -> Path:
        return self.root / "addresses"

    def publish_address(self, role: str, address: str) -> None:
        """Tell the other roles where `role` listens."""
        self.addresses.mkdir(parents=True, exist_ok=True)
        write_atomically(self.addresses / role, address)

    def forget_address(self, role: str) -> None:
        """Remove a stale address before its role starts again."""
        (self.addresses / role).unlink(missing_ok=True)

    def find_address(self, role: str) -> str | None:
        """Return where `role` listens now, None if it has not said so. Does not wait."""
        try:
            return (self.addresses / role).read_text().strip()
        except FileNotFoundError:
            return None

    def wait_for_address(self, role: str, *, timeout_s: float) -> str:
        """Return where `role` listens, blocking this thread until it says so.

        Raises:
            LongstrideError: nothing was published in time; names the role and the file.
        """
        deadline = time.monotonic() + timeout_s
        while (address := self.find_address(role)) is None:
            self._require_time(role, deadline, timeout_s)
            time.sleep(ADDRESS_POLL_S)
        return address

    async def await_address(self, role: str, *, timeout_s: float) -> str:
        """Return where `role` listens, like `wait_for_address`, while the event loop goes on."""
        deadline = time.monotonic() + timeout_s
        while (address := self.find_address(role)) is None:
            self._require_time(role, deadline, timeout_s)
            await asyncio.sleep(ADDRESS_POLL_S)
        return address

    def _require_time(self, role: str, deadline: float, timeout_s: float) -> None:
        if time.monotonic() > deadline:
            path = self.addresses / role
            raise LongstrideError(f"no {role} within {timeout_s:g}s: {path} does not exist")


def write_atomically(path: Path, text: str, *, is_durable: bool = False) -> None:
    """Replace a file so that a reader sees the old or the new text, never a part.

    Args:
        is_durable: return only when a power cut leaves one of the two as well.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as handle:
        handle.write(text)
        if is_durable:
            handle.flush()
            os.fsync(handle.fileno())
    temporary.replace(path)
    if is_durable:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Replace a JSON file atomically."""
    write_atomically(path, json.dumps(value, indent=2, sort_keys=True) + "\n")
