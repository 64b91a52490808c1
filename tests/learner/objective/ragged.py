"""A small batch that has what real ones have: ragged episodes of several turns at several lags."""

from dataclasses import replace
from functools import cache

import numpy as np

from common.wire.messages import EndReason, Trajectory
from learner.ingest.buffer import Group
from tests.learner.builders import make_trajectory

VERSION = 3  # The version of the trained policy.


@cache
def groups() -> tuple[Group, ...]:
    """Build ragged episodes: turns of no token and of one, a group of equal rewards, one alone.

    Some are cut short, with a last observation or without. In one group scores begin above 0.
    """
    rng = np.random.default_rng(5)
    built: list[Group] = []
    lengths = [[(2, 1, 3), (0, 2), (1,)], [(1, 1, 0, 2), (3, 2, 1)], [(2, 1), (1, 2)], [(2, 0, 1)]]
    rewards = [[0.25, 1.0, 0.5], [0.0, 0.75], [0.5, 0.5], [0.25]]
    for number, (sizes, worth) in enumerate(zip(lengths, rewards, strict=True)):
        members: list[Trajectory] = []
        for member, turns in enumerate(sizes):
            mask, turn_ids = [0], [0]
            for turn, size in enumerate(turns):
                mask += [0] + [1] * size
                turn_ids += [turn] * (size + 1)
            if number % 2:
                mask, turn_ids = [*mask, 0], [*turn_ids, len(turns) - 1]
            ids = rng.integers(0, 4, size=len(mask)).tolist()
            logprobs = (-rng.integers(16, 160, size=sum(mask)) / 64).tolist()
            plain = make_trajectory(
                ids, mask, logprobs=logprobs, group_id=f"g{number}", member=member
            )
            versions = np.where(plain.loss_mask, rng.integers(0, VERSION + 1, len(mask)), -1)
            invalid = rng.random(len(turns)) < 0.4
            rises = np.sort(rng.integers(0, 5, size=len(turns)) / 4 * worth[member])
            members.append(
                replace(
                    plain,
                    env=f"env{number % 2}",
                    item_id=f"task-{number}",
                    end_reason=EndReason.HORIZON if worth[member] < 0.5 else EndReason.DONE,
                    num_turns=len(turns),
                    reward=worth[member],
                    start_score=0.25 if number == 1 else 0.0,
                    turn_scores=np.append(rises[:-1], worth[member]).astype(np.float32),
                    invalid_turns=invalid,
                    num_invalid_actions=int(invalid.sum()),
                    turn_ids=np.array(turn_ids, dtype=np.int32),
                    turn_states=np.array([0, 1, 1, 0][: len(turns)], dtype=np.int32),
                    versions=versions.astype(np.int32),
                )
            )
        built.append(Group(group_id=f"g{number}", members=members))
    return tuple(built)
