"""Law of a run with many actors and very long episodes: all roles are real but the engines."""

from pathlib import Path

import pytest

from learner.journal.journal import read_journal
from tests.end_to_end.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_ACTORS = 16
NUM_TURNS = 40
LENGTHS = (750, 800)  # Sampled tokens of a turn.
TOKENS = NUM_TURNS * LENGTHS[0]  # 30,000 at least in each episode.
OVERRIDES = (
    'envhub.envs=["benchmarks.envhub.slow:make_spec"]',
    "tasks=[{env: slow, subset: wait}]",
    f'envs.plugins={{median_s: "0.01", sigma: "0.2", num_turns: "{NUM_TURNS}", tail_frac: "0"}}',
    "actor.max_model_len=40000",
    "actor.max_turn_tokens=1024",
    "groups.per_step=2",
)


def test_sixteen_actors_deliver_episodes_of_30000_tokens(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, *OVERRIDES, horizon=NUM_TURNS)
    try:
        fleet.start_centre()
        for number in range(NUM_ACTORS):
            fleet.add(number, 2, token_s=0.0005, lengths=LENGTHS)
        fleet.wait_until(lambda: len(fleet.finished()) == NUM_ACTORS, timeout_s=800)
        fleet.wait_until(lambda: fleet.ledger()["version"] >= 2, timeout_s=800)
        fleet.check_books()
        episodes = [t for _, t in read_journal(fleet.learner_dir.journal)]
    finally:
        fleet.close()
    assert len(episodes) >= 2 * NUM_ACTORS
    assert min(int(t.loss_mask.sum()) for t in episodes) >= TOKENS
    assert {t.num_turns for t in episodes} == {NUM_TURNS}
