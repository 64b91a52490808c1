"""Laws of many long episodes at once: their actor is killed late, and another continues them."""

from pathlib import Path

import pytest

from benchmarks.long_episodes import CONTEXT, MAX_GROWTH, MAX_REPEATED, LongEpisodes, measure
from common.wire.messages import EndReason

MEMORY = 1_200  # Bytes of an actor for a turn of an episode, which has some 140 tokens.


def check(played: LongEpisodes, *, num_episodes: int, num_turns: int) -> None:
    """Check that no episode is lost or repeated, and that each prompt fits into the context."""
    ledger = played.ledger
    assert ledger["trained"] >= len(played.episodes) == num_episodes
    assert ledger["failed"] == ledger["stale"] == ledger["lost"] == 0
    assert ledger["reissued"] == num_episodes
    assert {episode.num_turns for episode in played.episodes} == {num_turns}
    assert {episode.end_reason for episode in played.episodes} == {EndReason.HORIZON}
    assert {episode.attempt for episode in played.episodes} == {1}
    assert played.longest_prompt <= CONTEXT
    assert played.num_sampled <= (num_turns + MAX_REPEATED) * num_episodes


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_episodes_continue_in_another_actor(tmp_path: Path) -> None:
    played = measure(tmp_path, num_episodes=16, num_turns=60, kill_at=40)
    check(played, num_episodes=16, num_turns=60)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(7200)
def test_late_turn_of_256_episodes_costs_as_much_as_an_early_one(tmp_path: Path) -> None:
    played = measure(tmp_path)
    check(played, num_episodes=256, num_turns=1_000)
    for role in ("actor", "hub"):
        early = played.cpu_of_turn(role, 100, 300)
        assert played.cpu_of_turn(role, 700, 900) <= MAX_GROWTH * early
    for role in ("hub", "intake", "scheduler"):
        assert played.near(900).rss_bytes[role] <= 1.1 * played.near(100).rss_bytes[role]
    grown = played.near(900).rss_bytes["actor"] - played.near(100).rss_bytes["actor"]
    assert grown <= MEMORY * 800 * 256
    assert min(len(episode.token_ids) for episode in played.episodes) >= 100_000
