"""Laws of direct preference optimisation."""

import copy
import json
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config.learner import LearnerSection, Precision
from common.errors import ConfigError
from learner.policy.finite import TrainingDiverged
from tests.learner.builders import make_model, make_model_with_adapters
from tools.offline import dpo
from tools.offline.config import DpoSection
from tools.offline.dpo import Pair, make_pairs, preference_loss
from tools.offline.rows import Row, read_rows
from tools.offline.scratch import make_tokenizer
from tools.offline.training import make_passes

LEARNER = LearnerSection(warmup_steps=0, precision=Precision.FP32)


def row(item: str, reward: float, tokens: list[int]) -> Row:
    """Build an episode that begins with one observation token."""
    return Row(
        item_id=item,
        reward=reward,
        token_ids=np.array([1, *tokens], dtype=np.int32),
        mask=np.array([False, *[True] * len(tokens)]),
    )


def test_loss_matches_hand_computed_numbers() -> None:
    scores = torch.tensor([[-1.0, -3.0], [-2.0, -2.0]])
    reference = torch.tensor([[-2.0, -2.0], [-2.0, -2.0]])
    losses, margins = preference_loss(scores, reference, beta=0.5)
    assert margins.tolist() == [1.0, 0.0]  # 0.5 * ((-1 + 2) - (-3 + 2))
    assert losses.tolist() == pytest.approx([log(1 + exp(-1)), log(2)])


def test_preference_loss_penalises_a_less_likely_chosen_episode() -> None:
    reference = torch.full((2, 2), -2.0)
    scores = torch.tensor([[-3.0, -6.0], [-1.0, -2.0]])  # the first pushed both down
    losses, margins = preference_loss(scores, reference, beta=0.5, keep_chosen=3.0)
    assert margins.tolist() == [1.5, 0.5]
    assert losses.tolist() == pytest.approx([log(2), log(1 + exp(-0.5))])


def test_pairs_share_an_item_and_differ_in_reward() -> None:
    rows = [row("a", 1.0, [2]), row("a", 0.0, [3]), row("a", 0.9, [4]), row("b", 1.0, [5])]
    pairs = make_pairs(rows, DpoSection(min_gap=0.5), seed=0)
    assert len(pairs) == 1
    assert (pairs[0].chosen.reward, pairs[0].rejected.reward) == (1.0, 0.0)


def test_pairs_per_item_are_bounded_and_use_distinct_episodes() -> None:
    rows = [row("a", float(i % 2), [i]) for i in range(12)]
    pairs = make_pairs(rows, DpoSection(max_pairs_per_item=3), seed=0)
    assert len(pairs) == 3
    assert len({int(p.chosen.token_ids[1]) for p in pairs}) == 3
    assert len({int(p.rejected.token_ids[1]) for p in pairs}) == 3


def test_fork_and_trunk_are_scored_after_their_common_turns() -> None:
    trunk = row("a", 0.0, [2, 3, 4, 5])
    tokens = np.array([1, 2, 3, 6, 7], dtype=np.int32)
    mask = np.array([False, False, False, True, True])
    fork = replace(trunk, reward=1.0, token_ids=tokens, mask=mask)
    (pair,) = make_pairs([trunk, fork], DpoSection(), seed=0)
    for episode in (pair.chosen, pair.rejected):
        assert episode.mask.tolist() == [False, False, False, True, True]
    same = replace(fork, token_ids=trunk.token_ids[:3], mask=trunk.mask[:3])
    assert make_pairs([trunk, replace(same, reward=1.0)], DpoSection(), seed=0) != []
    assert make_pairs([trunk, replace(same, mask=fork.mask[:3])], DpoSection(), seed=0) == []


@pytest.mark.parametrize("has_adapters", [False, True])
def test_training_prefers_the_chosen_episodes(has_adapters: bool) -> None:
    pairs = [
        Pair(chosen=row("a", 1.0, [2, 3, 4]), rejected=row("a", 0.0, [5, 6])),
        Pair(chosen=row("b", 1.0, [7, 3]), rejected=row("b", 0.0, [5, 8, 9, 9])),
    ]
    cfg = DpoSection(num_epochs=5, batch_pairs=2, lr=3e-3)
    model = make_model_with_adapters() if has_adapters else make_model()
    epochs = dpo.train(model, pairs, cfg, LEARNER, seed=0)
    assert epochs[0]["loss"] == pytest.approx(log(2), abs=1e-5)  # the reference is the start
    assert epochs[-1]["loss"] < 0.6
    assert epochs[-1]["accuracy"] == 1.0


def test_dpo_stops_on_non_finite_policy() -> None:
    pairs = [Pair(chosen=row("a", 1.0, [2, 3, 4]), rejected=row("a", 0.0, [5, 6]))]
    model = make_model()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(TrainingDiverged, match="No step of epoch 1 had a finite loss"):
        dpo.train(model, pairs, DpoSection(num_epochs=2), LEARNER, seed=0)
    model = make_model()
    model.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(TrainingDiverged, match="No step of epoch 1 had a finite loss"):
        dpo.train(model, pairs, DpoSection(num_epochs=9), LEARNER, seed=0)
    assert model.lm_head.weight.equal(before)


def test_only_the_agents_tokens_count() -> None:
    cfg, model = DpoSection(), make_model()
    pair = Pair(chosen=row("a", 1.0, [2, 3]), rejected=row("a", 0.0, [4]))
    got = dpo._score_pairs(make_passes(model, LEARNER), [pair], cfg, LEARNER)
    with torch.no_grad():
        chosen = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
        rejected = model(input_ids=torch.tensor([[1, 4]])).logits[0].log_softmax(-1)
    assert got[0, 0].item() == pytest.approx((chosen[0, 2] + chosen[1, 3]).item(), rel=1e-4)
    assert got[0, 1].item() == pytest.approx(rejected[0, 4].item(), rel=1e-4)


def test_batch_parts_train_like_the_whole() -> None:
    pairs = [
        Pair(chosen=row("a", 1.0, [2, 3, 4]), rejected=row("a", 0.0, [5, 6])),
        Pair(chosen=row("b", 1.0, [7]), rejected=row("b", 0.0, [5, 8, 9, 9])),
        Pair(chosen=row("c", 1.0, [7, 7, 2]), rejected=row("c", 0.0, [3])),
    ]
    cfg = DpoSection(batch_pairs=3, lr=1e-3, sft_coef=0.1)
    found = []
    for budget in (8, 1_000):
        model = make_model()
        learner = LearnerSection(precision=Precision.FP32, max_tokens_per_microbatch=budget)
        dpo.train(model, pairs, cfg, learner, seed=0)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {
            "prompt": [{"role": "user", "content": "2+2?"}],
            "chosen": [{"role": "assistant", "content": "4"}],
            "rejected": [{"role": "assistant", "content": "5"}],
        },
        {
            "prompt": "2+2?",  # The lists repeat the prompt, as in ultrafeedback_binarized.
            "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "rejected": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "5"},
            ],
        },
        {
            "chosen": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}],
            "rejected": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "5"},
            ],
        },
    ],
)
def test_preferences_of_trl_are_pairs(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(f"{json.dumps(record)}\n" * 2, encoding="utf-8")
    tokenizer = make_tokenizer(["2+2? 4 5"] * 8, vocab_size=300)
    rows = read_rows(path, tokenizer=tokenizer, max_tokens=99, key="dpo.data")
    pairs = make_pairs(rows, DpoSection(), seed=0)
    assert len(pairs) == 2
    for pair in pairs:
        trained = [
            tokenizer.decode(row.token_ids[row.mask]) for row in (pair.chosen, pair.rejected)
        ]
        assert trained == ["4<|end|>", "5<|end|>"]
        assert tokenizer.decode(pair.chosen.token_ids) == "<|user|>2+2?<|assistant|>4<|end|>"
        assert pair.chosen.item_id == pair.rejected.item_id


def pairs_of(tmp_path: Path, records: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the texts of the pairs that DPO makes of a file's records, in order."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records), encoding="utf-8")
    tokenizer = make_tokenizer(["one two good bad"] * 8, vocab_size=300)
    rows = read_rows(path, tokenizer=tokenizer, max_tokens=99, key="dpo.data")
    return sorted(
        (
            str(tokenizer.decode(pair.chosen.token_ids)),
            str(tokenizer.decode(pair.rejected.token_ids)),
        )
        for pair in make_pairs(rows, DpoSection(), seed=0)
    )


def answered(prompt: str, answer: str, reward: float, **about: Any) -> dict[str, Any]:
    texts = [("user", prompt), ("assistant", answer)]
    messages = [{"role": role, "content": text} for role, text in texts]
    return {"messages": messages, "reward": reward, **about}


@pytest.mark.parametrize("about", [{}, {"item_id": None}])
def test_episodes_without_an_item_are_paired_by_prompt(tmp_path: Path, about: Any) -> None:
    records = [answered("one", "good", 1.0, **about), answered("two", "bad", 0.0, **about)]
    assert pairs_of(tmp_path, records) == []
    records.append(answered("one", "bad", 0.0, **about))
    chosen, rejected = "<|user|>one<|assistant|>good<|end|>", "<|user|>one<|assistant|>bad<|end|>"
    assert pairs_of(tmp_path, records) == [(chosen, rejected)]


def test_token_rows_without_an_item_are_paired_by_prompt(tmp_path: Path) -> None:
    mask = [False, False, True]
    rows = [([5, 6, 7], 1.0), ([5, 8, 9], 0.0)]
    records = [{"token_ids": ids, "loss_mask": mask, "reward": reward} for ids, reward in rows]
    assert pairs_of(tmp_path, records) == []
    records.append({"token_ids": [5, 6, 9], "loss_mask": mask, "reward": 0.0})
    assert len(pairs_of(tmp_path, records)) == 1


def test_equal_ids_of_two_environments_are_two_items(tmp_path: Path) -> None:
    item = {"item_id": "easy-train-1"}
    records = [
        answered("one", "good", 1.0, env="maze", **item),
        answered("two", "bad", 0.0, env="shop", **item),
    ]
    assert pairs_of(tmp_path, records) == []


def test_a_preference_stays_a_pair_beside_others_of_its_item(tmp_path: Path) -> None:
    answers = [("good", "two"), ("two", "bad"), *[(f"a{i}", f"b{i}") for i in range(4)]]
    records = [
        {"prompt": "one", "chosen": chosen, "rejected": rejected, "item_id": "x"}
        for chosen, rejected in answers
    ]
    frame = "<|user|>one<|assistant|>{}<|end|>".format
    assert pairs_of(tmp_path, records) == sorted((frame(a), frame(b)) for a, b in answers)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a", "chosen": 1, "rejected": "b"}', "record 1: 'chosen' is int; give a text"),
        ('{"chosen": "a", "rejected": "b"}', "record 1: 'prompt' is missing"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": "a"}', "record 2: 'chosen'"),
        (
            '{"prompt": "a", "chosen": "b", "rejected": [{"role": "user", "content": "b"}]}',
            "record 1: 'rejected' begins with a message of 'user' after 'prompt'.*Remove 'prompt'",
        ),
        ('{"question": "a"}', "for dpo.data also 'prompt', 'chosen' and 'rejected'.*'question'"),
    ],
)
def test_malformed_preference_is_named(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, encoding="utf-8")
    tokenizer = make_tokenizer(["a b c"] * 8, vocab_size=300)
    with pytest.raises(ConfigError, match=words):
        read_rows(path, tokenizer=tokenizer, max_tokens=99, key="dpo.data")


@pytest.mark.slow
def test_training_equals_a_plain_loop_over_the_networks_own_logits() -> None:
    pairs = [
        Pair(chosen=row("a", 1.0, [2, 3, 4]), rejected=row("a", 0.0, [2, 5])),
        Pair(chosen=row("b", 1.0, [6]), rejected=row("b", 0.0, [7, 8, 9])),
    ]
    cfg = DpoSection(num_epochs=4, batch_pairs=2, optimizer="adamw", lr=1e-3)
    learner = replace(LEARNER, weight_decay=0.0)
    ours = make_model()
    theirs, reference = copy.deepcopy(ours), copy.deepcopy(ours)
    epochs = dpo.train(ours, pairs, cfg, learner, seed=0)

    def logprob(model: Any, episode: Row) -> torch.Tensor:
        ids = torch.from_numpy(episode.token_ids.astype(np.int64))[None]
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(-1, ids[0, 1:, None]).sum()

    optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=1e-3, betas=(learner.beta1, learner.beta2), weight_decay=0.0
    )
    losses: list[float] = []
    for _ in range(cfg.num_epochs):
        margins = torch.stack(
            [
                logprob(theirs, pair.chosen)
                - logprob(reference, pair.chosen).detach()
                - logprob(theirs, pair.rejected)
                + logprob(reference, pair.rejected).detach()
                for pair in pairs
            ]
        )
        loss = -torch.nn.functional.logsigmoid(cfg.beta * margins).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), learner.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
    assert [epoch["loss"] for epoch in epochs] == pytest.approx(losses, abs=1e-5)
    assert losses[-1] < losses[0] - 0.01
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)
