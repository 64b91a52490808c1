"""Laws of one episode, played against small real sessions and policies."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.env_client import Hint, StepResult
from actor.rollout.episode import WHOLE, Act, Render, Session, Turn, run_episode
from actor.rollout.scripted import ScriptedPolicy, ScriptedRender
from common.config.curriculum import HorizonUnit
from common.config.evaluation import AgentOptions
from common.errors import EngineError, EnvError, EnvTimeout
from common.states import state_number
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EndReason, EpisodeKind, Lease, PolicyKind, Trajectory
from learner.ingest.admission import refusal

LEASE = Lease(
    episode_id="g/1",
    group_id="g",
    member=1,
    attempt=2,
    kind=EpisodeKind.TRAIN,
    policy=PolicyKind.MODEL,
    env="toy",
    item_id="toy-train-0",
    seed=7,
    horizon=3,
    horizon_stage=1,
    opened_at_version=4,
    deadline_s=5.0,
)


class Count:
    """A session that counts; `answers` says what each step does, the last one for ever."""

    def __init__(self, answers: list[StepResult | Exception | float]) -> None:
        self.first_observation = "first"
        self.first_state = ""
        self.actions: list[str] = []
        self.num_closed = 0
        self._answers = answers

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        answer = self._answers[min(len(self.actions), len(self._answers)) - 1]
        if isinstance(answer, float | int):
            await asyncio.sleep(answer)
            raise AssertionError("slept through the deadline")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def hint(self) -> Hint:
        return Hint(valid_actions=["left", "right"], expert_action="jump")

    async def close(self) -> None:
        self.num_closed += 1


class Letters:
    """Renders each letter as its code; a turn ends with 0."""

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        return [ord(c) for c in "".join(before or ()) + text]

    def after_action(self, text: str, *, is_stopped: bool) -> list[int]:
        return ([] if is_stopped else [0]) + [ord(c) for c in text]

    def action_text(self, token_ids: list[int]) -> str:
        return "".join(chr(i) for i in token_ids if i)


def go_on(
    *,
    reward: float = 0.0,
    is_valid: bool = True,
    done: bool = False,
    is_success: bool | None = None,
) -> StepResult:
    solved = done and reward == 1.0 if is_success is None else is_success
    return StepResult(
        observation="ab", reward=reward, done=done, is_valid=is_valid, is_success=solved
    )


TURNS = [
    Turn([120, 0], [-0.5, -0.25], [4, 4], num_prompt=5),
    Turn([121], [-1.0], [5], is_stopped=False),
    Turn([122, 0], [-2.0, -3.0], [5, 6], num_prompt=13, num_cached=9),
]


async def episode(
    session: Count | EnvError,
    act: Act,
    *,
    lease: Lease = LEASE,
    render: Render | None = None,
    instruction: str = "",
    max_tokens: int = 100,
    keeps_last: bool = False,
    options: AgentOptions = WHOLE,
) -> Trajectory:
    async def open_session() -> Session:
        if isinstance(session, EnvError):
            raise session
        return session

    return await run_episode(
        lease,
        open_session=open_session,
        act=act,
        render=render or Letters(),
        instruction=instruction,
        max_tokens=max_tokens,
        turn_tokens=2,
        actor="actor-0",
        keeps_last=keeps_last,
        options=options,
    )


def play(
    session: Count,
    *,
    lease: Lease = LEASE,
    turns: list[Turn] = TURNS,
    act: Act | None = None,
    prompts: list[list[int]] | None = None,
    **how: Any,
) -> Trajectory:
    remaining = iter(turns)

    async def next_turn(ids: list[int], _: Session) -> Turn:
        if prompts is not None:
            prompts.append(list(ids))
        return next(remaining)

    return asyncio.run(episode(session, act or next_turn, lease=lease, **how))


def test_every_token_is_written_down_with_who_made_it() -> None:
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


def test_an_episode_carries_the_stamp_of_its_lease() -> None:
    got = play(Count([go_on()]))
    for name in LEASE.__slots__:
        if name != "deadline_s":
            assert getattr(got, name) == getattr(LEASE, name)
    assert got.actor == "actor-0"
    assert got.wall_s >= got.generate_s + got.env_s >= 0


def test_the_horizon_ends_an_episode_with_the_reward_of_its_last_step() -> None:
    session = Count([go_on(), go_on(), go_on(reward=0.5)])
    got = play(session)
    assert (got.end_reason, got.reward, got.is_success) == (EndReason.HORIZON, 0.5, False)
    assert session.num_closed == 1


@pytest.mark.parametrize("is_success", [True, False])
@pytest.mark.parametrize("reward", [1.0, 0.9])
def test_done_ends_an_episode_and_the_environment_says_whether_it_is_solved(
    reward: float, is_success: bool
) -> None:
    session = Count([go_on(), go_on(reward=reward, done=True, is_success=is_success)])
    got = play(session)
    assert (got.end_reason, got.reward) == (EndReason.DONE, reward)
    assert got.is_success is is_success
    assert got.num_turns == 2
    assert got.token_ids[-1] == 121, "nothing is observed after the end"
    assert session.num_closed == 1


def test_the_instruction_comes_before_the_first_observation() -> None:
    prompts: list[list[int]] = []
    play(Count([go_on(done=True)]), instruction="do", prompts=prompts)
    assert "".join(map(chr, prompts[0])) == "do\n\nfirst"


def test_an_episode_ends_before_a_turn_that_could_exceed_the_context() -> None:
    session = Count([go_on(reward=0.25)])
    got = play(session, max_tokens=11)  # 9 tokens before the second turn, which may sample 2
    assert (got.end_reason, got.num_turns, len(got.token_ids)) == (EndReason.CONTEXT_FULL, 2, 10)
    assert got.reward == 0.25
    got = play(Count([go_on()]), max_tokens=10)
    assert (got.end_reason, got.num_turns) == (EndReason.CONTEXT_FULL, 1)
    assert not got.end_reason.is_infrastructure_failure
    assert session.num_closed == 1


@pytest.mark.parametrize(
    ("max_tokens", "end", "num_turns", "text"),
    [
        (100, EndReason.HORIZON, 3, "firstxabyabzab"),
        (11, EndReason.CONTEXT_FULL, 2, "firstxaby"),  # 10 tokens, and nothing of 3 fits
        (13, EndReason.CONTEXT_FULL, 2, "firstxabyab"),
    ],
)
def test_the_last_observation_of_an_episode_that_is_cut_short_is_kept_for_a_critic(
    max_tokens: int, end: EndReason, num_turns: int, text: str
) -> None:
    steps: list[Any] = [go_on(), go_on(), go_on(reward=0.5)]
    turns = [TURNS[0], Turn([121, 0], [-1.0, -1.0], [5, 5]), TURNS[2]]
    got = play(Count(steps), turns=turns, keeps_last=True, max_tokens=max_tokens)
    assert (got.end_reason, got.num_turns) == (end, num_turns)
    assert text_of(got).replace("\0", "") == text
    assert len(got.token_ids) <= max_tokens
    kept = text.endswith("ab")
    assert got.loss_mask[-1] != kept
    assert got.turn_ids[-1] == num_turns - 1
    assert got.num_cut_observations == 0
    assert refusal(got, learner_version=6, max_group_size=2, max_tokens=max_tokens) == ""
    without = play(Count(steps), turns=turns, max_tokens=max_tokens)
    assert text_of(without) == text_of(got)[: len(without.token_ids)]
    assert without.loss_mask[-1]


def text_of(got: Trajectory) -> str:
    return "".join(map(chr, got.token_ids.tolist()))


@pytest.mark.parametrize("length", [101, 30_000])
def test_first_page_beyond_the_context_loses_its_end_and_is_played(length: int) -> None:
    session = Count([go_on(done=True, reward=1.0)])
    session.first_observation = "p" * length
    got = play(session, instruction="do")
    num_kept = got.token_ids.tolist().count(ord("p"))
    assert 50 < num_kept < 98
    assert text_of(got).startswith("do\n\npp")
    assert f"\n[cut here: {length - num_kept} more characters]" in text_of(got)
    assert (got.end_reason, got.num_turns, got.is_success) == (EndReason.DONE, 1, True)
    assert (len(got.token_ids) <= 100, got.num_cut_observations) == (True, 1)
    assert refusal(got, learner_version=6, max_group_size=2, max_tokens=100) == ""


def test_first_page_without_any_room_is_an_unsolved_held_out_item() -> None:
    session = Count([go_on()])
    session.first_observation = "p" * 50
    lease = replace(LEASE, kind=EpisodeKind.EVAL)
    got = play(session, lease=lease, max_tokens=20)
    assert (got.end_reason, got.num_turns, got.is_success) == (EndReason.CONTEXT_FULL, 0, False)
    assert refusal(got, learner_version=6, max_group_size=2) == ""
    got = replace(got, kind=EpisodeKind.TRAIN)
    assert refusal(got, learner_version=6, max_group_size=2) == "no sampled token"


def test_later_page_beyond_the_context_is_cut_to_half_of_it() -> None:
    long = replace(go_on(), observation="p" * 30_000)
    got = play(Count([long, go_on(done=True)]))
    assert (got.end_reason, got.num_turns, got.num_cut_observations) == (EndReason.DONE, 2, 1)
    num_observed = int((got.turn_ids == 1).sum()) - 1  # and one that was sampled
    assert 40 < num_observed <= 50
    got = play(Count([long]), max_tokens=70)  # cut to 35, which leaves no room for a turn after it
    assert (got.end_reason, got.num_turns) == (EndReason.CONTEXT_FULL, 2)
    assert len(got.token_ids) <= 70


def test_half_characters_become_replacement_characters_and_are_counted() -> None:
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
def test_a_failure_of_the_environment_is_recorded_and_never_a_reward(
    error: Exception, reason: EndReason
) -> None:
    session = Count([go_on(reward=0.75), error])
    got = play(session)
    assert (got.end_reason, got.error, got.reward) == (reason, str(error), 0.0)
    assert got.end_reason.is_infrastructure_failure
    assert not got.is_success
    assert session.num_closed == 1


def test_a_session_that_does_not_open_is_recorded() -> None:
    async def act(ids: list[int], session: Session) -> Turn:
        raise AssertionError("there is nothing to act on")

    got = asyncio.run(episode(EnvError("no such item"), act))
    assert (got.end_reason, got.error) == (EndReason.ENV_ERROR, "no such item")
    assert got.token_ids.tolist() == []
    assert refusal(got, learner_version=6, max_group_size=2) == ""


def test_the_deadline_of_the_lease_ends_an_episode() -> None:
    session = Count([go_on(reward=1.0), 5.0])
    got = play(session, lease=replace(LEASE, deadline_s=0.05))
    assert (got.end_reason, got.reward) == (EndReason.DEADLINE, 0.0)
    assert got.error == "not ended within 0.05s"
    assert session.num_closed == 1


@pytest.mark.parametrize("error", [EngineError("dead"), TimeoutError("a turn took too long")])
def test_a_failure_of_the_engine_propagates(error: Exception) -> None:
    async def act(ids: list[int], session: Session) -> Turn:
        raise error

    session = Count([go_on()])
    with pytest.raises(type(error), match=str(error)):
        play(session, act=act)
    assert session.num_closed == 1


def test_a_revoked_episode_closes_its_session() -> None:
    session = Count([go_on()])

    async def revoke() -> None:
        asked = asyncio.Event()

        async def act(ids: list[int], _: Session) -> Turn:
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
def test_a_scripted_policy_plays_the_same_episode(kind: PolicyKind, allowed: set[str]) -> None:
    def play_scripted() -> tuple[Trajectory, list[str]]:
        session = Count([go_on()])
        render = ScriptedRender()
        policy = ScriptedPolicy(kind, seed="g/1", render=render)

        lease = replace(LEASE, horizon=20, kind=EpisodeKind.EVAL, policy=kind)
        got = play(session, lease=lease, act=policy.act, render=render)
        return got, session.actions

    got, actions = play_scripted()
    assert set(actions) == allowed
    assert len(actions) == got.num_turns == 20
    assert set(got.versions.tolist()) == {-1}
    assert refusal(got, learner_version=0, max_group_size=2) == ""
    assert play_scripted()[1] == actions, "the seed decides"


def test_each_turn_carries_the_state_that_it_was_taken_in() -> None:
    there = replace(go_on(), state="s1")
    session = Count([there, go_on(), go_on(done=True)])
    session.first_state = "s0"
    played = play(session)
    told = [state_number(text) for text in ("s0", "s1", "ab")]  # the last is not told, but seen
    assert played.turn_states.tolist() == told


def test_horizon_in_tokens_begins_no_turn_that_could_exceed_it() -> None:
    lease = replace(LEASE, horizon_unit=HorizonUnit.TOKENS, max_turns=9, horizon=4)
    found = play(Count([go_on(reward=0.5)]), lease=lease)
    assert (found.end_reason, found.num_turns, found.reward) == (EndReason.HORIZON, 2, 0.5)
    assert found.loss_mask.sum() == 3  # 2 and 1; the next turn may have 2
    assert (found.horizon, found.horizon_unit, found.max_turns) == (4, HorizonUnit.TOKENS, 9)
    assert unpack_record(pack_record(found)).horizon_unit is HorizonUnit.TOKENS


def test_horizon_in_seconds_counts_turns_without_waiting_for_others() -> None:
    lease = replace(LEASE, horizon_unit=HorizonUnit.SECONDS, max_turns=9, horizon=1)
    waits = [replace(TURNS[0], waited_s=60.0), *TURNS[1:]]
    times = iter([0.6, 0.6, 0.6])

    class Slow(Count):
        async def step(self, action: str) -> StepResult:
            await asyncio.sleep(next(times))
            return await super().step(action)

    # The first turn is waited in more than it took, so it counts as nothing.
    found = play(Slow([go_on()]), lease=lease, turns=waits)
    assert (found.end_reason, found.num_turns) == (EndReason.HORIZON, 3)


@pytest.mark.parametrize("unit", [HorizonUnit.TOKENS, HorizonUnit.SECONDS])
def test_most_turns_end_an_episode_whatever_the_unit_and_keep_the_last_page(
    unit: HorizonUnit,
) -> None:
    lease = replace(LEASE, horizon_unit=unit, max_turns=2, horizon=1000)
    cut, plain = (play(Count([go_on()]), lease=lease, keeps_last=k) for k in (True, False))
    assert cut.end_reason is plain.end_reason is EndReason.HORIZON
    assert cut.num_turns == plain.num_turns == 2
    in_turns = play(Count([go_on()]), lease=replace(LEASE, horizon=2), keeps_last=True)
    assert cut.token_ids.tolist() == in_turns.token_ids.tolist()
    assert len(plain.token_ids) < len(cut.token_ids)
