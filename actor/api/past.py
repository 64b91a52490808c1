"""Past versions of a run as opponents: an engine that serves one after another."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from actor.policy import PolicyConfig
from common.join.shards import is_whole
from common.store.run_dir import RunDir

POLL_S = 5.0


def past_versions(run_dir: RunDir) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first.

    Checkpoints with files on other nodes are left out: no engine can load them.
    """
    complete = [path.parent for path in run_dir.checkpoints.glob("step-*/COMPLETE")]
    return sorted(filter(is_whole, complete), key=lambda folder: folder.name)


def with_past_version(cfg: PolicyConfig, run_dir: RunDir) -> PolicyConfig:
    """Return a configuration whose model is a past version of the run, or its start.

    All versions are equally probable. The choice depends on the role and the newest version.
    """
    versions = past_versions(run_dir)
    newest = versions[-1].name if versions else ""
    drawn = random.Random(f"{cfg.policy.role}/{newest}")
    folder = drawn.choice([Path(cfg.model.path), *versions])
    return replace(cfg, model=replace(cfg.model, path=str(folder)))


async def newer_version(
    run_dir: RunDir,
    *,
    after_s: float,
    now: Callable[[], float] = time.monotonic,
    poll_s: float = POLL_S,
) -> None:
    """Wait until `after_s` seconds have passed and the run has a version that it has not now."""
    known = past_versions(run_dir)[-1:]
    started = now()
    while now() - started < after_s or past_versions(run_dir)[-1:] == known:
        await asyncio.sleep(poll_s)
