"""Laws of what an episode has room and time for: its context and its horizon."""

import time
from dataclasses import replace
from typing import Any

import pytest

from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import Turn
from common.config.horizon import HorizonUnit
from common.wire.codec import pack_record, unpack_record
from common.wire.messages import EndReason, EpisodeKind
from learner.ingest.intake import refusal
from tests.actor.rollout.playing import LEASE, TURNS, Count, go_on, play, text_of


def test_horizon_ends_episode_with_last_step_reward() -> None:
    session = Count([go_on(), go_on(), go_on(reward=0.5)])
    got = play(session)
    assert (got.end_reason, got.reward, got.is_success) == (EndReason.HORIZON, 0.5, False)
    assert session.num_closed == 1


def test_context_limit_ends_episode_before_the_turn() -> None:
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
def test_limited_episode_keeps_last_observation_for_critic(
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


@pytest.mark.parametrize("length", [101, 30_000])
def test_oversized_first_page_is_cut_and_played(length: int) -> None:
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


def test_first_page_without_room_leaves_item_unsolved() -> None:
    session = Count([go_on()])
    session.first_observation = "p" * 50
    lease = replace(LEASE, kind=EpisodeKind.EVAL)
    got = play(session, lease=lease, max_tokens=20)
    assert (got.end_reason, got.num_turns, got.is_success) == (EndReason.CONTEXT_FULL, 0, False)
    assert refusal(got, learner_version=6, max_group_size=2) == ""
    got = replace(got, kind=EpisodeKind.TRAIN)
    assert refusal(got, learner_version=6, max_group_size=2) == (
        "the trajectory has no sampled token: even the beginning of the first observation does not"
        " fit into the context; raise actor.max_model_len"
    )


def test_oversized_later_page_is_cut_to_half() -> None:
    long = replace(go_on(), observation="p" * 30_000)
    got = play(Count([long, go_on(done=True)]))
    assert (got.end_reason, got.num_turns, got.num_cut_observations) == (EndReason.DONE, 2, 1)
    num_observed = int((got.turn_ids == 1).sum()) - 1  # and one that was sampled
    assert 40 < num_observed <= 50
    got = play(Count([long]), max_tokens=70)  # cut to 35, which leaves no room for a turn after it
    assert (got.end_reason, got.num_turns) == (EndReason.CONTEXT_FULL, 2)
    assert len(got.token_ids) <= 70


def test_token_horizon_starts_no_turn_beyond_it() -> None:
    lease = replace(LEASE, horizon_unit=HorizonUnit.TOKENS, max_turns=9, horizon=4)
    found = play(Count([go_on(reward=0.5)]), lease=lease)
    assert (found.end_reason, found.num_turns, found.reward) == (EndReason.HORIZON, 2, 0.5)
    assert found.loss_mask.sum() == 3  # 2 and 1; the next turn may have 2
    assert (found.horizon, found.horizon_unit, found.max_turns) == (4, HorizonUnit.TOKENS, 9)
    assert unpack_record(pack_record(found)).horizon_unit is HorizonUnit.TOKENS


def test_seconds_horizon_excludes_waiting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lease = replace(LEASE, horizon_unit=HorizonUnit.SECONDS, max_turns=9, horizon=1)
    waits = [replace(TURNS[0], waited_s=60.0), *TURNS[1:]]
    times = iter([0.6, 0.6, 0.6])

    class Slow(Count):
        async def step(self, action: str) -> HubStepResult:
            now[0] += next(times)
            return await super().step(action)

    # The first turn is waited in more than it took, so it counts as nothing.
    found = play(Slow([go_on()]), lease=lease, turns=waits)
    assert (found.end_reason, found.num_turns) == (EndReason.HORIZON, 3)


def test_truncated_episode_keeps_last_observation_for_critic() -> None:
    steps: list[HubStepResult | Exception | float] = [
        go_on(),
        go_on(reward=0.5, done=True, is_truncated=True),
    ]
    cut, plain = (play(Count(steps), keeps_last=k) for k in (True, False))
    assert cut.end_reason is plain.end_reason is EndReason.TRUNCATED
    assert (cut.reward, cut.num_turns, cut.is_success) == (0.5, 2, False)
    assert not cut.end_reason.is_infrastructure_failure
    assert cut.token_ids.tolist() == [*plain.token_ids.tolist(), 0, 97, 98]
    assert cut.loss_mask.sum() == plain.loss_mask.sum()


def test_finished_task_is_not_truncated() -> None:
    assert play(Count([go_on(done=True)]), keeps_last=True).end_reason is EndReason.DONE


@pytest.mark.parametrize("unit", [HorizonUnit.TOKENS, HorizonUnit.SECONDS])
def test_max_turns_ends_episode_under_every_unit(unit: HorizonUnit) -> None:
    lease = replace(LEASE, horizon_unit=unit, max_turns=2, horizon=1000)
    cut, plain = (play(Count([go_on()]), lease=lease, keeps_last=k) for k in (True, False))
    assert cut.end_reason is plain.end_reason is EndReason.HORIZON
    assert cut.num_turns == plain.num_turns == 2
    in_turns = play(Count([go_on()]), lease=replace(LEASE, horizon=2), keeps_last=True)
    assert cut.token_ids.tolist() == in_turns.token_ids.tolist()
    assert len(plain.token_ids) < len(cut.token_ids)
