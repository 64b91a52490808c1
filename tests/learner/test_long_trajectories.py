"""Laws of the work for one turn: it does not grow with the number of turns of the episode."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from common.config.load import load_config
from common.segments import Aside, as_rows
from common.wire.codec import decode, encode
from common.wire.messages import Trajectory
from learner.batch.batching import Sample, episodes_of, rows_of
from learner.ingest.buffer import Group
from learner.ingest.intake import refusal
from learner.journal.texts import TokenIdDecoder, segments_of
from learner.objective.advantages import samples_of
from tools.dashboard.reading.run_source import recorded_of
from tools.simulator.workload import synthetic_trajectory

FEW, MANY = 100, 2_000
PER_SEGMENT = 5  # Turns of a segment, which begins with a summary.
TURN = 60  # Tokens of a turn; the last ten are sampled.
ROUNDS = 3
MAX_GROWTH = 2.5  # Quadratic work would grow by a factor of 20.


def episode(num_turns: int, *, member: int = 0) -> Trajectory:
    """Return an episode with a segment and a summary for every few turns."""
    places = np.arange(num_turns * TURN)
    mask = places % TURN >= TURN - 10
    starts = np.arange(0, num_turns * TURN, PER_SEGMENT * TURN, dtype=np.int32)
    ends = starts + TURN
    kinds = np.full(len(starts), Aside.SUMMARY)
    return synthetic_trajectory(
        places % 97,
        mask,
        group_id="g",
        member=member,
        reward=float(member % 2),
        num_turns=num_turns,
        turn_ids=(places // TURN).astype(np.int32),
        invalid_turns=np.zeros(num_turns, dtype=np.bool_),
        turn_scores=np.zeros(num_turns, dtype=np.float32),
        turn_states=np.arange(num_turns, dtype=np.int32),
        turn_actions=np.arange(num_turns, dtype=np.int32) % 3,
        segment_starts=starts,
        asides=np.stack([ends - 10, ends, kinds], axis=1).astype(np.int32).ravel(),
    )


class Plain(TokenIdDecoder):
    def text(self, token_ids: Any) -> str:
        return f"{len(token_ids)}"


def credited(trajectory: Trajectory) -> Any:
    algorithm = load_config("quickstart", ["algorithm.state_credit=gigpo"]).algorithm
    members = [trajectory, episode(trajectory.num_turns, member=1)]
    return samples_of([Group(group_id="g", members=members)], algorithm)


WORK: dict[str, Callable[[Trajectory], Any]] = {
    "wire": lambda t: decode(encode(t)),
    "intake": lambda t: refusal(t, learner_version=5, max_group_size=8, vocab_size=100),
    "rows": as_rows,
    "credit": credited,
    "samples": lambda t: episodes_of(rows_of([Sample(trajectory=t, advantage=1.0)])),
    "episode page": lambda t: segments_of(t, Plain()),
    "replay page": lambda t: recorded_of(t, Plain(), style="compact"),
}


def seconds(work: Callable[[], Any]) -> Iterator[float]:
    """Yield the CPU time of several rounds of some work."""
    for _ in range(ROUNDS):
        started = time.thread_time()
        work()
        yield time.thread_time() - started


@pytest.mark.parametrize("name", WORK)
def test_work_of_a_turn_does_not_grow_with_the_episode(name: str) -> None:
    short, long = episode(FEW), episode(MANY)
    of_short = min(seconds(lambda: [WORK[name](short) for _ in range(MANY // FEW)]))
    of_long = min(seconds(lambda: WORK[name](long)))
    assert of_long <= MAX_GROWTH * of_short
