"""The learning curve: evaluations during training, from the journal, with their versions."""

import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from common.wire.messages import Trajectory
from learner.journal.journal import read_journal
from tools.evaluate.intervals import wilson_interval
from tools.report.model import CurvePoint

_ID = re.compile(r"eval-step-(\d+)-model/")


def eval_curve(journal: Path) -> list[CurvePoint]:
    """Return the evaluations in the order of steps.

    An evaluation without any completed episode has no point.

    Raises: WireError: the journal is damaged before its end.
    """
    found: dict[int, dict[str, Trajectory]] = defaultdict(dict)
    for _, trajectory in read_journal(journal):
        match = _ID.match(trajectory.episode_id)
        if match is None:
            continue
        plays = found[int(match[1])]
        known = plays.get(trajectory.episode_id)
        if known is None or known.end_reason.is_infrastructure_failure:
            plays[trajectory.episode_id] = trajectory
    points = (_point(step, list(plays.values())) for step, plays in sorted(found.items()))
    return [point for point in points if point is not None]


def _point(step: int, plays: list[Trajectory]) -> CurvePoint | None:
    """Return the point of one evaluation; None if no token was sampled."""
    good = [play for play in plays if not play.end_reason.is_infrastructure_failure]
    sampled = [play.versions[play.loss_mask] for play in good]
    tokens = np.concatenate(sampled) if sampled else np.array([], dtype=np.int32)
    if not len(tokens):
        return None
    num_solved = sum(play.is_success for play in good)
    return CurvePoint(
        step=step,
        num=len(good),
        num_failed=len(plays) - len(good),
        success=num_solved / len(good),
        ci95=wilson_interval(num_solved, len(good)),
        score=sum(play.reward for play in good) / len(good),
        first_version=int(tokens.min()),
        last_version=int(tokens.max()),
        own_version_frac=float((tokens == step).mean()),
        mixed_frac=sum(len(np.unique(each)) > 1 for each in sampled) / len(good),
    )
