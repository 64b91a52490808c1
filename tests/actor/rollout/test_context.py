"""Laws of episodes beyond their context: training uses the prompts that the policy received."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actor.rollout.context import LEFT_OUT, REQUEST
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import EnvSession, Turn
from common.config.actor import ActorSection, AgentOptions, ContextKind
from common.config.algorithm import AlgorithmSection, Correction, PolicyLoss
from common.config.horizon import HorizonUnit
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.segments import as_rows
from common.wire.messages import EndReason, Trajectory
from learner.ingest.intake import refusal
from tests.actor.rollout.playing import LEASE, Count, play

WINDOW, SUMMARY = ContextKind.WINDOW, ContextKind.SUMMARY
LONG = replace(LEASE, horizon=12)


class Policy:
    """Samples one or two letters and records prompts and answers."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.asked: list[tuple[list[int], list[int]]] = []

    async def act(self, ids: list[int], _: EnvSession) -> Turn:
        said = [self._random.randrange(97, 123) for _ in range(self._random.randint(1, 2))]
        is_stopped = self._random.random() < 0.7
        said[-1] = 0 if is_stopped else said[-1]
        self.asked.append((list(ids), said))
        num = len(said)
        return Turn(said, [-1.0] * num, [4] * num, is_stopped=is_stopped, num_prompt=len(ids))


def saying(text: str) -> list[HubStepResult | Exception | float]:
    return [
        HubStepResult(observation=text, reward=0.25, done=False, is_valid=True, is_success=False)
    ]


def outgrown(
    options: AgentOptions, *, max_tokens: int, text: str = "o" * 30, seed: int = 0, **how: Any
) -> tuple[Trajectory, Policy]:
    policy = Policy(seed)
    how = {"lease": LONG, "act": policy.act, "max_tokens": max_tokens, "options": options, **how}
    return play(Count(saying(text)), **how), policy


def turns_of(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """Return, in order, what lies before each run of sampled tokens of a row, and these."""
    found: list[tuple[list[int], list[int]]] = []
    for row in as_rows(trajectory):
        edges = np.flatnonzero(np.diff(row.loss_mask.astype(int), prepend=0, append=0))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            found.append((row.token_ids[:start].tolist(), row.token_ids[start:end].tolist()))
    return found


def refused(trajectory: Trajectory, max_tokens: int) -> str:
    how: dict[str, Any] = {"learner_version": 4, "max_group_size": 2, "max_tokens": max_tokens}
    return refusal(trajectory, **how)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 30, 60, 500])
@pytest.mark.parametrize("turns", [1, 2, 5])
def test_window_trains_on_exactly_its_prompts(turns: int, length: int, seed: int) -> None:
    options = AgentOptions(context=WINDOW, context_turns=turns)
    how: dict[str, Any] = {"max_tokens": 130, "keeps_last": seed % 2 == 0, "seed": seed}
    got, policy = outgrown(options, text="o" * length, **how)
    assert turns_of(got) == policy.asked
    assert (got.end_reason, got.num_turns) == (EndReason.HORIZON, 12)
    assert refused(got, 130) == ""
    assert (len(got.segment_starts) > 1) == (length > 1)
    assert all(len(prompt) + 2 <= 130 for prompt, _ in policy.asked)


@pytest.mark.parametrize("reflect_every", [0, 2])
@pytest.mark.parametrize("length", [1, 30, 500])
@pytest.mark.parametrize("turns", [1, 5])
def test_critic_reads_the_end_of_a_window_at_the_next_prompt(
    turns: int, length: int, reflect_every: int
) -> None:
    options = AgentOptions(context=WINDOW, context_turns=turns, reflect_every=reflect_every)
    text = "o" * length
    _, whole = outgrown(options, max_tokens=400, text=text)
    for horizon in range(1, 12):
        lease = replace(LEASE, horizon=horizon)
        got, policy = outgrown(options, lease=lease, keeps_last=True, max_tokens=400, text=text)
        start = got.segment_starts[-1] if got.segment_starts.size else 0
        assert got.token_ids[start:].tolist() == whole.asked[len(policy.asked)][0]
        assert refused(got, 400) == ""
        assert turns_of(got) == policy.asked


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [1, 100, 2000])
@pytest.mark.parametrize("learns", [True, False])
def test_summary_trains_on_exactly_its_prompts(learns: bool, length: int, seed: int) -> None:
    options = AgentOptions(context=SUMMARY, learn_summaries=learns)
    got, policy = outgrown(options, max_tokens=900, text="o" * length, seed=seed)
    demand = [ord(c) for c in REQUEST]
    of_summaries = [each for each in policy.asked if each[0][-len(demand) :] == demand]
    acts = [each for each in policy.asked if each not in of_summaries]
    assert turns_of(got) == (policy.asked if learns else acts)
    assert len(acts) == got.num_turns == 12
    assert len(of_summaries) == max(len(got.segment_starts) - 1, 0)
    assert (len(of_summaries) > 0) == (length > 1)
    assert refused(got, 900) == ""
    # A new segment begins with the first message, the demand, and the summary as it was sampled.
    for row, (_, summary) in zip(as_rows(got)[1:], of_summaries, strict=True):
        head = [*(ord(c) for c in f"first\n\n{REQUEST}"), *summary]
        assert row.token_ids[: len(head)].tolist() == head
        assert not row.loss_mask[: len(head)].any()


def test_window_keeps_first_message_and_latest_turns() -> None:
    said = iter([Turn([97 + n, 0], [-1.0, -2.0], [4, 5]) for n in range(12)])

    async def act(_: list[int], __: EnvSession) -> Turn:
        return next(said)

    options = AgentOptions(context=WINDOW, context_turns=1)
    lease = replace(LEASE, horizon=5)
    got = play(Count(saying("o" * 30)), lease=lease, act=act, max_tokens=110, options=options)
    rows = as_rows(got)
    # 5 + 3 * 32 = 101 of 108 tokens; the fourth observation has no room, nor has the fifth.
    text = ["".join(chr(i) if i else "." for i in row.token_ids) for row in rows]
    observed = "o" * 30
    assert text == [
        f"firsta.{observed}b.{observed}c.{observed}d.",
        f"first{LEFT_OUT}d.{observed}e.",
    ]
    assert rows[1].turn_ids.tolist() == [4] * len(rows[1].token_ids)
    assert rows[1].loss_mask.sum() == 2
    assert got.num_turns == 5
    assert got.num_cut_observations == 0


def test_full_context_mode_ends_the_episode() -> None:
    got, _ = outgrown(AgentOptions(), max_tokens=110)
    assert got.end_reason is EndReason.CONTEXT_FULL
    assert got.segment_starts.size == 0


def test_window_without_segment_room_ends_context_full() -> None:
    got, _ = outgrown(AgentOptions(context=WINDOW), max_tokens=60)
    assert got.end_reason is EndReason.CONTEXT_FULL
    assert refused(got, 60) == ""


def test_summaries_count_in_a_horizon_of_tokens() -> None:
    options = AgentOptions(context=SUMMARY)
    got, policy = outgrown(options, max_tokens=900, text="o" * 100)
    assert got.num_prompt_tokens == sum(len(prompt) for prompt, _ in policy.asked)


@pytest.mark.parametrize(
    ("algorithm", "named"),
    [
        (AlgorithmSection(policy_loss=PolicyLoss.GSPO), "algorithm.policy_loss='gspo'"),
        (AlgorithmSection(correction=Correction.GEOMETRIC), "algorithm.correction='geometric'"),
        (AlgorithmSection(correction=Correction.SEQUENCE_TIS), "correction='sequence_tis'"),
        (AlgorithmSection(negative_mask_delta=0.5), "algorithm.negative_mask_delta=0.5"),
    ],
)
@pytest.mark.parametrize("kind", [WINDOW, SUMMARY])
def test_episode_ratios_are_refused_for_segmented_episodes(
    algorithm: AlgorithmSection, named: str, kind: ContextKind
) -> None:
    RunConfig(algorithm=algorithm)
    with pytest.raises(ConfigError, match=named):
        RunConfig(algorithm=algorithm, actor=ActorSection(context=kind))


@pytest.mark.parametrize(
    ("actor", "is_refused"),
    [
        ({}, False),
        ({"context": WINDOW}, False),
        ({"context": SUMMARY, "learn_summaries": False}, False),
        ({"context": SUMMARY}, True),
        ({"context": ContextKind.FOLD}, True),
        ({"context": ContextKind.SUBAGENT}, True),
        ({"endpoint": True, "agent": ["a"]}, True),
    ],
)
def test_turn_ratio_is_refused_for_split_turns(actor: dict[str, Any], is_refused: bool) -> None:
    algorithm = AlgorithmSection(policy_loss=PolicyLoss.TURN)
    if not is_refused:
        RunConfig(algorithm=algorithm, actor=ActorSection(**actor))
        return
    with pytest.raises(
        ConfigError, match=r"policy_loss='turn': computes a ratio over a whole turn"
    ):
        RunConfig(algorithm=algorithm, actor=ActorSection(**actor))


@pytest.mark.parametrize(
    "options",
    [
        AgentOptions(context=WINDOW),
        AgentOptions(context=WINDOW, reflect_every=2),
        AgentOptions(context=SUMMARY, learn_summaries=False),
        AgentOptions(context=SUMMARY),
    ],
)
def test_rows_split_turns_only_as_options_declare(options: AgentOptions) -> None:
    got, _ = outgrown(options, max_tokens=900, text="o" * 100)
    turns = [set(row.turn_ids[row.loss_mask].tolist()) for row in as_rows(got)]
    assert len(turns) > 1
    assert (sum(map(len, turns)) > len(set.union(*turns))) == options.parts_turns


def test_summary_at_token_horizon_ends_the_episode() -> None:
    options = AgentOptions(context=SUMMARY)
    free, policy = outgrown(options, max_tokens=900, text="o" * 100)
    said = [own for _, own in policy.asked]
    at = next(n for n, (ids, _) in enumerate(policy.asked) if ids[-3:] == [*map(ord, REQUEST[-3:])])
    # Another turn of two letters fits before the summary, and not behind it.
    horizon = sum(map(len, said[: at + 1])) + 1
    lease = replace(LONG, horizon_unit=HorizonUnit.TOKENS, max_turns=12, horizon=horizon)
    got, policy = outgrown(options, max_tokens=900, text="o" * 100, lease=lease)
    assert [own for _, own in policy.asked] == said[: at + 1]
    assert (got.end_reason, got.num_turns) == (EndReason.HORIZON, at)
    assert got.loss_mask.sum() == horizon - 1
    assert got.token_ids.tolist() == free.token_ids[: len(got.token_ids)].tolist()
    assert refused(got, 900) == ""


def test_summary_at_seconds_horizon_ends_the_episode() -> None:
    policy = Policy()

    async def act(ids: list[int], session: EnvSession) -> Turn:
        is_asked = ids[-len(REQUEST) :] == [ord(c) for c in REQUEST]
        return replace(await policy.act(ids, session), earlier_s=1_000.0 * is_asked)

    lease = replace(LONG, horizon_unit=HorizonUnit.SECONDS, max_turns=12, horizon=1_000)
    options = AgentOptions(context=SUMMARY)
    got, _ = outgrown(options, max_tokens=900, text="o" * 100, lease=lease, act=act)
    assert got.end_reason is EndReason.HORIZON
    assert 0 < got.num_turns < 12
    assert policy.asked[-1][0][-len(REQUEST) :] == [ord(c) for c in REQUEST]
    assert got.segment_starts.size == 0  # the segment that was to follow has nothing sampled
