"""Stores the batch of a step whose loss was not finite, for inspection."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from learner.batch.batching import Sample

logger = logging.getLogger(__name__)

KEPT = 5  # Largest number of stored batches: a run that keeps failing must not fill the disk.


def dump_batch(run_root: Path, version: int, samples: Sequence[Sample]) -> Path | None:
    """Write a batch to `bad_batches/version-<v>/` of a run; None if there are `KEPT` already.

    `samples.jsonl` lists each episode with its reward; `<row>.npz` holds its arrays.
    """
    folder = run_root / "bad_batches" / f"version-{version}"
    if folder.exists() or len(list(folder.parent.glob("version-*"))) >= KEPT:
        return None
    folder.mkdir(parents=True)
    lines: list[str] = []
    for row, sample in enumerate(samples):
        t = sample.trajectory
        np.savez_compressed(
            folder / f"{row}.npz",
            token_ids=t.token_ids,
            loss_mask=t.loss_mask,
            logprobs=t.logprobs,
            versions=t.versions,
            turn_ids=t.turn_ids,
            advantages=sample.token_advantages(),
        )
        facts = {"row": row, "episode_id": t.episode_id, "item_id": t.item_id, "reward": t.reward}
        if sample.num_episode_tokens:
            facts["segment"] = sample.row
        lines.append(json.dumps(facts))
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    logger.error("wrote bad batch version=%d folder=%s samples=%d", version, folder, len(lines))
    return folder
