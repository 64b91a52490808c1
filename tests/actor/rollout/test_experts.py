"""Laws of recorded experts on the way from the engine's turns to training rows."""

import asyncio

import numpy as np
import pytest

from actor.rollout.context import Tape, Turn
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import EnvSession
from actor.rollout.recording import Recordings
from common.config.actor import AgentOptions, ContextKind
from common.segments import RoutingShape, as_rows, joined, refusal_of_experts
from common.wire.codec import decode, encode
from common.wire.messages import Trajectory
from learner.batch.batching import Sample
from tests.actor.rollout.playing import LEASE, Count, play
from tests.learner.builders import make_microbatches, make_trajectory


def step(observation: str, *, done: bool = False) -> HubStepResult:
    return HubStepResult(
        observation=observation, reward=0.5, done=done, is_valid=True, is_success=done
    )


def experts_at(token: int, place: int, turn: int) -> list[list[int]]:
    """Return two layers' choices that name the token, its place, and the turn that chose."""
    return [[token % 64, place], [turn, token % 64]]


async def act(context: list[int], _: EnvSession, seen: list[int]) -> Turn:
    sampled = [97 + len(seen), 0]
    tokens = [*context, *sampled]
    chosen = [experts_at(token, place, len(seen)) for place, token in enumerate(tokens[:-1])]
    seen.append(len(context))
    return Turn(
        sampled,
        [-1.0, -1.0],
        [4, 4],
        num_prompt=len(context),
        experts=np.array(chosen, dtype=np.uint8),
    )


def played(options: AgentOptions, *, max_tokens: int = 200, text: str = "one") -> Trajectory:
    seen: list[int] = []

    async def act_on(context: list[int], session: EnvSession) -> Turn:
        return await act(context, session, seen)

    answers = [step(text), step(text), step(text, done=True)]
    return play(Count(answers), act=act_on, max_tokens=max_tokens, options=options)  # pyright: ignore


def test_each_token_keeps_the_experts_of_its_first_turn() -> None:
    """first | a 0 | one | b 0 | one | c 0: the turn's end is chosen by the turn after it."""
    got = played(AgentOptions())
    assert got.expert_mask.tolist() == [True] * (len(got.token_ids) - 1) + [False]
    turns = got.expert_ids[:, 1, 0].tolist()
    assert turns == [0] * 5 + [0, 1] + [1] * 3 + [1, 2] + [2] * 3 + [2, 0]
    places = got.expert_ids[:-1, 0, 1].tolist()
    assert places == list(range(len(got.token_ids) - 1))
    assert got.expert_ids[:-1, 0, 0].tolist() == (got.token_ids[:-1] % 64).tolist()


ROW_BYTES = 4  # Two layers choose two experts for a token.


def test_memory_of_experts_grows_with_the_tokens() -> None:
    tape = Tape()
    seen: list[int] = []
    for number in range(20):
        tape.observe([7] * 10, number)
        taken = asyncio.run(act(tape.context, Count([]), seen))  # pyright: ignore
        tape.record_experts(taken)
        tape.add(taken, number)
    assert tape.expert_columns()[1].sum() == 239
    arrays = {id(row.base): row.base for row in tape.experts.values() if row.base is not None}
    assert sum(each.nbytes for each in arrays.values()) == 239 * ROW_BYTES


def test_record_has_the_experts_of_a_token_once() -> None:
    recording = Recordings(None).begin(LEASE)
    seen: list[int] = []
    tape = Tape()
    replayed = Tape()

    async def act_on(ids: list[int], session: EnvSession) -> Turn:
        return await act(ids, session, seen)

    async def take(into: Tape) -> None:
        _, take_turn = recording.replay(lambda: None, act_on)  # pyright: ignore
        for number in range(20):
            if number == 10:
                into.restart([9] * 30, number)
            into.observe([7] * 10, number)
            taken = await take_turn(into.context, Count([]))  # pyright: ignore
            into.record_experts(taken)
            into.add(taken, number)

    asyncio.run(take(tape))
    asyncio.run(take(replayed))
    assert len(seen) == 20, "the second time all turns are recorded ones"
    for ours, theirs in zip(tape.expert_columns(), replayed.expert_columns(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    stored = [turn.experts for turn in recording.events.turns]
    num_bytes = sum(each.nbytes for each in stored if each is not None)
    assert num_bytes == int(tape.expert_columns()[1].sum()) * ROW_BYTES


def test_segments_have_the_experts_of_their_own_context() -> None:
    options = AgentOptions(context=ContextKind.WINDOW, context_turns=1)
    got = played(options, max_tokens=150, text="o" * 70)
    rows = as_rows(got)
    assert len(rows) > 1
    for row in rows:
        known = np.flatnonzero(row.expert_mask)
        assert row.expert_ids[known, 0, 1].tolist() == known.tolist()
        assert row.expert_mask[:-1].all()
    again = joined(rows)
    assert np.array_equal(again.expert_ids, got.expert_ids)
    assert np.array_equal(again.expert_mask, got.expert_mask)


def test_recorded_experts_cross_the_wire_unchanged() -> None:
    got = played(AgentOptions())
    arrived = decode(encode(got))
    assert arrived.expert_ids.dtype == np.uint8
    assert np.array_equal(arrived.expert_ids, got.expert_ids)
    assert np.array_equal(arrived.expert_mask, got.expert_mask)
    assert decode(encode(make_trajectory([5, 6], [0, 1]))).expert_ids.size == 0


def test_block_places_the_experts_of_each_sequence() -> None:
    bare = make_trajectory([5, 6, 7], [0, 0, 1])
    got = played(AgentOptions())
    samples = [Sample(trajectory=each, advantage=1.0) for each in (got, bare)]
    (micro,) = make_microbatches(samples, [0, 1], max_tokens=100, device="cpu", is_packed=True)
    routes = micro.tokens.routes
    assert routes is not None
    num = len(got.token_ids)
    assert routes.mask[:num].tolist() == got.expert_mask.tolist()
    assert not routes.mask[num:].any()  # The other sequence and the filling of the row.
    assert np.array_equal(routes.ids[:num].numpy(), got.expert_ids)
    (plain,) = make_microbatches(samples, [1], max_tokens=100, device="cpu")
    assert plain.tokens.routes is None


SHAPE = RoutingShape(num_layers=2, num_chosen=2, num_experts=64)


@pytest.mark.parametrize(
    ("ids", "mask", "reason"),
    [
        (np.zeros((2, 2, 2), np.uint8), np.ones(2, bool), ""),
        (np.zeros((2, 2, 2), np.int16), np.zeros(2, bool), ""),
        (np.zeros(0, np.uint8), np.zeros(0, bool), ""),
        (np.zeros((2, 2, 2), np.int32), np.ones(2, bool), "has dtype int32"),
        (np.zeros((2, 2, 2), np.uint8), np.ones(2, np.int32), "expert_mask has dtype int32"),
        (np.zeros((3, 2, 2), np.uint8), np.ones(2, bool), "token_ids has 2 tokens"),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(0, bool), "token_ids has 2 tokens"),
        (np.zeros((2, 4), np.uint8), np.ones(2, bool), "token_ids has 2 tokens"),
        (np.zeros((2, 3, 2), np.uint8), np.ones(2, bool), r"[layer, chosen] = (2, 2)"),
        (np.full((2, 2, 2), 64, np.uint8), np.ones(2, bool), "64 experts"),
        (np.full((2, 2, 2), -1, np.int16), np.ones(2, bool), "ids -1..-1"),
    ],
)
def test_invalid_records_of_experts_are_refused(
    ids: np.ndarray, mask: np.ndarray, reason: str
) -> None:
    trajectory = make_trajectory([5, 6], [0, 1], expert_ids=ids, expert_mask=mask)
    found = refusal_of_experts(trajectory, SHAPE)
    assert reason in found
    assert bool(found) == bool(reason)
