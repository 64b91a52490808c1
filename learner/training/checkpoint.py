"""Checkpoints: the policy as a model directory, the trainer's state beside it, a marker last."""

import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.config.learning import LearnerSection
from common.errors import ConfigError
from learner.policy.lora import has_adapters, save_adapter

logger = logging.getLogger(__name__)

_MARKER = "COMPLETE"  # written last; a folder without it is the remains of a crash
_PREFIX = "step-"
_ASIDE = ".old"  # suffix of a checkpoint while another of the same version takes its place


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    version: int
    state: dict[str, Any]


def newest_checkpoint(root: Path) -> Path | None:
    """Return the newest complete checkpoint below `root`, None if there is none.

    One that was set aside counts, if its replacement never came.
    """
    complete = [path for path in root.glob(f"{_PREFIX}*") if (path / _MARKER).exists()]
    return max(complete, key=_age, default=None)


def _age(folder: Path) -> tuple[int, bool]:
    number = folder.name.removeprefix(_PREFIX).removesuffix(_ASIDE)
    return int(number), not folder.name.endswith(_ASIDE)


def load_checkpoint(folder: Path) -> Restored:
    """Return a checkpoint's content. Raises: ConfigError: the folder is no complete checkpoint."""
    if not (folder / _MARKER).exists():
        raise ConfigError(f"{folder} is no complete checkpoint")
    version = json.loads((folder / _MARKER).read_text())["version"]
    state = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    return Restored(version=version, state=state)


class Checkpoints:
    """Saves every so many steps or seconds, keeps the newest few.

    Example (every 25 steps, the newest 3): after step 100 there are step-50, step-75 and step-100.
    A crash while step-100 is written leaves a folder without marker, which nobody reads.
    """

    def __init__(self, root: Path, cfg: LearnerSection) -> None:
        self._root = root
        self._cfg = cfg
        self._saved_at = time.monotonic()
        self._saved_version = -1
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

    def save(self, version: int, *, model: Any, tokenizer: Any, state: dict[str, Any]) -> Path:
        """Write a checkpoint and return its folder; older ones beyond `keep` are removed."""
        if version == self._saved_version:
            return self._folder(version)
        started = time.monotonic()
        folder = self._folder(version)
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        if has_adapters(model):
            save_adapter(partial, model, state["model"])
        else:
            model.save_pretrained(partial, state_dict=state["model"])
        tokenizer.save_pretrained(partial)
        torch.save(state, partial / "trainer.pt")
        (partial / _MARKER).write_text(json.dumps({"version": version}))
        _sync_tree(partial)
        if folder.exists():
            aside = folder.with_name(f"{folder.name}{_ASIDE}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        partial.rename(folder)
        self._saved_at, self._saved_version = time.monotonic(), version
        self._remove_old()
        logger.info("saved version=%d took_s=%.2f", version, time.monotonic() - started)
        return folder

    def _folder(self, version: int) -> Path:
        return self._root / f"{_PREFIX}{version:06d}"

    def _remove_old(self) -> None:
        for path in self._root.glob(f"{_PREFIX}*{_ASIDE}"):
            shutil.rmtree(path)
        for path in self._complete()[: -self._cfg.keep_checkpoints]:
            shutil.rmtree(path)

    def _complete(self) -> list[Path]:
        return sorted(p for p in self._root.glob(f"{_PREFIX}*") if (p / _MARKER).exists())


def _sync_tree(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
