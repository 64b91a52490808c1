"""A run directory as a run leaves it: the product's own writers, no process."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml

from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.messages import EndReason, EpisodeKind, Trajectory
from learner.journal.journal import JournalWriter
from learner.journal.metrics import MetricsWriter
from tests.learner import builders

TOKENIZER = ROOT / "configs" / "policies" / "tiny" / "tokenizer.json"
NUM_MEMBERS = 4


def episode(number: int, *, text_ids: Sequence[int] = (5, 6, 7, 8, 9, 10, 11, 12)) -> Trajectory:
    """Return a member of group number // 4; every third is solved, versions change in a turn."""
    ids = [*text_ids]
    num, group = len(ids), f"g{number // NUM_MEMBERS:07d}"
    third = max(1, num // 4)
    mask = [int(third <= i < 2 * third or i >= 3 * third) for i in range(num)]
    trajectory = builders.make_trajectory(ids, mask, group_id=group)
    versions = np.where(np.array(mask, bool), 3 + (np.arange(num) > num // 3), -1).astype(np.int32)
    is_solved = number % 3 == 0
    return replace(
        trajectory,
        episode_id=f"{group}/{number % NUM_MEMBERS}",
        member=number % NUM_MEMBERS,
        env="babyai" if number % 2 else "maze",
        item_id=f"{'GoTo' if number % 5 else 'Open'}-train-{number // NUM_MEMBERS}",
        horizon=10 + 10 * (number // 20),
        reward=float(is_solved),
        is_success=is_solved,
        end_reason=EndReason.DONE if is_solved else EndReason.HORIZON,
        num_turns=2,
        kind=EpisodeKind.TRAIN,
        versions=versions,
        turn_ids=np.array([int(i >= 2 * third) for i in range(num)], np.int32),
        num_invalid_actions=int(not is_solved),
        invalid_turns=np.array([False, not is_solved]),
        turn_scores=np.array([0.0, float(is_solved)], np.float32),
    )


def make_run(root: Path, num: int = 40, *, num_steps: int = 12) -> RunDir:
    """Write a run of `num` episodes; the first group is trained, the second filtered."""
    run_dir = RunDir(root=root)
    root.mkdir(parents=True)
    config = {
        "run": {"name": root.name, "seed": 7},
        "train": {"mode": "async", "num_steps": num_steps},
        "algorithm": {"baseline": "leave_one_out", "normalize_std": False},
        "envhub": {"token": "swordfish"},
    }
    run_dir.config.write_text(yaml.safe_dump(config), encoding="utf-8")
    run_dir.tokenizer.mkdir()
    shutil.copyfile(TOKENIZER, run_dir.tokenizer / "tokenizer.json")
    append(run_dir, *(episode(i) for i in range(num)))
    first, second = ([f"g{g:07d}/{m}" for m in range(NUM_MEMBERS)] for g in (0, 1))
    step = {"version": 1, "groups": [first], "outcomes": [[i, "trained", ""] for i in first]}
    run_dir.steps.write_text(json.dumps(step) + "\n", encoding="utf-8")
    lines = [[name, "filtered", "zero_variance", 1] for name in second]
    lines += [["g0000099/0", "failed", "lease_expired", 1]]
    run_dir.outcomes.write_text(
        "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8"
    )
    ledger = {"issued": num + 1, "trained": 4, "filtered": 4, "stale": 0, "failed": 1}
    run_dir.ledger.write_text(
        json.dumps({**ledger, "in_flight": num - 8, "lost": 0}), encoding="utf-8"
    )
    run_dir.status.write_text(
        json.dumps({"phase": "train", "version": num_steps, "actors": []}), encoding="utf-8"
    )
    metrics = MetricsWriter(run_dir, [])
    for number in range(1, num_steps + 1):
        metrics.log(number, step_metrics(number))
    metrics.close()
    return run_dir


def append(run_dir: RunDir, *trajectories: Trajectory) -> None:
    """Append to a run's journal as the learner does."""
    writer = JournalWriter(run_dir.journal)
    for trajectory in trajectories:
        writer.append(trajectory)
    writer.close()


def step_metrics(step: int) -> dict[str, float]:
    """Return what a learner logs of one step, in parts."""
    return {
        "reward/success": min(1.0, 0.2 + 0.05 * step),
        "tasks/success/babyai/GoTo": min(1.0, 0.3 + 0.05 * step),
        "episodes/truncated_frac": 0.4,
        "policy/entropy": 1.0 / step,
        "offpolicy/ess_frac": 0.95,
        "offpolicy/lag_mean": 1.0,
        "offpolicy/lag_0_tokens": 40.0,
        "offpolicy/lag_1_tokens": 120.0,
        "loss/policy": 0.01 * step,
        "horizon/value": 10.0 if step < 6 else 20.0,
        "train/step_s": 0.5,
        "wait/batch_s": 0.4,
        "publish/total_s": 0.1,
        "actor/tokens_per_s": 900.0,
        "train/tokens_per_s": 1200.0,
    }
