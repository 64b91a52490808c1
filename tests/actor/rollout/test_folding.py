"""Laws of branches: a branch leaves its return, and every token is trained once."""

from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.context import LEFT_OUT
from actor.rollout.episode import EnvSession, Turn
from actor.rollout.folding import CLOSED, ENDED, HOW, OPENED
from common.config.actor import AgentOptions, ContextKind
from common.config.horizon import HorizonUnit
from common.segments import Aside, as_rows, asides_of
from common.wire.messages import EndReason, Trajectory
from tests.actor.rollout.playing import LEASE, Count, go_on, play
from tests.actor.rollout.test_context import refused, turns_of

FOLD, SUBAGENT = ContextKind.FOLD, ContextKind.SUBAGENT
CALL, RETURN = "<branch>b</branch>", "<return>r</return>"
SIZE = 20  # most letters of a turn here


def ids_of(text: str, *, is_stopped: bool = True) -> list[int]:
    return [*map(ord, text), *([0] if is_stopped else [])]


def told(
    *said: str,
    num_turns: int = 1,
    kind: ContextKind = FOLD,
    options: AgentOptions | None = None,
    **how: Any,
) -> tuple[Trajectory, Count, list[list[int]]]:
    """Return the episode of a policy with these answers, its session and its prompts."""
    texts, prompts = iter(said), list[list[int]]()

    async def act(ids: list[int], _: EnvSession) -> Turn:
        prompts.append(list(ids))
        sampled = ids_of(next(texts))
        return Turn(sampled, [-1.0] * len(sampled), [4] * len(sampled))

    session = Count([replace(go_on(), observation=f"o{n}") for n in range(9)])
    options = options or AgentOptions(context=kind, branch_instruction="!")
    how = {"max_tokens": 400, "lease": replace(LEASE, horizon=num_turns), **how}
    how = {"turn_tokens": SIZE, **how}
    return play(session, act=act, options=options, **how), session, prompts


def text_of(ids: list[int]) -> str:
    return "".join(chr(i) if i else "." for i in ids)


def rows_of(got: Trajectory) -> list[str]:
    return [text_of(row.token_ids.tolist()) for row in as_rows(got)]


def learnt_of(got: Trajectory) -> list[str]:
    return [text_of(row.token_ids[row.loss_mask].tolist()) for row in as_rows(got)]


def test_fold_keeps_only_call_and_return() -> None:
    got, session, prompts = told("x", CALL, "y", "z", RETURN, "w", num_turns=4)
    before = f"first!x.o0{CALL}."
    assert rows_of(got) == [f"{before}{OPENED}y.o1z.o2{RETURN}.", f"{before}{CLOSED}{RETURN}.o2w."]
    assert learnt_of(got) == [f"x.{CALL}.y.z.{RETURN}.", "w."]
    assert session.actions == ["x", "y", "z", "w"]
    assert (got.num_turns, got.num_invalid_actions) == (4, 0)
    asides = [(text_of(got.token_ids[a:b].tolist()), kind) for a, b, kind in asides_of(got)]
    assert asides == [(f"{CALL}.", Aside.BRANCH), (f"{RETURN}.", Aside.RETURN)]
    assert [prompt for prompt, _ in turns_of(got)] == prompts
    assert refused(got, 400) == ""


def test_subagent_starts_with_first_message_and_call() -> None:
    got, session, prompts = told("x", CALL, "y", RETURN, "w", num_turns=3, kind=SUBAGENT)
    assert rows_of(got) == [
        f"first!x.o0{CALL}.",
        f"first{LEFT_OUT}!{CALL}.{OPENED}\no0y.o1{RETURN}.",
        f"first!x.o0{CALL}.{CLOSED}{RETURN}.o1w.",
    ]
    assert learnt_of(got) == [f"x.{CALL}.", f"y.{RETURN}.", "w."]
    assert [prompt for prompt, _ in turns_of(got)] == prompts
    assert session.actions == ["x", "y", "w"]
    assert refused(got, 400) == ""
    got, *_ = told(CALL, "y", kind=SUBAGENT)
    assert rows_of(got)[1] == f"first{LEFT_OUT}!{CALL}.{OPENED}y."


@pytest.mark.parametrize("said", [("x", CALL, "y", "z", RETURN, "w"), ("x", CALL, *"yzwu")])
@pytest.mark.parametrize("kind", [FOLD, SUBAGENT])
def test_critic_reads_the_end_at_the_prompt_after_it(
    kind: ContextKind, said: tuple[str, ...]
) -> None:
    """The prompt of the answer after the last turn, also in a branch and where one is ended."""
    options = AgentOptions(context=kind, branch_instruction="!", branch_turns=2)
    _, _, prompts = told(*said, num_turns=said.count(CALL) + 3, options=options)
    for horizon in (1, 2, 3):
        got, _, asked = told(*said, num_turns=horizon, options=options, keeps_last=True)
        start = got.segment_starts[-1] if got.segment_starts.size else 0
        assert got.token_ids[start:].tolist() == prompts[len(asked)]
        assert refused(got, 400) == ""
        assert [prompt for prompt, _ in turns_of(got)] == asked


@pytest.mark.parametrize("kind", [FOLD, SUBAGENT])
def test_branch_without_return_is_ended(kind: ContextKind) -> None:
    options = AgentOptions(context=kind, branch_instruction="!", branch_turns=2)
    got, *_ = told("x", CALL, "y", "z", "w", num_turns=4, options=options)
    assert rows_of(got)[-1] == f"first!x.o0{CALL}.{ENDED}o2w."
    # Its pages leave no room: 200 letters of 181 before a turn.
    long = Count([replace(go_on(), observation="o" * 60)])
    said = iter([CALL, *"uvwxyz"])

    async def act(_: list[int], __: EnvSession) -> Turn:
        sampled = ids_of(next(said))
        return Turn(sampled, [-1.0] * len(sampled), [4] * len(sampled))

    how: dict[str, Any] = {"max_tokens": 260, "turn_tokens": SIZE, "act": act}
    got = play(
        long, lease=replace(LEASE, horizon=5), options=replace(options, branch_turns=99), **how
    )
    assert any(f"{CALL}.{ENDED}" in row for row in rows_of(got))
    assert refused(got, 260) == ""


@pytest.mark.parametrize("kind", [FOLD, SUBAGENT])
@pytest.mark.parametrize(
    "said",
    [
        (RETURN, "x"),  # of nothing
        (CALL, RETURN, "x"),  # of a branch that did nothing
        (CALL, CALL, "x"),  # a branch in a branch
        (f"{CALL[:-3]}", "x"),
        ("<branch> </branch>", "x"),
    ],
)
def test_misplaced_call_or_return_is_invalid(said: tuple[str, ...], kind: ContextKind) -> None:
    got, session, _ = told(*said, kind=kind, num_turns=2)
    wrong = said[-2]
    assert session.actions == [wrong, "x"]
    is_marked = wrong in (CALL, RETURN)
    assert got.invalid_turns.tolist() == [is_marked, False]
    assert refused(got, 400) == ""


def test_call_without_room_is_an_invalid_action() -> None:
    # 24 letters shown and 20 of a turn; notes and the least page after a branch take over 100.
    got, session, _ = told(CALL, max_tokens=120)
    assert session.actions == [CALL]
    assert got.num_invalid_actions == 1


def test_first_message_explains_branch_syntax() -> None:
    _, _, prompts = told("x", options=AgentOptions(context=FOLD))
    assert text_of(prompts[0]) == f"first{HOW}"
    _, _, prompts = told("x", options=AgentOptions())
    assert text_of(prompts[0]) == "first"


def test_calls_and_returns_count_in_token_horizon() -> None:
    # x. and the call have 2 + 19; another turn of up to 20 would be beyond 40.
    lease = replace(LEASE, horizon_unit=HorizonUnit.TOKENS, max_turns=9, horizon=40)
    got, session, _ = told("x", CALL, "y", lease=lease)
    assert session.actions == ["x"]
    assert (got.end_reason, got.num_turns) == (EndReason.HORIZON, 1)
    assert learnt_of(got) == [f"x.{CALL}."]
    assert got.turn_ids.max() == 0
    assert refused(got, 400) == ""
