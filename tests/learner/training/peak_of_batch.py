"""Trains on a batch of episodes with many segments, and prints measured and planned bytes.

The process is its own, so that its largest resident memory is that of the step.
"""

import json
import sys
from pathlib import Path

import numpy as np

from common.config.learner import Attention, ControllerSection, Layout, LearnerSection, Precision
from common.wire.messages import Trajectory
from learner.batch.batching import Sample
from tests.learner.policy.peak_of_row import VOCAB, peaks_of_step, save_policy
from tools.simulator.workload import synthetic_trajectory

TURN = 100  # Tokens of a turn; the last ten are sampled.
CONTEXT = 1_000
PER_SEGMENT = CONTEXT // TURN  # Turns of a segment.


def episode(num_turns: int, member: int) -> Trajectory:
    """Return an episode whose context begins again after every `PER_SEGMENT` turns."""
    places = np.arange(num_turns * TURN)
    mask = places % TURN >= TURN - 10
    rng = np.random.default_rng(member)
    return synthetic_trajectory(
        rng.integers(0, VOCAB, len(places)),
        mask,
        group_id="g",
        member=member,
        num_turns=num_turns,
        logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        turn_ids=(places // TURN).astype(np.int32),
        invalid_turns=np.zeros(num_turns, dtype=np.bool_),
        turn_scores=np.zeros(num_turns, dtype=np.float32),
        segment_starts=np.arange(0, len(places), CONTEXT, dtype=np.int32),
    )


def samples_of(num_episodes: int, num_turns: int) -> list[Sample]:
    """Return a batch of episodes with alternating advantages."""
    return [
        Sample(trajectory=episode(num_turns, member), advantage=1.0 - 2 * (member % 2))
        for member in range(num_episodes)
    ]


def main(folder: Path, num_episodes: int, num_turns: int, microbatch: int) -> None:
    save_policy(folder, hidden_size=128, intermediate_size=512, most=CONTEXT)
    learner = LearnerSection(
        device="cpu",
        num_threads=1,
        precision=Precision.FP32,
        layout=Layout.PACKED,
        attention=Attention.FUSED,
        max_tokens_per_microbatch=microbatch,
        controller=ControllerSection(skip_step=False),
    )
    first = samples_of(1, PER_SEGMENT)
    batch = samples_of(num_episodes, num_turns)
    sizes = peaks_of_step(learner, folder, most=CONTEXT, first=first, batch=batch)
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in batch)
    sys.stdout.write(json.dumps({**sizes, "tokens": num_tokens}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
