"""Laws of one episode, played against small real sessions and policies."""

import asyncio
from dataclasses import replace

import pytest

from actor.rollout.episode import EnvSession, Turn, action_number, state_number
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender, with_actions
from common.config.actor import AgentFormat, AgentOptions
from common.errors import EngineError, EnvError, EnvTimeout
from common.formats.scripted import actions_of
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.ingest.intake import refusal
from tests.actor.rollout.playing import LEASE, Count, episode, go_on, play, text_of


def test_every_token_records_its_origin() -> None:
    session = Count([go_on(), go_on(is_valid=False), go_on(reward=0.5)])
    prompts: list[list[int]] = []
    got = play(session, prompts=prompts)
    first = [ord(c) for c in "first"]
    assert got.token_ids.tolist() == [*first, 120, 0, 97, 98, 121, 0, 97, 98, 122, 0]
    sampled = [5, 6, 9, 13, 14]
    assert [i for i, is_on in enumerate(got.loss_mask.tolist()) if is_on] == sampled
    assert got.versions.tolist() == [*[-1] * 5, 4, 4, -1, -1, 5, -1, -1, -1, 5, 6]
    assert got.logprobs.tolist() == [*[0.0] * 5, -0.5, -0.25, 0, 0, -1.0, 0, 0, 0, -2.0, -3.0]
    assert got.turn_ids.tolist() == [*[0] * 7, 1, 1, 1, 2, 2, 2, 2, 2]
    assert prompts == [got.token_ids.tolist()[:end] for end in (5, 9, 13)]
    assert session.actions == ["x", "y", "z"]
    assert (got.num_turns, got.num_invalid_actions) == (3, 1)
    assert (got.num_prompt_tokens, got.num_cached_tokens) == (18, 9)
    assert got.invalid_turns.tolist() == [False, True, False]
    assert refusal(got, learner_version=6, max_group_size=2) == ""


def test_episode_carries_its_lease_fields() -> None:
    got = play(Count([go_on()]))
    for name in LEASE.__slots__:
        if name != "deadline_s":
            assert getattr(got, name) == getattr(LEASE, name)
    assert got.actor == "actor-0"
    assert got.wall_s >= got.generate_s + got.env_s >= 0


def test_trajectory_carries_the_start_score() -> None:
    session = Count([go_on(reward=0.95)])
    session.start_score = 1.0
    got = unpack_record(pack_record(play(session)))
    assert got.start_score == 1.0
    assert got.turn_scores.tolist() == pytest.approx([0.95] * 3)


@pytest.mark.parametrize("is_success", [True, False])
@pytest.mark.parametrize("reward", [1.0, 0.9])
def test_done_ends_episode_and_environment_decides_success(reward: float, is_success: bool) -> None:
    session = Count([go_on(), go_on(reward=reward, done=True, is_success=is_success)])
    got = play(session)
    assert (got.end_reason, got.reward) == (EndReason.DONE, reward)
    assert got.is_success is is_success
    assert got.num_turns == 2
    assert got.token_ids[-1] == 121, "nothing is observed after the end"
    assert session.num_closed == 1


def test_instruction_precedes_the_first_observation() -> None:
    prompts: list[list[int]] = []
    play(Count([go_on(done=True)]), instruction="do", prompts=prompts)
    assert "".join(map(chr, prompts[0])) == "do\n\nfirst"


def test_lone_surrogates_are_replaced_and_counted() -> None:
    broken = replace(go_on(), observation="\ud83d\ude00 \ude00")
    session = Count([broken, EnvError("no \ud83d")])
    session.first_observation = "half \ud83d"
    got = play(session, instruction="do")
    assert "do\n\nhalf \ufffd" in text_of(got)
    assert "\U0001f600 \ufffd" in text_of(got), "halves that belong together are a character"
    assert (got.num_repaired_texts, got.error) == (2, "no \ufffd")
    assert unpack_record(pack_record(got)).error == got.error


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EnvError("HTTP 500"), EndReason.ENV_ERROR), (EnvTimeout("HTTP 504"), EndReason.ENV_TIMEOUT)],
)
def test_environment_failure_is_recorded_without_reward(
    error: Exception, reason: EndReason
) -> None:
    session = Count([go_on(reward=0.75), error])
    got = play(session)
    assert (got.end_reason, got.error, got.reward) == (reason, str(error), 0.0)
    assert got.end_reason.is_infrastructure_failure
    assert not got.is_success
    assert session.num_closed == 1


def test_failed_session_open_is_recorded() -> None:
    async def act(ids: list[int], session: EnvSession) -> Turn:
        raise AssertionError("there is nothing to act on")

    got = asyncio.run(episode(EnvError("no such item"), act))
    assert (got.end_reason, got.error) == (EndReason.ENV_ERROR, "no such item")
    assert got.token_ids.tolist() == []
    assert refusal(got, learner_version=6, max_group_size=2) == ""


def test_lease_deadline_ends_the_episode() -> None:
    session = Count([go_on(reward=1.0), 5.0])
    got = play(session, lease=replace(LEASE, deadline_s=0.05))
    assert (got.end_reason, got.reward) == (EndReason.DEADLINE, 0.0)
    assert got.error == "the episode did not end within 0.05 s"
    assert session.num_closed == 1


@pytest.mark.parametrize("error", [EngineError("dead"), TimeoutError("a turn took too long")])
def test_engine_failure_propagates_from_the_episode(error: Exception) -> None:
    async def act(ids: list[int], session: EnvSession) -> Turn:
        raise error

    session = Count([go_on()])
    with pytest.raises(type(error), match=str(error)):
        play(session, act=act)
    assert session.num_closed == 1


def test_revoked_episode_closes_its_session() -> None:
    session = Count([go_on()])

    async def revoke() -> None:
        asked = asyncio.Event()

        async def act(ids: list[int], _: EnvSession) -> Turn:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        task = asyncio.create_task(episode(session, act))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(revoke())
    assert session.num_closed == 1


@pytest.mark.parametrize(
    ("kind", "allowed"),
    [(PolicyKind.EXPERT, {"jump"}), (PolicyKind.RANDOM_VALID, {"left", "right"})],
)
def test_scripted_policy_episode_records_its_actions(kind: PolicyKind, allowed: set[str]) -> None:
    def play_scripted() -> tuple[Trajectory, list[str]]:
        session = Count([go_on()])
        render = ScriptedRender()
        policy = ScriptedPolicy(kind, seed="g/1", render=render)

        lease = replace(LEASE, horizon=20, kind=EpisodeKind.EVAL, policy=kind)
        got = play(session, lease=lease, act=policy.act, render=render)
        return with_actions(got, render), session.actions

    got, actions = play_scripted()
    assert set(actions) == allowed
    assert len(actions) == got.num_turns == 20
    assert set(got.versions.tolist()) == {-1}
    assert actions_of(unpack_record(pack_record(got))) == actions
    assert refusal(got, learner_version=0, max_group_size=2) == ""
    assert play_scripted()[1] == actions, "the seed decides"


def test_each_turn_carries_its_starting_state() -> None:
    there = replace(go_on(), state="s1")
    session = Count([there, go_on(), go_on(done=True)])
    session.first_state = "s0"
    played = play(session)
    told = [state_number(text) for text in ("s0", "s1", "ab")]  # The last state is the observation.
    assert played.turn_states.tolist() == told


def test_turn_action_equals_the_environment_input() -> None:
    said = ["Thought:\nx\n\nAction:\ngo", "Thought:\nyz\n\nAction:\ngo", "nothing"]
    session = Count([go_on(), go_on(), go_on(done=True)])
    answers = iter(said)

    async def act(_: list[int], __: EnvSession) -> Turn:
        ids = [*map(ord, next(answers)), 0]
        return Turn(ids, [-1.0] * len(ids), [4] * len(ids))

    options = AgentOptions(format=AgentFormat.REACT)
    played = play(session, act=act, options=options, max_tokens=1_000, turn_tokens=100)
    assert session.actions == ["go", "go", ""]
    first, second, third = played.turn_actions.tolist()
    assert first == second == action_number("go")
    assert third == action_number("")
