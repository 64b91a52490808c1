"""Checkpoints: the trainer's tensors, the policy as a model directory, and a marker."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from torch import Tensor

from common.config.learner import LearnerSection
from common.errors import ConfigError, LongstrideError
from common.store.disk import errors_behind, free_text, is_no_room
from common.store.run_dir import read_json, sync_folder
from learner.policy.lora import has_adapters, save_adapter, save_adapter_config
from learner.policy.saving import save_model, save_tokenizer
from learner.training.ranks import SAVE_TIMEOUT
from learner.training.shard_home import ASIDE, ShardNotWritten
from learner.training.shards import TENSORS as TENSORS
from learner.training.shards import gather_command, is_whole, remedy_without
from learner.training.state import read_weights

logger = logging.getLogger(__name__)

_MARKER = "COMPLETE"  # Written last; a folder without a marker is the remains of a crash.
_VALUES = "trainer.json"  # Values that are not tensors.
_NAME = re.compile(r"step-(\d+)(\.old)?")  # Folders with other names belong to the user.
RETRY_S = 10.0  # Seconds until the next try after a full disk.
# Largest fractions of the time for temporary checkpoints: training paused, files written.
STALL_FRAC = 0.01
WRITING_FRAC = 0.05


class Saved(Protocol):
    """The methods of a trainer that a checkpoint uses."""

    def save(self, folder: Path) -> Future[Any]: ...

    def values(self) -> dict[str, Any]: ...


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint below `root`, None if there is none.

    A checkpoint that was set aside counts if its replacement is missing.

    Raises: ConfigError: its marker is damaged; names the file.
    """
    newest = max(_complete(root), key=_version_of, default=None)
    if newest is not None:
        check_marker(newest)
    return newest


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Return (version, folder) of the complete checkpoints, oldest first."""
    return [(_version_of(path)[0], path) for path in _complete(root)]


def _complete(root: Path) -> list[Path]:
    """Return the complete checkpoints, oldest version first."""
    ours = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.exists() else []
    return sorted((path for path in ours if (path / _MARKER).exists()), key=_version_of)


def _version_of(folder: Path) -> tuple[int, bool]:
    """Return the version in a folder's name, and whether the folder is not set aside."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), not match[2]


def check_marker(folder: Path) -> None:
    """Check that the marker of a checkpoint has the folder's version. Raises: ConfigError."""
    path = folder / _MARKER
    remedy = remedy_without(folder)
    version = read_json(path, {"version": int}, remedy=remedy)["version"]
    match = _NAME.fullmatch(folder.name)
    if match is not None and int(match[1]) != version:
        raise ConfigError(f"{path}: damaged, it names version {version}; {remedy}")


def _is_temporary(folder: Path) -> bool:
    """Return whether a checkpoint is temporary: the next checkpoint replaces it."""
    try:
        return json.loads((folder / _MARKER).read_text(encoding="utf-8")).get("is_passing", False)
    except (OSError, ValueError):
        return False  # A restore from this checkpoint reports the damage.


def load_values(folder: Path) -> dict[str, Any]:
    """Return the values of a checkpoint beside its tensors: "version" and the trainer's values.

    Raises: ConfigError: the folder is incomplete, damaged, or from an older product version.
    """
    if not (folder / _MARKER).exists():
        raise ConfigError(f"{folder} is not a complete checkpoint; choose another one")
    if not (folder / _VALUES).exists():
        raise ConfigError(
            f"{folder} was written by an older version of the product in another format. Finish"
            " the run with that version, or start another run from its weights:"
            f" model.path={folder}"
        )
    return read_json(folder / _VALUES, {"version": int}, remedy=remedy_without(folder))


class Checkpoints:
    """Saves every few steps or seconds during training, and keeps the newest checkpoints.

    Example (every 25 steps, the newest 3): after step 100 there are step-50, step-75 and step-100.
    If saving costs almost nothing, there is also a temporary checkpoint, a few seconds old. It
    shortens the recovery after a crash, and the next checkpoint replaces it.

    Training pauses while its state is copied. A thread then writes the copies, the plain model
    folder and the marker, in this order. A crash before the marker leaves a folder that is never
    read. The next checkpoint waits for the current one.
    """

    def __init__(
        self, root: Path, cfg: LearnerSection, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Remove the remains of a crash below `root`; `now` returns seconds."""
        self._root = root
        self._cfg = cfg
        self._now = now
        self._saved_at = now()
        self._trained_at: float | None = None  # Time of the first step of this process.
        self._saved_version = -1
        # Seconds that the last checkpoint paused training, and took in total.
        self._stood_s = self._took_s = 0.0
        self._retry_at: float | None = None  # Time of the next try after a full disk.
        self._writing: Future[float | None] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        root.mkdir(parents=True, exist_ok=True)
        for path in root.glob(".step-*.partial"):  # Remains of a crash.
            shutil.rmtree(path, ignore_errors=True)

    def configure(self, cfg: LearnerSection) -> None:
        """Use other intervals and another number of kept checkpoints."""
        self._cfg = cfg

    @property
    def oldest_version(self) -> int:
        """The oldest version that may be restored, 0 for a run without a checkpoint."""
        return min((_version_of(path)[0] for path in _complete(self._root)), default=0)

    @property
    def newest_version(self) -> int:
        """The version that would be restored, 0 for a run without a checkpoint."""
        return max((_version_of(path)[0] for path in _complete(self._root)), default=0)

    def is_due(self, version: int) -> bool:
        """Return whether a step should be followed by a checkpoint.

        A temporary checkpoint limits the training that a crash loses. The time before the first
        step of this process is no training, so the first step alone needs none.
        """
        if version == self._saved_version:
            return False
        now = self._now()
        if self._retry_at is not None:
            return now >= self._retry_at
        if self._trained_at is None:
            self._trained_at = now
        lost_s = now - max(self._saved_at, self._trained_at)
        return self._is_kept(version, now - self._saved_at) or lost_s >= max(
            self._cfg.max_redo_s, self._stood_s / STALL_FRAC, self._took_s / WRITING_FRAC
        )

    def _is_kept(self, version: int, age_s: float) -> bool:
        """Return whether a checkpoint is kept after the next one."""
        by_step = version % self._cfg.checkpoint_every_steps == 0
        return by_step or age_s >= self._cfg.checkpoint_every_s

    def save(self, version: int, *, model: Any, tokenizer: Any, trainer: Saved) -> Path:
        """Begin to write a checkpoint; return its later folder once training may continue."""
        folder = self._folder(version)
        if version == self._saved_version:
            return folder
        age_s = self._now() - self._saved_at
        is_passing = self.is_due(version) and not self._is_kept(version, age_s)
        self.wait()
        started = self._now()
        partial = folder.with_name(f".{folder.name}.partial")

        def finish(written: Future[Any]) -> float | None:
            """Complete the checkpoint after its tensors are written; None: it was abandoned."""
            try:
                _write_policy(partial, model, tokenizer, written.result())
                marker = {"version": version, "is_passing": is_passing}
                (partial / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
                sync_tree(partial)
                self._replace(folder, partial)
                self._remove_old()
            except (OSError, RuntimeError, SafetensorError, LongstrideError) as error:
                self._give_up(partial, error)
                return None
            self._took_s = self._now() - started
            remote = "" if is_whole(folder) else f" gather with: {gather_command(folder)}"
            logger.info("saved checkpoint version=%d took_s=%.2f%s", version, self._took_s, remote)
            return self._took_s

        self._saved_at = self._now()
        self._saved_version = version
        self._retry_at = None
        try:
            _remove(partial)
            partial.mkdir(parents=True)
            (partial / _VALUES).write_text(
                json.dumps({"version": version} | trainer.values()), encoding="utf-8"
            )
        except OSError as error:
            self._give_up(partial, error)
            return folder
        written = trainer.save(partial / TENSORS)
        self._writing = self._thread.submit(finish, written)
        self._stood_s = self._now() - started
        logger.info(
            "copied weights for a checkpoint version=%d training_paused_s=%.2f",
            version,
            self._stood_s,
        )
        return folder

    def has(self, version: int) -> bool:
        """Return whether a version is saved or being saved."""
        return version == self._saved_version

    def _give_up(self, partial: Path, error: BaseException) -> None:
        """Abandon a checkpoint that does not fit on the disk, and schedule a retry.

        No data is lost: a restart repeats the steps since the last checkpoint from the journal.

        Raises: the error itself, if it has another cause.
        """
        if not is_no_room(error):
            raise error
        shutil.rmtree(partial, ignore_errors=True)
        self._saved_version = -1
        self._retry_at = self._now() + RETRY_S
        nodes = [str(each) for each in errors_behind(error) if isinstance(each, ShardNotWritten)]
        logger.error(
            "disk full: no room for checkpoint %s (%s), training continues, next try in_s=%g",
            partial.name.strip(".").removesuffix(".partial"),
            nodes[0] if nodes else f"{free_text(self._root)} free",
            RETRY_S,
        )

    def poll(self) -> float | None:
        """Return the seconds that a checkpoint completed since the last call took, or None.

        Raises: the error that prevented the write, except a full disk.
        """
        if self._writing is None or not self._writing.done():
            return None
        took_s = self._writing.result()
        self._writing = None
        return took_s

    def wait(self) -> None:
        """Wait until no checkpoint is being written; `poll` returns the result.

        Raises: as `poll`; LongstrideError: the write exceeded its time limit.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(SAVE_TIMEOUT.total_seconds())
        except TimeoutError as error:
            limit = f"{SAVE_TIMEOUT.total_seconds():g} s"
            raise LongstrideError(
                f"{self._root}: the checkpoint was not written within {limit}"
            ) from error

    def _replace(self, folder: Path, partial: Path) -> None:
        """Move a complete checkpoint to its place; an earlier one of this version is set aside."""
        if folder.exists():
            aside = folder.with_name(f"{folder.name}{ASIDE}")
            _remove(aside)
            folder.rename(aside)
        partial.rename(folder)
        sync_folder(self._root)  # Without the sync, a power cut may undo the rename.

    def _folder(self, version: int) -> Path:
        return self._root / f"step-{version:06d}"

    def _remove_old(self) -> None:
        """Remove all but the kept checkpoints and the newest one."""
        ours = [path for path in self._root.iterdir() if _NAME.fullmatch(path.name)]
        for path in ours:
            if path.name.endswith(ASIDE):
                _remove(path)
        complete = _complete(self._root)
        passing = [path for path in complete if _is_temporary(path)]
        newest = [path for path in complete if path not in passing][-self._cfg.keep_checkpoints :]
        for path in complete[:-1]:
            if path not in newest:
                _remove(path)


def _remove(folder: Path) -> None:
    """Remove a folder; after a crash in between, the rest does not count as a checkpoint."""
    if folder.is_dir():
        gone = folder.with_name(f".{folder.name.strip('.')}.removed.partial")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _write_policy(
    folder: Path, model: Any, tokenizer: Any, copies: Mapping[str, Tensor] | None
) -> None:
    """Write the policy as `export` does. If several nodes have its weights, leave them out."""
    if is_whole(folder):
        export(folder, model, tokenizer, copies)
        return
    if has_adapters(model):
        save_adapter_config(folder, model)
    save_tokenizer(folder, tokenizer)


def export(folder: Path, model: Any, tokenizer: Any, copies: Mapping[str, Tensor] | None) -> None:
    """Write the policy in the format of transformers or peft.

    Args:
        copies: the written tensors; None: they are read from the disk.
    """
    if copies is None:
        state = dict(read_weights(folder / TENSORS, "model"))
    else:
        prefix = "model."
        state = {n.removeprefix(prefix): each for n, each in copies.items() if n.startswith(prefix)}
    if has_adapters(model):
        save_adapter(folder, model, state)
    else:
        save_model(folder, model, state)
    save_tokenizer(folder, tokenizer)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders of a tree to disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
