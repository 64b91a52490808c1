"""Law of a run with many actors and very long episodes, which share one real engine."""

from pathlib import Path
from typing import Any

import pytest

from learner.journal.journal import read_journal
from scheduler.curriculum.user_functions import ItemDraw
from tests.actor.engine.test_openai_app import served
from tests.end_to_end.fleet import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

NUM_ACTORS = 16
NUM_TURNS = 90  # Each observation of `rooms` has 338 tokens or more: 30,000 in an episode.
TOKENS = 30_000
CONTEXT = 2_048
POLICY = "configs/policies/tiny"
OVERRIDES = (
    "tasks=[{env: rooms, subset: March}]",
    "curriculum.kind=tests.end_to_end.test_long_episodes:choose_long_item",
    f"model.path={POLICY}",
    f"actor.max_model_len={CONTEXT}",
    "actor.context=window",
    "actor.context_turns=4",
    "actor.max_turn_tokens=8",
    "actor.episode_timeout_s=850",
    "actor.env_timeout_s=300",
    "envhub.session_idle_s=850",
    "groups.size=8",
    "groups.per_step=2",
)


def choose_long_item(draw: ItemDraw, cfg: Any) -> tuple[str, int]:
    """Return an item with 251 to 500 rooms: a quarter of the items has so many."""
    return "rooms/March", 4 * draw.number + 3


def test_sixteen_actors_deliver_episodes_of_30000_tokens(tmp_path: Path) -> None:
    engine = (f"model.path={POLICY}", "actor.kv_cache_gib=1")
    with served(tmp_path, *engine, num_slots=NUM_ACTORS) as (url, _):
        fleet = Fleet(tmp_path, *OVERRIDES, horizon=NUM_TURNS)
        try:
            fleet.start_centre()
            for number in range(NUM_ACTORS):
                fleet.add(number, 1, url=url)
            fleet.wait_until(lambda: len(fleet.finished()) == NUM_ACTORS, timeout_s=800)
            fleet.wait_until(lambda: fleet.ledger()["version"] >= 1, timeout_s=800)
            fleet.check_books()
            episodes = [t for _, t in read_journal(fleet.learner_dir.journal)]
        finally:
            fleet.close()
    assert min(len(t.token_ids) for t in episodes) >= TOKENS
    assert {t.num_turns for t in episodes} == {NUM_TURNS}
    logprobs = [t.logprobs[t.loss_mask] for t in episodes]
    assert all(each.max() <= 0 and each.std() > 0 for each in logprobs)
