"""Laws of the trajectory gate."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from common.wire.messages import EndReason, EpisodeKind, PolicyKind, Trajectory
from learner.ingest.intake import is_plainly_sound, refusal
from tests.learner.builders import make_trajectory

GOOD = make_trajectory([5, 6, 7, 8], [0, 1, 1, 0], version=3)
TWO_TURNS = {
    "num_turns": 2,
    "invalid_turns": np.zeros(2, dtype=bool),
    "turn_scores": np.ones(2, dtype=np.float32),
}


def judge(trajectory: Trajectory, vocab_size: int | None = None) -> str:
    return refusal(trajectory, learner_version=3, max_group_size=2, vocab_size=vocab_size)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_a_good_trajectory_is_not_refused() -> None:
    assert judge(GOOD) == ""
    assert judge(GOOD, vocab_size=9) == ""
    assert is_plainly_sound(GOOD, learner_version=3, vocab_size=9)  # the short way is taken


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"turn_ids": ints(0, 0, 0)}, "turn_ids has shape (3,), but token_ids has 4 tokens"),
        ({"loss_mask": np.ones((4, 1), dtype=bool)}, "loss_mask has shape (4, 1)"),
        ({"token_ids": np.array(4, dtype=np.int32)}, "token_ids has shape ()"),
        ({"loss_mask": floats(0, 1, 1, 0)}, "loss_mask has dtype float32, expected bool"),
        ({"token_ids": floats(5, 6, 7, 8)}, "token_ids has dtype float32, expected int32"),
        ({"logprobs": floats(0, np.nan, -1, 0)}, "a logprob that is NaN or infinite"),
        ({"logprobs": floats(0, -np.inf, -1, 0)}, "a logprob that is NaN or infinite"),
        ({"logprobs": floats(0, 0.1, -1, 0)}, "a logprob outside [-200, 0] nats"),
        ({"logprobs": floats(0, -201, -1, 0)}, "a logprob outside [-200, 0] nats"),
        ({"versions": ints(-1, 3, 4, -1)}, "versions 3..4, but the learner's newest version is 3"),
        ({"versions": ints(-1, -1, 3, -1)}, "versions -1..3"),
        ({"versions": ints(0, 3, 3, -1)}, "not sampled has a policy version"),
        ({"loss_mask": np.zeros(4, dtype=bool)}, "no sampled token"),
        ({"loss_mask": np.array([1, 1, 1, 0], dtype=bool)}, "first token is marked as sampled"),
        ({"turn_ids": ints(0, 0, 1, 0)}, "turn ids 0..1, but the episode has 1 turn"),
        ({"turn_ids": ints(0, -1, 0, 0)}, "turn ids -1..0, but the episode has 1 turn"),
        ({"turn_ids": ints(0, 1, 0, 0), **TWO_TURNS}, "turn ids of the sampled tokens decrease"),
        ({"token_ids": ints(5, -6, 7, 8)}, "negative token id"),
        ({"member": 2}, "member=2 is out of range for a group of 2"),
        ({"member": -1}, "member=-1 is out of range for a group of 2"),
        ({"reward": 1.1}, "reward=1.1 is not in [0, 1]"),
        ({"reward": float("nan")}, "reward=nan"),
        ({"start_score": 1.1}, "start_score=1.1 is not in [0, 1]"),
        ({"start_score": float("nan")}, "start_score=nan"),
        ({"num_invalid_actions": 2}, "num_invalid_actions=2 is not in [0, num_turns=1]"),
        (
            {"invalid_turns": np.zeros(2, dtype=bool)},
            "invalid_turns=[False, False] must have 1 entry",
        ),
        ({"invalid_turns": np.ones(1, dtype=bool)}, "num_invalid_actions=0 of them must be true"),
        ({"turn_states": ints(1, 2)}, "turn_states has dtype int32 and shape (2,), expected"),
        ({"turn_actions": ints(1, 2)}, "turn_actions has dtype int32 and shape (2,), expected"),
        ({"policy": PolicyKind.EXPERT}, "an episode of policy expert cannot be trained on"),
        ({"action_chars": np.array([97], np.int32)}, "action_chars is not a valid text"),
        ({"action_chars": np.array([-2, -1], np.int32)}, "action_chars is not a valid text"),
        ({"action_chars": np.array([0x110000, -1], np.int32)}, "is not a valid text"),
        ({"action_chars": np.zeros((1, 1), np.int32)}, "action_chars is int32 (1, 1)"),
    ],
)
def test_bad_trajectory_is_refused_with_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in judge(replace(GOOD, **changes))
    assert reason in judge(replace(GOOD, **changes), vocab_size=9)


def test_an_infrastructure_failure_may_be_empty() -> None:
    empty = make_trajectory([], [])
    assert judge(replace(empty, end_reason=EndReason.ENV_ERROR, reward=0.0)) == ""
    assert judge(replace(empty, end_reason=EndReason.DONE)) == "the trajectory has no sampled token"


def test_infrastructure_failure_needs_consistent_lengths() -> None:
    damaged = replace(GOOD, end_reason=EndReason.DEADLINE, versions=ints())
    assert "versions has shape (0,)" in judge(damaged)


def test_evaluation_accepts_any_policy_and_member() -> None:
    scripted = replace(
        GOOD,
        kind=EpisodeKind.EVAL,
        policy=PolicyKind.RANDOM_VALID,
        member=7,
        versions=ints(-1, -1, -1, -1),
    )
    assert judge(scripted) == ""


def test_unsampled_tokens_may_have_any_logprob_and_turn() -> None:
    assert judge(replace(GOOD, logprobs=floats(np.nan, -1, -1, 5))) == ""
    assert judge(replace(GOOD, turn_ids=ints(7, 0, 0, -3))) == ""


def test_turns_in_order_are_not_refused() -> None:
    assert judge(replace(GOOD, turn_ids=ints(0, 0, 1, 1), **TWO_TURNS)) == ""


@pytest.mark.parametrize(
    ("vocab_size", "reason"),
    [(9, ""), (8, "token id 8 is outside the vocabulary of 8 tokens"), (None, "")],
)
def test_token_beyond_known_vocabulary_is_refused(vocab_size: int | None, reason: str) -> None:
    judged = refusal(GOOD, learner_version=3, max_group_size=2, vocab_size=vocab_size)
    assert judged == reason


def test_trajectory_beyond_microbatch_limit_is_refused() -> None:
    failed = replace(GOOD, end_reason=EndReason.ENV_ERROR)
    for trajectory in (GOOD, failed):
        limits: dict[str, Any] = {"learner_version": 3, "max_group_size": 2}
        assert refusal(trajectory, **limits, max_tokens=4) == ""
        reason = refusal(trajectory, **limits, max_tokens=3)
        assert reason.startswith("a segment has 4 tokens, more than a microbatch of 3 (learner.max")


def test_episode_whose_first_prompt_does_not_fit_is_refused_with_its_reason() -> None:
    empty = replace(
        make_trajectory([], []),
        end_reason=EndReason.CONTEXT_FULL,
        error="the agent's request exceeds the context: The prompt has 9,000 tokens",
    )
    assert judge(empty) == f"the trajectory has no sampled token: {empty.error}"
