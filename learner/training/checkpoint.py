"""Checkpoints: the trainer's tensors, beside them the policy as a model directory, a marker."""

import json
import logging
import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from common.config.learning import LearnerSection
from common.errors import ConfigError, LongstrideError
from learner.policy.lora import has_adapters, save_adapter
from learner.training.ranks import SAVE_TIMEOUT
from learner.training.state import read_weights

logger = logging.getLogger(__name__)

_MARKER = "COMPLETE"  # written last; a folder without it is the remains of a crash
_VALUES = "trainer.json"  # what is no tensor
TENSORS = "state"  # the folder of the others, by torch.distributed.checkpoint
_PREFIX = "step-"
_ASIDE = ".old"  # suffix of a checkpoint while another of the same version takes its place


class Saved(Protocol):
    """A trainer, as far as a checkpoint is concerned."""

    def save(self, folder: Path) -> Future[Any]: ...

    def values(self) -> dict[str, Any]: ...


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint below `root`, None if there is none.

    One that was set aside counts, if its replacement never came.
    """
    complete = [path for path in root.glob(f"{_PREFIX}*") if (path / _MARKER).exists()]
    return max(complete, key=_age, default=None)


def _age(folder: Path) -> tuple[int, bool]:
    number = folder.name.removeprefix(_PREFIX).removesuffix(_ASIDE)
    return int(number), not folder.name.endswith(_ASIDE)


def load_values(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says beside its tensors: "version", and the trainer's values.

    Raises: ConfigError: the folder is no complete checkpoint, or one of an older product.
    """
    if not (folder / _MARKER).exists():
        raise ConfigError(f"{folder} is no complete checkpoint")
    if not (folder / _VALUES).exists():
        raise ConfigError(
            f"{folder} was written by an older version of the product, as one file per run; finish"
            f" the run with that version, or begin another from its weights: model.path={folder}"
        )
    return json.loads((folder / _VALUES).read_text())


class Checkpoints:
    """Saves every so many steps or seconds beside training, keeps the newest few.

    Example (every 25 steps, the newest 3): after step 100 there are step-50, step-75 and step-100.
    Training stands still while its state is copied; a thread writes the copies, then the plain
    model folder, then the marker. Whatever ends before that leaves a folder that nobody reads.
    The next checkpoint waits for this one.
    """

    def __init__(self, root: Path, cfg: LearnerSection) -> None:
        self._root = root
        self._cfg = cfg
        self._saved_at = time.monotonic()
        self._saved_version = -1
        self._writing: Future[float] | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        root.mkdir(parents=True, exist_ok=True)

    @property
    def oldest_version(self) -> int:
        """The oldest version that may be restored, 0 for a run without a checkpoint."""
        return min((_age(path)[0] for path in self._complete()), default=0)

    def is_due(self, version: int) -> bool:
        if version == self._saved_version:
            return False
        by_step = version % self._cfg.checkpoint_every_steps == 0
        return by_step or time.monotonic() - self._saved_at >= self._cfg.checkpoint_every_s

    def save(self, version: int, *, model: Any, tokenizer: Any, trainer: Saved) -> Path:
        """Begin to write a checkpoint and return its folder-to-be, once training may go on."""
        folder = self._folder(version)
        if version == self._saved_version:
            return folder
        self.wait()
        started = time.monotonic()
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / _VALUES).write_text(json.dumps({"version": version} | trainer.values()))
        written = trainer.save(partial / TENSORS)

        def finish() -> float:
            written.result()
            _export(partial, model, tokenizer)
            (partial / _MARKER).write_text(json.dumps({"version": version}))
            _sync_tree(partial)
            self._replace(folder, partial)
            self._remove_old()
            logger.info("saved version=%d took_s=%.2f", version, time.monotonic() - started)
            return time.monotonic() - started

        self._writing = self._thread.submit(finish)
        self._saved_at, self._saved_version = time.monotonic(), version
        logger.info("copied version=%d stood_s=%.2f", version, time.monotonic() - started)
        return folder

    def poll(self) -> float | None:
        """Return how many seconds a checkpoint took that is whole since the last call, or None.

        Raises: what kept it from being written.
        """
        if self._writing is None or not self._writing.done():
            return None
        took_s, self._writing = self._writing.result(), None
        return took_s

    def wait(self) -> None:
        """Wait until nothing is being written; `poll` tells how it went.

        Raises: what kept it from being written; LongstrideError: it is not whole in time.
        """
        if self._writing is None:
            return
        try:
            self._writing.result(SAVE_TIMEOUT.total_seconds())
        except TimeoutError as error:
            limit = f"{SAVE_TIMEOUT.total_seconds():g}s"
            raise LongstrideError(f"{self._root}: no checkpoint written within {limit}") from error

    def _replace(self, folder: Path, partial: Path) -> None:
        if folder.exists():
            aside = folder.with_name(f"{folder.name}{_ASIDE}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        partial.rename(folder)

    def _folder(self, version: int) -> Path:
        return self._root / f"{_PREFIX}{version:06d}"

    def _remove_old(self) -> None:
        for path in self._root.glob(f"{_PREFIX}*{_ASIDE}"):
            shutil.rmtree(path)
        for path in self._complete()[: -self._cfg.keep_checkpoints]:
            shutil.rmtree(path)

    def _complete(self) -> list[Path]:
        return sorted(p for p in self._root.glob(f"{_PREFIX}*") if (p / _MARKER).exists())


def _export(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write the policy as transformers or peft reads it, from the tensors that are on disk."""
    state = dict(read_weights(folder / TENSORS, "model"))
    if has_adapters(model):
        save_adapter(folder, model, state)
    else:
        model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
