"""Laws of episodes of several segments: cutting one up changes neither its weight nor its credit.

A segment whose context is the whole history computes what the uncut episode computes. So whatever
is trained must come out the same, however the rows are dealt.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from actor.rollout.episode import action_number
from common.config.actor import AgentFormat
from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    CreditLevel,
    KlEstimator,
    PolicyLoss,
    Proximal,
    StateCredit,
)
from common.config.learner import CriticSection, Timestep
from common.repository import ROOT
from common.segments import Aside, as_rows, joined
from common.wire.codec import decode, encode, pack_record, unpack_record
from common.wire.messages import EndReason, Trajectory
from learner.batch.batching import Sample, make_minibatches, rows_of
from learner.ingest.buffer import Group
from learner.ingest.episode_stats import EpisodeStats
from learner.ingest.intake import refusal
from learner.journal.journal import JournalWriter
from learner.journal.texts import segments_of as shown_segments
from learner.objective.advantages import Scored, advantages_from_critic, samples_of
from learner.training.digests import _of_episode
from learner.training.ranks import pack_samples, unpack_samples
from tests.learner.builders import VOCAB, make_microbatches, make_trajectory
from tests.learner.training.test_gradients import gradient_step
from tools.dashboard.reading.run_source import recorded_of
from tools.offline.config import DpoSection
from tools.offline.dpo import make_pairs
from tools.offline.rows import newest, num_episodes, read_rows

TURN = [0, 0, 1, 1]  # an observation of two tokens, an action of two


def played(number: int, num_turns: int, *, group_id: str = "g0", **changes: Any) -> Trajectory:
    """Return an episode of turns of four tokens each."""
    rng = np.random.default_rng(number)
    mask = TURN * num_turns
    return make_trajectory(
        rng.integers(0, VOCAB, size=len(mask)).tolist(),
        mask,
        logprobs=(-3.9 + 0.2 * rng.standard_normal(2 * num_turns)).tolist(),
        group_id=group_id,
        member=number,
        **{
            "num_turns": num_turns,
            "turn_ids": np.repeat(np.arange(num_turns, dtype=np.int32), 4),
            "invalid_turns": np.zeros(num_turns, dtype=bool),
            "turn_scores": np.linspace(0.0, 1.0, num_turns, dtype=np.float32),
            "turn_states": np.arange(num_turns, dtype=np.int32) % 2,
        }
        | changes,
    )


def cut(whole: Trajectory, *turns: int) -> Trajectory:
    """Return the episode with a new segment, which repeats the whole history, at each turn."""
    rows: list[Trajectory] = []
    for first, end in zip([0, *turns], [*turns, whole.num_turns], strict=True):
        history, stop = 4 * first, 4 * end
        own = np.arange(stop) >= history
        rows.append(
            replace(
                whole,
                token_ids=whole.token_ids[:stop],
                loss_mask=whole.loss_mask[:stop] & own,
                logprobs=np.where(own, whole.logprobs[:stop], 0).astype(np.float32),
                versions=np.where(own, whole.versions[:stop], -1).astype(np.int32),
                turn_ids=np.maximum(whole.turn_ids[:stop], first),
            )
        )
    return joined(rows)


def groups(is_cut: bool) -> list[Group]:
    """Return two groups; with `is_cut` one has members of several segments."""
    failed = {"reward": 0.0, "is_success": False, "turn_scores": np.zeros(2, dtype=np.float32)}
    open_end = {"end_reason": EndReason.HORIZON, "reward": 0.25}
    members = [
        (played(0, 4), (1, 3)),
        (played(1, 2, **failed), ()),
        (played(2, 3, group_id="g1", **open_end), (2,)),
        (played(3, 2, group_id="g1"), (1,)),
    ]
    chosen = [cut(whole, *turns) if is_cut and turns else whole for whole, turns in members]
    return [Group(group_id="g0", members=chosen[:2]), Group(group_id="g1", members=chosen[2:])]


ALGORITHMS = {
    "grpo by token": AlgorithmSection(),
    "grpo by sequence": AlgorithmSection(aggregation=Aggregation.SEQUENCE),
    "constant denominator, M2": AlgorithmSection(
        aggregation=Aggregation.CONSTANT, correction=Correction.SECOND_MOMENT, m2_threshold=0.02
    ),
    "a ratio per turn": AlgorithmSection(
        policy_loss=PolicyLoss.TURN, aggregation=Aggregation.SEQUENCE
    ),
    "turn credit": AlgorithmSection(reward_level=CreditLevel.TURN, turn_discount=0.9),
    "gigpo, recomputed": AlgorithmSection(
        state_credit=StateCredit.GIGPO, proximal=Proximal.RECOMPUTED
    ),
    "reinforce++": AlgorithmSection(advantage=Advantage.REINFORCE_PP),
    "ppo": AlgorithmSection(advantage=Advantage.PPO, aggregation=Aggregation.SEQUENCE),
    "ppo, turn rewards, reference": AlgorithmSection(
        advantage=Advantage.PPO,
        reward_level=CreditLevel.TURN,
        kl_coef=0.1,
        kl_estimator=KlEstimator.K2,
        entropy_coef=0.01,
    ),
}


@pytest.mark.parametrize("max_tokens", [10_000, 16])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_segmented_episode_has_the_same_gradient(name: str, max_tokens: int) -> None:
    algorithm = ALGORITHMS[name]
    whole = gradient_step(samples_of(groups(False), algorithm), algorithm)
    in_rows = gradient_step(samples_of(groups(True), algorithm), algorithm, max_tokens=max_tokens)
    assert whole.abs().max() > 1e-3
    assert (whole - in_rows).abs().max() < 1e-5  # The weights moved by 1e-1.


def prompt_after(whole: Trajectory) -> Trajectory:
    """Return the whole history and three tokens of a last observation, which train nothing."""
    num = len(whole.token_ids)
    none = np.zeros(num + 3, dtype=np.int32)
    return replace(
        whole,
        token_ids=np.append(whole.token_ids, [3, 5, 7]).astype(np.int32),
        loss_mask=none.astype(bool),
        logprobs=none.astype(np.float32),
        versions=none - 1,
        turn_ids=none + whole.num_turns - 1,
    )


@pytest.mark.parametrize("max_tokens", [10_000, 24])
@pytest.mark.parametrize("turns", [(), (2,)])
def test_value_of_the_end_is_read_in_its_own_segment(
    turns: tuple[int, ...], max_tokens: int
) -> None:
    """The last prompt, as a segment, repeats the history: the episode is that of one segment."""
    algorithm = ALGORITHMS["ppo, turn rewards, reference"]
    open_end: dict[str, Any] = {"end_reason": EndReason.HORIZON, "reward": 0.25}
    won, whole = played(0, 4), played(1, 4, **open_end)
    seen = replace(prompt_after(whole), loss_mask=np.append(whole.loss_mask, [False] * 3))
    seen = replace(seen, logprobs=np.append(whole.logprobs, np.zeros(3, dtype=np.float32)))
    seen = replace(seen, versions=np.append(whole.versions, np.full(3, -1, dtype=np.int32)))
    seen = replace(seen, turn_ids=np.append(whole.turn_ids, np.full(3, 3, dtype=np.int32)))
    apart = joined([*as_rows(cut(whole, *turns)), prompt_after(whole)])
    assert refusal(apart, learner_version=0, max_group_size=2, vocab_size=VOCAB) == ""
    assert len(as_rows(apart)) == len(turns) + 1
    values = [
        gradient_step(
            samples_of([Group(group_id="g0", members=[won, each])], algorithm),
            algorithm,
            max_tokens=max_tokens,
        )
        for each in (seen, apart, whole)
    ]
    assert (values[0] - values[1]).abs().max() < 1e-5
    assert (values[0] - values[2]).abs().max() > 1e-3


def test_credit_passes_between_segments() -> None:
    # Two turns in two segments, paid 1 at the end; V = 0.5, then 0.75; lambda 1:
    # delta = 0.75 - 0.5 and 1 - 0.75, so A = 0.5 and 0.25; the first row's end is unused.
    sample = Sample(trajectory=cut(played(0, 2), 1), advantage=0.0)
    scored = Scored(
        values=np.array([0.5, 9, 0.75, 9], dtype=np.float32),
        end_values=np.array([7.0, 8.0], dtype=np.float32),
        logprobs=sample.trajectory.logprobs[sample.trajectory.loss_mask],
    )
    critic = CriticSection(whiten=False, gae_lambda=1.0, timestep=Timestep.TURN)
    rows = advantages_from_critic(rows_of([sample]), scored, AlgorithmSection(), critic)
    assert [row.token_advantages().tolist() for row in rows] == [[0.5, 0.5], [0.25, 0.25]]
    assert [row.value_targets.tolist() for row in rows if row.value_targets is not None] == [
        [1.0, 1.0],
        [1.0, 1.0],
    ]


def test_rows_share_the_mean_of_their_episode() -> None:
    episode = cut(played(0, 4), 1)  # 2 and 6 sampled tokens
    rows = rows_of([Sample(trajectory=episode, advantage=1.0)])
    micros = make_microbatches(rows, [0, 1], max_tokens=16, device="cpu", is_packed=True)
    assert [
        (m.sample_sizes, m.episode_tokens.tolist()) for m in micros if m.episode_tokens is not None
    ] == [([6], [8.0]), ([2], [8.0])]


@pytest.mark.parametrize("num", [1, 2, 3, 4, 9])
def test_minibatches_do_not_part_an_episode(num: int) -> None:
    rows = rows_of(samples_of(groups(True), AlgorithmSection()))
    parts = make_minibatches(rows, num, generator=torch.Generator().manual_seed(0))
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    owners = [{rows[i].trajectory.episode_id for i in part} for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)) == 4
    assert len(parts) == min(num, 4)


def test_segmented_episode_is_one_group_member() -> None:
    algorithm = AlgorithmSection(normalize_std=False)
    whole, in_rows = (samples_of(groups(is_cut), algorithm) for is_cut in (False, True))
    assert [s.advantage for s in whole] == [s.advantage for s in in_rows]
    stats = EpisodeStats()
    for group in groups(True):
        for member in group.members:
            stats.add(member)
    metrics = stats.metrics(1.0)
    assert metrics["episodes/arrived"] == 4
    assert metrics["episodes/segments_mean"] == 2.0  # 3 + 1 + 2 + 2
    assert metrics["reward/mean"] == (1.0 + 0.0 + 0.25 + 1.0) / 4


def test_segments_survive_wire_journal_and_ranks() -> None:
    episode = cut(played(0, 4), 1, 3)
    (sample,) = unpack_samples(pack_samples([Sample(trajectory=episode, advantage=1.0)]))
    for copy in (decode(encode(episode)), unpack_record(pack_record(episode)), sample.trajectory):
        assert copy.segment_starts.tolist() == [0, 4, 16]
        assert [len(row.token_ids) for row in as_rows(copy)] == [4, 12, 16]


def test_episode_without_segments_is_one_segment() -> None:
    old = played(0, 2)
    frames = encode(old)
    known = unpack_record(pack_record(old))
    assert decode(frames).segment_starts.size == 0
    assert as_rows(known) == [known]
    assert _of_episode(old) != _of_episode(cut(old, 1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"segment_starts": np.array([0.0], dtype=np.float32)}, "not [num_segments] int32"),
        (
            {"segment_starts": np.array([4, 8], dtype=np.int32)},
            "segment_starts [4, 8] must start at 0",
        ),
        ({"segment_starts": np.array([0, 4, 4], dtype=np.int32)}, "segment_starts [0, 4, 4]"),
        ({"segment_starts": np.array([0, 20], dtype=np.int32)}, "segment_starts [0, 20] must"),
        ({"asides": np.array([0, 2], dtype=np.int32)}, "asides is int32 (2,), not [3 * num]"),
        ({"asides": np.array([2, 2, 1], dtype=np.int32)}, "asides [2, 2, 1] must be ordered"),
        ({"asides": np.array([2, 21, 1], dtype=np.int32)}, "[2, 21, 1] must be ordered"),
        ({"asides": np.array([2, 4, 1, 3, 5, 1], dtype=np.int32)}, "[2, 4, 1, 3, 5, 1] must"),
        ({"asides": np.array([2, 4, 9], dtype=np.int32)}, "asides have unknown kinds: [9]"),
        ({"segment_starts": np.array([0, 2], dtype=np.int32)}, "segment 0 has no sampled token"),
        ({"segment_starts": np.array([0, 3], dtype=np.int32)}, "segment 1 begins with a sampled"),
    ],
)
def test_segments_that_cut_nothing_apart_are_refused(changes: dict[str, Any], reason: str) -> None:
    good = cut(played(0, 4), 1)
    how: dict[str, Any] = {"learner_version": 0, "max_group_size": 2, "vocab_size": VOCAB}
    assert refusal(good, **how, max_tokens=16) == ""  # the longest segment counts, not the sum
    assert "a segment has 16 tokens, more than a microbatch of 15" in refusal(
        good, **how, max_tokens=15
    )
    assert reason in refusal(replace(good, **changes), **how)


class Numbers:
    """Shows each token as its number."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{number}>" for number in token_ids]

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(self.texts(token_ids))


def test_replay_shows_each_segments_prompt_and_repeats_its_actions() -> None:
    whole = played(0, 2)
    episode = cut(whole, 1)
    shown = shown_segments(episode, Numbers())
    assert [(each["kind"], each["turn"], each["start"]) for each in shown] == [
        ("prompt", 0, 0),
        ("action", 0, 2),
        ("prompt", 1, 4),  # the whole history
        ("action", 1, 10),
    ]
    actions = recorded_of(episode, Numbers(), style="compact")["actions"]
    assert actions == recorded_of(whole, Numbers(), style="compact")["actions"]
    # Tokens that turn 1 sampled before its segment, such as a summary, are not in its action.
    summary = replace(episode, turn_ids=np.array([1] * 12, dtype=np.int32))
    summary = replace(summary, turn_ids=np.where(np.arange(12) < 2, 0, 1).astype(np.int32))
    assert recorded_of(summary, Numbers(), style="compact")["actions"][1] == actions[1]
    # Earlier samples of the same segment, such as a call of a branch, are not either.
    called = replace(whole, turn_ids=np.array([1] * 8, dtype=np.int32))
    assert recorded_of(called, Numbers(), style="compact")["actions"][1] == actions[1]


def test_replay_repeats_texts_sent_to_an_environment_with_tools() -> None:
    whole = played(0, 2)
    form = AgentFormat.FUNCTION_CALL
    texts = recorded_of(whole, Numbers(), style="compact")["actions"]
    assert recorded_of(whole, Numbers(), style="compact", format=form)["actions"] == ["", ""]
    numbers = np.array([action_number(""), action_number(texts[1])], dtype=np.int32)
    sent = replace(whole, turn_actions=numbers)
    repeated = recorded_of(sent, Numbers(), style="compact", format=form)["actions"]
    assert repeated == ["", texts[1]]


def test_replay_labels_text_unseen_by_environment() -> None:
    whole = played(0, 2)  # sampled in [2, 4) and [6, 8)
    first, second = recorded_of(whole, Numbers(), style="compact")["actions"]
    kinds = [each["kind"] for each in shown_segments(whole, Numbers())]
    assert kinds == ["prompt", "action", "observation", "action"]
    told = np.array([2, 4, Aside.PLAN, 6, 7, Aside.REFLECTION], dtype=np.int32)
    thinking = replace(whole, asides=told)
    shown = shown_segments(thinking, Numbers())
    kinds = [(each["kind"], each["start"]) for each in shown]
    assert kinds == [
        *(("prompt", 0), ("plan", 2), ("observation", 4)),
        *(("reflection", 6), ("action", 7)),
    ]
    assert ["logprobs" in each for each in shown] == [False, True, False, True, True]
    acted = recorded_of(thinking, Numbers(), style="compact")["actions"]
    assert first
    assert acted == ["", second.partition(">")[2]]


def test_imitation_trains_each_segment_and_counts_one_episode(tmp_path: Path) -> None:
    with closing(JournalWriter(tmp_path / "journal")) as journal:
        journal.append(cut(played(0, 4), 1, 3))
        journal.append(replace(played(1, 2), reward=0.0, is_success=False))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
    rows = read_rows(tmp_path, tokenizer=tokenizer, max_tokens=100, key="data")
    assert [(len(row.token_ids), int(row.mask.sum())) for row in rows] == [
        (4, 2),
        (12, 4),
        (16, 2),
        (8, 4),
    ]
    assert num_episodes(rows) == 2
    assert newest(rows, 1) == rows[3:]
    assert newest(rows, 2) == rows
    assert make_pairs(rows, DpoSection(), seed=0) == []  # no segment alone was rewarded
