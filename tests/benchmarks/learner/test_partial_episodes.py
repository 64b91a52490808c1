"""Laws of the virtual run that the suite `partial-episodes` measures."""

import pytest

from benchmarks.learner.partial_episodes import ARMS, Result, VirtualRun


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    """Short runs of all arms."""
    return {name: VirtualRun(arm, seed=0, num_ticks=120).run() for name, arm in ARMS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_parts_leave_fewer_tokens_stale_than_whole_episodes(
    results: dict[str, Result], name: str
) -> None:
    off, turns, whole = (results[f"{name}, {arm}"] for arm in ("off", "turns", "whole episodes"))
    assert off.num_stale_long == off.num_stale > 0
    assert turns.num_stale < off.num_stale
    assert whole.num_stale == 0


@pytest.mark.slow
def test_a_critic_leaves_no_token_stale(results: dict[str, Result]) -> None:
    assert results["ppo, turns"].num_stale == 0


@pytest.mark.slow
def test_tokens_of_an_ended_run_are_trained_or_stale(results: dict[str, Result]) -> None:
    for name, result in results.items():
        num_counted = result.num_trained + result.num_stale
        if name == "ppo, turns":  # It has trained turns of running episodes, too.
            assert num_counted > result.num_sampled
        elif name.startswith("ppo"):
            assert num_counted == result.num_sampled
        else:  # Groups without signal are filtered.
            assert num_counted <= result.num_sampled
