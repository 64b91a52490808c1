"""Laws of games that are played at a real hub."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from actor.rollout.env_client import HubClient
from actor.rollout.episode import Render, StreamingAct
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from actor.seats.seats import Seats
from common.wire.messages import EndReason, PolicyKind, Trajectory
from learner.journal.journal import read_journal
from tests.actor.seats.nim_sessions import config_of
from tests.envhub.any_text import TIMEOUT_S, serving
from tools.evaluate.play import EpisodePlayer, PlannedEpisode, PlayJob, play

NUM_GAMES = 40


def expert(plan: PlannedEpisode) -> tuple[StreamingAct, Render]:
    render = ScriptedRender()
    policy = ScriptedPolicy(PolicyKind.EXPERT, seed=plan.episode_id, render=render)
    return cast(StreamingAct, policy.act), render  # No program plays here.


def games_of(url: str, folder: Path, **seats: list[str]) -> list[Trajectory]:
    """Return games of the expert."""
    plans = [
        PlannedEpisode(
            episode_id=f"p/{number}",
            env="nim",
            item_id=f"OnePile-test-{number}",
            seed=number,
            horizon=21,
        )
        for number in range(NUM_GAMES)
    ]
    job = PlayJob(
        plans=plans,
        hub_url=url,
        token=None,
        env_timeout_s=TIMEOUT_S,
        style="compact",
        episode_timeout_s=TIMEOUT_S,
        journal=folder,
    )
    player = EpisodePlayer(
        policy=expert,
        max_concurrent=8,
        max_tokens=1000,
        turn_tokens=1,
        seats=Seats(config_of(**seats)),
    )
    asyncio.run(play(job, player))
    return [each for _, each in read_journal(folder)]


@pytest.mark.slow
def test_expert_wins_at_a_real_hub_from_both_seats(tmp_path: Path) -> None:
    with serving("nim") as url:
        played = games_of(url, tmp_path)
    assert {each.end_reason for each in played} == {EndReason.DONE}
    assert len(played) == NUM_GAMES
    assert sum(each.reward for each in played) >= 0.9 * NUM_GAMES  # Perfect play wins 99 %.
    names = {name for each in played for name in each.metrics}
    assert names == {"seat_0_reward", "seat_1_reward", "against_random_reward"}
    assert all(each.num_turns <= 11 for each in played)  # The other seat has its own turns.


@pytest.mark.slow
def test_perfect_opponents_share_the_games(tmp_path: Path) -> None:
    with serving("nim") as url:
        played = games_of(url, tmp_path, eval_opponents=["expert"])
    # The first seat loses exactly from multiples of 4. Each game has one winner.
    assert 0 < sum(each.reward for each in played) < NUM_GAMES
    again = {each.item_id: each.reward for each in played}
    assert len(again) == NUM_GAMES


def test_session_without_seats_has_one_player() -> None:
    async def run(url: str) -> None:
        async with HubClient(url, token=None, timeout_s=TIMEOUT_S) as hub:
            game = await hub.open("nim", "OnePile-test-0", seed=0, style="compact")
            assert (game.num_seats, game.first_seat) == (2, 0)
            result = await game.step("take 1")
            assert (result.seat, result.seat_rewards) == (1, [0.0, 0.0])
            alone = await hub.open("recall", "Signs-test-0", seed=0, style="compact")
            assert alone.num_seats == 1
            assert (await alone.step("turn left")).seat_rewards == []
            for each in (game, alone):
                await each.close()

    with serving("nim", "recall") as url:
        asyncio.run(run(url))
