"""The run directory: paths of all files of a run, published addresses, and atomic file writes."""

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar, cast

from common.errors import ConfigError, PeerMissing

DESCRIPTORS_S = 10.0
T = TypeVar("T")
ADDRESS_POLL_S = 0.05  # Seconds between two polls, since shared disks have no change events.


class _Below:
    """A path below the root of a run."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run_dir: "RunDir", owner: type) -> Path:
        return run_dir.root / self._path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDir:
    """Paths of one run. The object creates no files by itself."""

    root: Path

    config = _Below("config.yaml")  # Resolved configuration, which the roles load.
    code = _Below("code")  # Path of a checkout for hubs and actors, if it is not the launcher's.
    config_changes = _Below("config_changes.jsonl")  # Changes of live keys, one line for each.
    journal = _Below("journal")  # Folder of the accepted trajectories.
    steps = _Below("journal/steps.jsonl")  # Groups that each step consumed.
    group_rewards = _Below("journal/group_rewards.jsonl")  # Rewards over groups, one line for each.
    parts = _Below("journal/parts.jsonl")  # Parts that were trained before their groups.
    replay_point = _Below("journal/replay_point.json")
    precision = _Below("precision.json")  # Precision of the learner's computations.
    checkpoints = _Below("checkpoints")
    metrics = _Below("metrics.jsonl")  # One line per step.
    checksums = _Below("checksums.jsonl")  # Checksums of each step's stages and weights.
    logs = _Below("logs")  # <role>.log
    ledger = _Below("ledger.json")
    selection = _Below("selection.json")  # The scheduler's statistics of dropped episodes.
    cpu = _Below("cpu.json")  # CPU time of each role, updated by the launcher every few seconds.
    outcomes = _Below("outcomes.jsonl")  # Outcome of each episode, written by the scheduler.
    date = _Below("date.txt")  # Date in every prompt, YYYY-MM-DD.
    tokenizer = _Below("tokenizer")  # Tokenizer of the journal's token ids.
    status = _Below("status.json")  # Status that the scheduler writes once a second.
    launch = _Below("launch.json")  # State of the launcher, while it runs.
    alive = _Below("alive")  # Current activity of each role on this machine.
    stalls = _Below("stalls")  # Reports of stalled roles.
    finished = _Below("finished.json")  # Exists only after the last step.
    report = _Below("report.json")
    demonstrations = _Below("demonstrations.jsonl")  # Conversations that `sft` collected.
    episodes = _Below("episodes")  # Records of running episodes, for the actor that continues one.
    keys = _Below("keys")  # Key files with mode 0600.
    addresses = _Below("addresses")  # Addresses on which roles listen.

    def read_date(self) -> str:
        """Return the date in the run's prompts, "" if the directory has none."""
        return self.date.read_text(encoding="utf-8").strip() if self.date.is_file() else ""

    def read_source(self) -> str:
        """Return `model.source` of the run's configuration, "" without one."""
        return self._read_model().get("source", "")

    def read_commits(self) -> dict[str, str]:
        """Return `model.commits` of the run's configuration, {} without one."""
        return self._read_model().get("commits", {})

    def read_prompt_variables(self) -> dict[str, Any]:
        """Return `model.chat_template_kwargs` of the run's configuration, {} without one."""
        return self._read_model().get("chat_template_kwargs", {})

    def _read_model(self) -> dict[str, Any]:
        """Return the section `model` of the run's configuration; {} without one."""
        import yaml  # Imported here, because small helper processes import this module.

        if not self.config.is_file():
            return {}
        tree = yaml.safe_load(self.config.read_text(encoding="utf-8"))
        return tree.get("model", {})

    def publish_address(self, role: str, address: str) -> None:
        """Publish the address of `role` in a file for the roles with access to this disk."""
        self.addresses.mkdir(parents=True, exist_ok=True)
        write_atomically(self.addresses / role, address)

    def forget_address(self, role: str) -> None:
        """Remove a stale address before its role restarts."""
        (self.addresses / role).unlink(missing_ok=True)

    def find_address(self, role: str) -> str | None:
        """Return the published address of `role`, None if there is none. Does not wait."""
        try:
            return (self.addresses / role).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def wait_for_address(self, role: str, *, timeout_s: float) -> str:
        """Return the address of `role`. Blocks this thread until the role has published it.

        Raises: PeerMissing: no address was published in time; names the role and the file.
        """
        deadline = time.monotonic() + timeout_s
        while (address := self.find_address(role)) is None:
            if time.monotonic() > deadline:
                path = self.addresses / role
                raise PeerMissing(f"no {role} within {timeout_s:g} s: {path} does not exist")
            time.sleep(ADDRESS_POLL_S)
        return address


def cut_head(path: Path, start: int, *, head: bytes = b"") -> None:
    """Replace the bytes before `start` with `head`. A power cut leaves the old or the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with path.open("rb") as old, opened(lambda: temporary.open("wb")) as new:
            old.seek(start)
            new.write(head)
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # On a full disk it would occupy space.
        raise
    sync_folder(path.parent)


def write_atomically(
    path: Path, text: str, *, is_durable: bool = False, mode: int | None = None
) -> None:
    """Replace a file so that a reader gets the old or the new text, never a part.

    With `is_durable` this also holds after a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with opened(lambda: _create(temporary, mode)) as handle:
            handle.write(text)
            if is_durable:
                handle.flush()
                os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # On a full disk it would occupy space.
        raise
    if is_durable:
        sync_folder(path.parent)


def _create(path: Path, mode: int | None) -> TextIO:
    """Create an empty text file with `mode` at once, independent of an earlier file."""
    if mode is None:
        return path.open("w", encoding="utf-8")
    path.unlink(missing_ok=True)  # An existing file would keep its mode.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    return os.fdopen(os.open(path, flags, mode), "w", encoding="utf-8")


def remove_partial_files(folder: Path) -> None:
    """Remove temporary files of processes that have ended: `.<name>.<process id>`."""
    for path in folder.glob(".*.*[0-9]"):
        pid = path.name.rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # The path is a folder or was removed.
                path.unlink()


def opened(open_it: Callable[[], T]) -> T:
    """Return the result of `open_it`; retry for up to `DESCRIPTORS_S` while no descriptor is free.

    Unauthenticated connections may use up the file descriptors until they are closed.
    """
    deadline = time.monotonic() + DESCRIPTORS_S
    while True:
        try:
            return open_it()
        except OSError as error:
            is_full = error.errno in (errno.EMFILE, errno.ENFILE)
            if not is_full or time.monotonic() > deadline:
                raise
        time.sleep(ADDRESS_POLL_S)


def sync_folder(folder: Path) -> None:
    """Wait until the file names in a folder survive a power cut."""
    descriptor = opened(lambda: os.open(folder, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_json(path: Path, kinds: Mapping[str, type], *, remedy: str) -> dict[str, Any]:
    """Return a file's JSON object.

    Args:
        kinds: the required entries with their types.
        remedy: advice for a damaged file, which the error ends with.

    Raises: ConfigError: the file is damaged; names it. OSError: it cannot be read.
    """
    try:
        content: object = json.loads(path.read_bytes())
    except ValueError as error:  # The content is not JSON or not UTF-8.
        raise ConfigError(f"{path}: damaged, not JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: damaged, not a JSON object; {remedy}")
    entries = cast(dict[str, Any], content)
    for name, kind in kinds.items():
        value = entries.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{path}: damaged, {name!r} is not {kind.__name__}; {remedy}")
    return entries


def write_json(path: Path, value: object, *, indent: int | None = 2) -> None:
    """Replace a JSON file atomically. Without indent it is one line, and ten times as fast."""
    write_atomically(path, json.dumps(value, indent=indent, sort_keys=True) + "\n")


def as_map(value: object) -> dict[str, Any]:
    """Return a JSON object unchanged, {} for any other value."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, {} if the file is missing or has another content."""
    try:
        return as_map(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return {}
