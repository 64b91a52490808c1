"""Laws of episodes in environments with seats, against real games of nim."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.episode import Act, EnvSession, Render, Turn, run_episode
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from actor.seats.seats import MAX_EMPTY_GAMES, Seats, opponent_of, seat_of, task_of
from common.config.actor import ActorSection
from common.errors import ConfigError, EngineError, EnvError, EnvTimeout, HubLost
from common.wire.messages import EndReason, EpisodeKind, Lease, PolicyKind, Trajectory
from learner.ingest.intake import refusal
from tests.actor.rollout.playing import Count, Letters, go_on
from tests.actor.seats.nim_sessions import NimSession, config_of, lease_of, opening, saying
from tests.actor.toy_servers import ToyEndpoint, serve

FIRST = (0,)  # The policy's only seat in most tests.


def played(
    cfg: ActorSection,
    sessions: list[Any],
    policy: tuple[Act, Render],
    *,
    lease: Lease | None = None,
    own: tuple[Act, Render] | None = None,
    instruction: str = "",
    **more: Any,
) -> Trajectory:
    """Play the leased seat with `policy`, and the opponent `self` with `own`."""
    lease = lease or lease_of()

    async def run() -> Trajectory:
        seats = Seats(cfg)
        try:
            return await run_episode(
                lease,
                open_session=seats.opener(
                    lease,
                    opening(sessions),
                    make_policy=lambda _: own or policy,
                    task=(instruction, ""),
                    texts={},
                ),
                act=policy[0],
                render=policy[1],
                instruction=instruction,
                max_tokens=1000,
                turn_tokens=16,
                actor="a",
                **more,
            )
        finally:
            await seats.close()

    return asyncio.run(run())


def text_of(ids: Any) -> str:
    return "".join(chr(i) for i in ids if i)


def test_tokens_of_an_opponent_are_in_no_trajectory() -> None:
    session = NimSession()  # 17 objects.
    start = session.first_observation
    got = played(config_of(trained=[0]), [session], saying("take 1"), own=saying("take 3"))
    size = int(start.removeprefix("left "))
    sampled = text_of(got.token_ids[got.loss_mask])
    assert sampled == "take 1" * got.num_turns
    assert [seat for seat, _ in session.moves] == [n % 2 for n in range(len(session.moves))]
    assert {action for seat, action in session.moves if seat == 1} == {"take 3"}
    shown = text_of(got.token_ids[~got.loss_mask])
    assert shown.startswith(f"left {size}took 3\nleft {size - 4}")
    assert "take 3" not in shown
    assert refusal(got, learner_version=3, max_group_size=8) == ""


@pytest.mark.parametrize("seat", [0, 1])
def test_reward_is_that_of_the_episodes_own_seat(seat: int) -> None:
    session = NimSession()
    expert = ScriptedRender()
    policy = ScriptedPolicy(PolicyKind.EXPERT, seed="x", render=expert).act, expert
    own = saying("take 1", "cheat")
    got = played(config_of(trained=[seat]), [session], policy, own=own)
    # The opponent's illegal move ends the game in favour of this seat.
    assert (got.end_reason, got.reward, got.is_success) == (EndReason.DONE, 1.0, True)
    lost = played(config_of(trained=[seat]), [NimSession()], saying("cheat"), own=saying("take 1"))
    assert (lost.end_reason, lost.reward, lost.is_success) == (EndReason.DONE, 0.0, False)
    assert lost.metrics == {f"seat_{seat}_reward": 0.0, "against_self_reward": 0.0}
    assert lost.invalid_turns.tolist() == [True]


def test_illegal_move_of_the_opponent_is_no_invalid_turn() -> None:
    got = played(config_of(trained=[0]), [NimSession()], saying("take 1"), own=saying("cheat"))
    assert (got.num_turns, got.num_invalid_actions, got.reward) == (1, 0, 1.0)


def test_members_of_a_group_share_seat_and_opponent() -> None:
    names = ["self", "random", "expert"]
    seats, opponents = Counter[int](), Counter[str]()
    for number in range(300):
        group = f"g-{number}"
        members = [lease_of(group, member=i, attempt=i % 2) for i in range(8)]
        (seat,) = {seat_of(each, [], 2) for each in members}
        (opponent,) = {opponent_of(each, names) for each in members}
        seats[seat] += 1
        opponents[opponent] += 1
    assert sorted(seats) == [0, 1]
    assert min(seats.values()) > 110  # 150 are expected, with a standard deviation of 9.
    assert min(opponents.values()) > 65  # 100 are expected, with a standard deviation of 8.


def test_seat_of_an_evaluation_depends_on_item_and_sample() -> None:
    leases = [
        lease_of(kind=EpisodeKind.EVAL, item_id=f"OnePile-test-{i}", seed=k)
        for i in range(20)
        for k in range(2)
    ]
    assert {seat_of(each, [], 2) for each in leases} == {0, 1}
    for lease in leases:
        other = replace(lease, episode_id="another/run", group_id="another")
        assert seat_of(lease, [], 2) == seat_of(other, [], 2)


def test_trained_lists_the_only_seats_that_are_played() -> None:
    leases = [lease_of(f"g-{i}") for i in range(50)]
    assert {seat_of(each, [1], 2) for each in leases} == {1}
    assert {seat_of(each, [0, 2], 3) for each in leases} == {0, 2}
    with pytest.raises(ConfigError, match=r"trained=\[2\]: nim has the seats 0 to 1, not 2"):
        seat_of(leases[0], [2], 2)


def test_opponents_of_an_evaluation_are_its_own() -> None:
    cfg = config_of(trained=[0], opponents=["self"], eval_opponents=["expert"])
    lease = lease_of(kind=EpisodeKind.EVAL)
    got = played(cfg, [NimSession()], saying("take 1"), own=saying("cheat"), lease=lease)
    assert got.metrics == {"seat_0_reward": 0.0, "against_expert_reward": 0.0}


def test_scripted_expert_beats_random_play() -> None:
    won = 0.0
    for number in range(40):
        render = ScriptedRender()
        policy = ScriptedPolicy(PolicyKind.EXPERT, seed="x", render=render).act, render
        lease = lease_of(f"g-{number}")
        won += played(config_of(opponents=["random"]), [NimSession()], policy, lease=lease).reward
    assert won >= 36  # Perfect play wins 99 %.


def test_unreachable_opponent_is_an_infrastructure_failure() -> None:
    cfg = config_of(
        trained=[0], opponents=["url"], url="http://127.0.0.1:1/v1", model="m", max_tries=1
    )
    session = NimSession()
    got = played(cfg, [session], saying("take 1"))
    assert (got.end_reason, got.reward) == (EndReason.ABORTED, 0.0)
    assert "the opponent url in seat 1 ended as aborted" in got.error
    assert (got.metrics, session.num_closed) == ({}, 1)


def test_opponent_with_a_full_context_gives_no_reward() -> None:
    class LongRender(Letters):
        def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
            return [1] * 5000

    long = saying("take 1")[0], LongRender()
    got = played(config_of(trained=[0]), [NimSession()], saying("take 1"), own=long)
    assert (got.end_reason, got.reward) == (EndReason.ABORTED, 0.0)
    assert "ended as context_full" in got.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EnvError("broken"), EndReason.ENV_ERROR), (EnvTimeout("late"), EndReason.ENV_TIMEOUT)],
)
def test_hub_failure_in_an_opponents_move_is_the_episodes(
    error: Exception, reason: EndReason
) -> None:
    session = NimSession(fails_at=2, error=error)
    got = played(config_of(trained=[0]), [session], saying("take 1"))
    assert (got.end_reason, got.reward) == (reason, 0.0)
    assert str(error) in got.error


def test_hub_lost_in_an_opponents_move_repeats_the_episode() -> None:
    session = NimSession(fails_at=2, error=HubLost("gone"))
    with pytest.raises(HubLost, match="gone"):
        played(config_of(trained=[0]), [session], saying("take 1"), may_repeat=True)
    assert session.num_closed == 1


def test_failed_engine_in_an_opponents_move_ends_the_actor() -> None:
    async def act(ids: list[int], _: EnvSession) -> Turn:
        raise EngineError("dead")

    with pytest.raises(EngineError, match="dead"):
        played(config_of(trained=[0]), [NimSession()], saying("take 1"), own=(act, Letters()))


def test_game_that_ends_before_the_seat_moves_is_begun_again() -> None:
    first, second = NimSession(), NimSession()
    own = saying("cheat", "take 1")
    got = played(config_of(trained=[1]), [first, second], saying("take 1"), own=own)
    assert got.end_reason is EndReason.DONE
    assert (first.moves, first.num_closed) == ([(0, "cheat")], 1)
    assert (second.moves[0], second.num_closed) == ((0, "take 1"), 1)


def test_opponent_without_a_legal_move_is_no_reward() -> None:
    sessions = [NimSession() for _ in range(MAX_EMPTY_GAMES)]
    got = played(config_of(trained=[1]), sessions, saying("take 1"), own=saying("cheat"))
    assert (got.end_reason, got.reward) == (EndReason.ENV_ERROR, 0.0)
    assert f"{MAX_EMPTY_GAMES} games of nim in a row" in got.error
    assert all(each.num_closed == 1 for each in sessions)


def test_repeated_game_draws_other_moves() -> None:
    seeds: list[int] = []

    async def run() -> None:
        lease = lease_of()
        seats = Seats(config_of(trained=[1]))

        def own(played: Lease) -> tuple[Act, Render]:
            seeds.append(played.seed)
            return saying("cheat")

        sessions = [NimSession() for _ in range(MAX_EMPTY_GAMES)]
        with pytest.raises(EnvError):
            await seats.opener(lease, opening(sessions), make_policy=own, task=("", ""), texts={})()
        assert lease.seed not in seeds

    asyncio.run(run())
    assert len({*seeds}) == MAX_EMPTY_GAMES


def test_revoked_episode_stops_its_opponent() -> None:
    session = NimSession()

    async def run() -> None:
        asked, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(ids: list[int], _: EnvSession) -> Turn:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

        lease = lease_of()
        seats = Seats(config_of(trained=[0]))
        policy = saying("take 1")
        episode = run_episode(
            lease,
            open_session=seats.opener(
                lease,
                opening([session]),
                make_policy=lambda _: (wait, Letters()),
                task=("", ""),
                texts={},
            ),
            act=policy[0],
            render=policy[1],
            instruction="",
            max_tokens=1000,
            turn_tokens=16,
            actor="a",
        )
        task = asyncio.create_task(episode)
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert cancelled.is_set()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert session.num_closed == 1


def test_opponent_with_other_prompts_gets_their_instruction() -> None:
    texts = {"compact": "", "instructed": "The rules."}
    assert task_of("url", ("", ""), texts) == ("The rules.", "")
    assert task_of("configs/policies/tiny-nim", ("The rules.", ""), texts) == ("", "")
    assert task_of("self", ("Mine.", "Yes."), texts) == ("Mine.", "Yes.")
    assert task_of("url", ("AgentGym's.", "OK."), {}) == ("AgentGym's.", "OK.")


def test_session_without_seats_stays_as_it_is() -> None:
    session: Any = Count([go_on(reward=1.0, done=True)])

    async def run() -> None:
        opener = Seats(config_of(trained=[7])).opener(
            lease_of(),
            opening([session]),
            make_policy=lambda _: saying("x"),
            task=("", ""),
            texts={},
        )
        assert await opener() is session

    asyncio.run(run())


def test_simulated_user_gets_the_conversation_of_its_seat() -> None:
    toy = ToyEndpoint(script=["take 2", "take 3"])
    with serve(toy.app()) as url:
        cfg = config_of(trained=[0], opponents=["url"], url=f"{url}/v1", model="m")
        session = NimSession()
        size = int(session.first_observation.removeprefix("left "))
        got = played(cfg, [session], saying("take 1", "take 1", "cheat"), instruction="Play nim.")
    assert got.end_reason is EndReason.DONE
    assert session.moves[:4] == [(0, "take 1"), (1, "take 2"), (0, "take 1"), (1, "take 3")]
    assert toy.requests[0]["messages"] == [
        {"role": "user", "content": f"Play nim.\n\ntook 1\nleft {size - 1}"}
    ]
    assert toy.requests[1]["messages"][1:] == [
        {"role": "assistant", "content": "take 2"},
        {"role": "user", "content": f"took 1\nleft {size - 4}"},
    ]


def test_wrong_key_of_an_opponent_names_its_setting() -> None:
    with serve(ToyEndpoint(script=[401]).app()) as url:
        cfg = config_of(trained=[0], opponents=["url"], url=f"{url}/v1", model="m")
        with pytest.raises(ConfigError, match=r"actor\.seats\.api_key_env="):
            played(cfg, [NimSession()], saying("take 1"))


def test_opponent_with_an_engine_needs_the_run_that_started_it() -> None:
    cfg = config_of(trained=[0], opponents=["configs/policies/tiny"])
    with pytest.raises(ConfigError, match="configs/policies/tiny has an engine that only"):
        played(cfg, [NimSession()], saying("take 1"))
