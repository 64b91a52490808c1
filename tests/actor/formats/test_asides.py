"""Laws of formats, plans and reflections: each trains on the prompts that the policy received."""

import random
from dataclasses import replace
from typing import Any

import pytest

from actor.formats.renderer import Renderer
from actor.formats.tools import make_renderer
from actor.rollout.context import GO, PLAN, REFLECT, least_prompt
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import EnvSession, Turn
from common.config.actor import ActorSection, AgentFormat, AgentOptions, ContextKind
from common.config.horizon import HorizonUnit
from common.errors import ConfigError
from common.segments import Aside, as_rows, asides_of, joined
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EndReason, Trajectory
from tests.actor.formats.test_tools import CALLING
from tests.actor.rollout.playing import LEASE, Count, go_on, play
from tests.actor.rollout.test_context import refused, saying, turns_of

FULL, WINDOW, SUMMARY = ContextKind.FULL, ContextKind.WINDOW, ContextKind.SUMMARY
TURN_TOKENS = 2  # as in `tests.actor.rollout.playing`


class Policy:
    """Samples two tokens, or one and an end token, and records prompts and answers."""

    def __init__(self, seed: int, end: int) -> None:
        self._random, self._end = random.Random(seed), end
        self.asked: list[tuple[list[int], list[int]]] = []

    async def act(self, ids: list[int], _: EnvSession) -> Turn:
        is_stopped = self._random.random() < 0.7
        said = [self._random.randrange(40, 90), self._random.randrange(40, 90)]
        said[-1] = self._end if is_stopped else said[-1]
        self.asked.append((list(ids), said))
        return Turn(said, [-1.0, -1.0], [4, 4], is_stopped=is_stopped, num_prompt=len(ids))


def of_kind(got: Trajectory, kind: Aside) -> list[list[int]]:
    return [got.token_ids[a:b].tolist() for a, b, each in asides_of(got) if each == kind]


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("how", [{}, {"plan": True}, {"plan": True, "reflect_every": 2}])
@pytest.mark.parametrize("context", [FULL, WINDOW, SUMMARY])
@pytest.mark.parametrize("form", AgentFormat)
def test_every_format_trains_on_its_actual_prompts(
    form: AgentFormat, context: ContextKind, how: dict[str, Any], learns: bool
) -> None:
    for seed in range(4):
        options = AgentOptions(
            format=form,
            context=context,
            context_turns=2,
            learn_plans=learns,
            learn_reflections=learns,
            learn_summaries=learns,
            **how,
        )
        render = make_renderer(CALLING, form).of("maze")
        max_tokens = 20_000
        if context is not FULL:
            max_tokens = least_prompt(render, options, TURN_TOKENS) + TURN_TOKENS + 150
        policy = Policy(seed, render.end_of_turn_ids[0])
        session = Count(saying("you see a red ball " * 40))
        lease = replace(LEASE, horizon=12)
        got = play(
            session, lease=lease, act=policy.act, render=render, options=options,
            max_tokens=max_tokens,
        )  # fmt: skip
        assert (got.end_reason, got.num_turns) == (EndReason.HORIZON, 12)
        assert refused(got, max_tokens) == ""
        assert all(len(prompt) + TURN_TOKENS <= max_tokens for prompt, _ in policy.asked)
        plans, thoughts = of_kind(got, Aside.PLAN), of_kind(got, Aside.REFLECTION)
        summaries = of_kind(got, Aside.SUMMARY)
        assert len(plans) == how.get("plan", 0)
        assert len(thoughts) == (5 if "reflect_every" in how else 0)  # after 2, 4, ... 10 turns
        assert (len(summaries) > 0) == (context is SUMMARY)
        assert (len(got.segment_starts) > 1) == (context is not FULL)
        unseen = {prompt_of(got, a) for a, _, _ in asides_of(got)}
        acts = [each for each in policy.asked if tuple(each[0]) not in unseen]
        assert len(acts) == 12
        assert turns_of(got) == (policy.asked if learns else acts)
        # Whatever becomes of the history, each segment begins with the plan as it was sampled.
        for row in as_rows(got):
            head = (
                render.first_prompt(f"first{PLAN}") if plans and form is AgentFormat.PLAIN else []
            )
            if head:
                assert row.token_ids[: len(head) + 2].tolist() == [*head, *plans[0]]
        read_none = form is not AgentFormat.PLAIN  # two tokens are neither
        assert got.num_invalid_actions == (12 if read_none else 0)
        assert (set(session.actions) == {""}) == read_none
        again = joined(as_rows(got))
        assert again.asides.tolist() == got.asides.tolist()
        assert unpack_record(pack_record(got)).asides.tolist() == got.asides.tolist()


def prompt_of(got: Trajectory, at: int) -> tuple[int, ...]:
    """Return the prompt before a token."""
    starts = got.segment_starts.tolist() or [0]
    return tuple(got.token_ids[max(start for start in starts if start <= at) : at].tolist())


def test_plan_and_reflection_are_requested_in_order() -> None:
    said = iter([Turn([97 + n, 0], [-1.0, -2.0], [4, 5]) for n in range(6)])

    async def act(_: list[int], __: EnvSession) -> Turn:
        return next(said)

    options = AgentOptions(plan=True, reflect_on_invalid=True)
    session = Count([go_on(), go_on(is_valid=False), go_on()])
    got = play(session, act=act, options=options, max_tokens=900)
    text = "".join(chr(i) if i else "." for i in got.token_ids)
    assert text == f"first{PLAN}a.{GO}b.abc.ab{REFLECT}d.{GO}e."
    assert session.actions == ["b", "c", "e"]
    assert asides_of(got) == [
        (len(f"first{PLAN}"), len(f"first{PLAN}") + 2, Aside.PLAN),
        (text.index("d."), text.index("d.") + 2, Aside.REFLECTION),
    ]
    assert got.loss_mask.sum() == 10
    assert got.turn_ids[text.index("a.")] == 0
    assert got.turn_ids[text.index("d.")] == 2
    assert (got.num_turns, got.invalid_turns.tolist()) == (3, [False, True, False])


def test_plans_and_reflections_count_only_as_tokens() -> None:
    async def act(_: list[int], __: EnvSession) -> Turn:
        return Turn([97, 0], [-1.0, -2.0], [4, 4])

    how: dict[str, Any] = {"act": act, "max_tokens": 2000}
    thinking = AgentOptions(plan=True, reflect_every=1)
    turns = replace(LEASE, horizon=5)
    tokens = replace(LEASE, horizon=12, horizon_unit=HorizonUnit.TOKENS, max_turns=99)
    assert play(Count([go_on()]), lease=turns, options=thinking, **how).num_turns == 5
    assert play(Count([go_on()]), lease=tokens, **how).num_turns == 6
    got = play(Count([go_on()]), lease=tokens, options=thinking, **how)
    assert got.num_turns == 3  # of plan, action; reflection, action; reflection, action
    assert got.loss_mask.sum() == 12
    assert refused(got, 2000) == ""


def test_missing_action_counts_as_an_invalid_turn() -> None:
    class Strict(Count):
        async def step(self, action: str) -> HubStepResult:
            self.actions.append(action)
            told = "There is no such action." if not action else "Well done."
            return HubStepResult(
                observation=told, reward=0.0, done=False, is_valid=bool(action), is_success=False
            )

    texts = ["Thought: x\nAction: up", "up", "Action: up\nAction: down"]
    said = iter([Turn([*map(ord, text), 0], [-1.0] * (len(text) + 1), [4] * (len(text) + 1))
                 for text in texts])  # fmt: skip

    async def act(_: list[int], __: EnvSession) -> Turn:
        return next(said)

    session = Strict([])
    got = play(session, act=act, options=AgentOptions(format=AgentFormat.REACT), max_tokens=2000)
    assert session.actions == ["up", "", ""]
    assert got.invalid_turns.tolist() == [False, True, True]
    assert "There is no such action." in "".join(chr(i) for i in got.token_ids)


def test_environment_that_parses_actions_gets_whole_answer() -> None:
    text = "Thought: x\nAction: up"

    async def act(_: list[int], __: EnvSession) -> Turn:
        return Turn([*map(ord, text), 0], [-1.0] * (len(text) + 1), [4] * (len(text) + 1))

    session = Count([go_on()])
    options = AgentOptions(format=AgentFormat.REACT)
    play(session, act=act, options=options, instruction="Say Action: and it.", max_tokens=2000)
    assert session.actions == [text] * 3


@pytest.mark.parametrize("context", [FULL, WINDOW, SUMMARY])
@pytest.mark.parametrize("how", [{}, {"plan": True}, {"plan": True, "reflect_every": 1}])
def test_checked_context_has_room_for_every_turn(context: ContextKind, how: dict[str, Any]) -> None:
    render: Renderer = make_renderer(CALLING, AgentFormat.PLAIN)
    own: dict[str, Any] = {"context": context, "max_turn_tokens": TURN_TOKENS, **how}

    def fits(max_tokens: int) -> bool:
        try:
            render.check_room(ActorSection(max_model_len=max_tokens, **own))
        except ConfigError:
            return False
        return True

    least = next(each for each in range(16, 4000) if fits(each))
    policy = Policy(0, render.end_of_turn_ids[0])
    options = AgentOptions(context=context, **how)
    session = Count(saying("you see a red ball " * 40))
    session.first_observation = "you see a red ball " * 40
    got = play(session, act=policy.act, render=render, options=options, max_tokens=least)
    assert len(policy.asked) >= 1 + how.get("plan", 0)
    assert all(len(prompt) + TURN_TOKENS <= least for prompt, _ in policy.asked)
    assert refused(got, least) == ""
    assert context is FULL or got.num_turns == 3
