"""Laws of supervised fine-tuning."""

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer, Trainer, TrainingArguments

from benchmarks.conformance.networks import save_composite
from common.config.learner import Layout, LearnerSection, LoraSection, OptimizerKind, Precision
from common.errors import ConfigError
from learner.policy.finite import TrainingDiverged
from learner.policy.model import load_policy
from learner.training.optimizer import LossScale
from tests.configs import edited
from tests.tools.offline import builders
from tools.exchange.agent_traj import Conversation, Message
from tools.offline import sft
from tools.offline.config import DpoSection, SftConfig, SftSection
from tools.offline.rows import Row, row_of_conversation
from tools.offline.scratch import make_policy, make_tokenizer, save_policy
from tools.offline.training import load_start, make_passes

TEXTS = ["you see a red ball", "go to red ball", "you see a blue key", "pick up blue key"]
TOKENIZER = make_tokenizer(TEXTS * 4, vocab_size=300)
TINY = replace(builders.TINY, num_epochs=40, lr=1e-2)


def say(*texts: str, first_is_trained: bool = True) -> Conversation:
    """A conversation of user, agent, user, agent, ..."""
    messages = [
        Message(is_agent=i % 2 == 1, is_trained=i % 2 == 1 and (i > 1 or first_is_trained), text=t)
        for i, t in enumerate(texts)
    ]
    return Conversation(item_id="x", messages=messages)


CORPUS = [say(TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[3]), say(TEXTS[2], TEXTS[3])] * 4


def text_of(ids) -> str:
    return cast(str, TOKENIZER.decode([int(i) for i in ids]))


def rows_of(*conversations: Conversation) -> list[Row]:
    return [row_of_conversation(TOKENIZER, conversation) for conversation in conversations]


def test_epoch_holds_every_row_once_within_its_limit() -> None:
    rows = [
        Row(
            item_id="x",
            reward=1.0,
            token_ids=np.full(length, i, dtype=np.int32),
            mask=np.ones(length, dtype=bool),
        )
        for i, length in enumerate((5, 30, 7, 7, 12, 3, 64, 9))
    ]
    epoch = list(sft.batches(rows, batch_tokens=32, generator=torch.Generator().manual_seed(0)))
    assert sorted(int(row.token_ids[0]) for batch in epoch for row in batch) == list(range(8))
    for batch in epoch:
        longest = max(len(row.token_ids) for row in batch)
        assert len(batch) == 1 or len(batch) * longest <= 32


def test_rate_warms_up_and_falls_to_a_tenth() -> None:
    assert sft._schedule(0.0) == pytest.approx(1e-3)
    assert sft._schedule(0.03) == pytest.approx(1.0, abs=0.01)
    assert sft._schedule(1.0) == pytest.approx(0.1)
    assert sft._schedule(1.5) == pytest.approx(0.1)


def test_bad_batches_are_skipped_up_to_a_limit() -> None:
    rows, cfg = rows_of(*CORPUS), replace(TINY, batch_tokens=32, num_epochs=2)
    for num_bad in (1, 2):
        model = make_policy(TINY, TOKENIZER, seed=0)
        left = [num_bad]

        def spoil(gradient: Tensor, left: list[int] = left) -> Tensor:
            left[0] -= 1
            return gradient * torch.nan if left[0] >= 0 else gradient

        model.lm_head.weight.register_hook(spoil)
        learner = LearnerSection(warmup_steps=0, max_bad_steps=2)
        if num_bad == 2:
            with pytest.raises(TrainingDiverged, match="2 consecutive steps up to step 2"):
                sft.train(model, rows, cfg, learner, seed=0)
        else:
            assert all(map(math.isfinite, sft.train(model, rows, cfg, learner, seed=0)))
        assert all(torch.isfinite(each).all() for each in model.state_dict().values())


def test_non_finite_policy_is_not_written(tmp_path: Path) -> None:
    model = make_policy(TINY, TOKENIZER, seed=0)
    model.model.norm.weight.data[0] = torch.inf
    with pytest.raises(TrainingDiverged, match="has NaN or infinite values"):
        save_policy(tmp_path / "policy", model, TOKENIZER)
    assert not (tmp_path / "policy").exists()


@pytest.mark.parametrize(
    ("length", "num_steps"),
    # Four rows for two epochs: longer than a batch, just over half of one, a quarter of one.
    [(48, 8), (20, 8), (8, 2)],
)
def test_rate_ends_at_a_tenth_in_the_last_step(length: int, num_steps: int) -> None:
    rows = [
        Row(item_id="", reward=1.0, token_ids=np.arange(length) % 9, mask=np.arange(length) > 0)
        for _ in range(4)
    ]
    model = make_policy(TINY, TOKENIZER, seed=0)
    cfg = replace(TINY, batch_tokens=32, num_epochs=2)
    found: list[dict[str, float]] = []
    sft.train(model, rows, cfg, LearnerSection(), seed=0, log=found.append)
    rates = [each["lr_scale"] for each in found]
    # The cosine from 1 to .1: of the eighths of the way, and of its halves.
    expected = [
        0.1 + 0.45 * (1 + math.cos(math.pi * (i + 1) / num_steps)) for i in range(num_steps)
    ]
    assert rates == pytest.approx(expected)
    assert rates[-1] == pytest.approx(0.1)
    assert sum(each < 0.11 for each in rates) == 1


class Sequential(Trainer):
    """transformers' training loop over given batches, in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(cast(Any, self.train_dataset))


@pytest.mark.slow
def test_training_equals_the_loop_of_transformers(tmp_path: Path) -> None:
    rows = rows_of(*CORPUS)
    learner = LearnerSection(weight_decay=0.0, precision=Precision.FP32)
    cfg = replace(TINY, num_epochs=3, optimizer="adamw", lr=1e-3, batch_tokens=64)
    start = make_policy(TINY, TOKENIZER, seed=0)
    ours, theirs = copy.deepcopy(start), copy.deepcopy(start)
    steps: list[dict[str, float]] = []
    sft.train(ours, rows, cfg, learner, seed=0, log=steps.append)

    generator = torch.Generator().manual_seed(0)
    parts = [
        part
        for _ in range(cfg.num_epochs)
        for part in sft.batches(rows, batch_tokens=cfg.batch_tokens, generator=generator)
    ]
    optimizer = torch.optim.AdamW(
        theirs.parameters(), lr=1e-3, betas=(learner.beta1, learner.beta2), weight_decay=0.0
    )
    scales = [step["lr_scale"] for step in steps]
    schedule = LambdaLR(optimizer, lambda step: scales[min(step, len(scales) - 1)])
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=1,
        num_train_epochs=1,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Sequential(
        model=theirs,
        args=arguments,
        train_dataset=cast(Any, [labelled(part) for part in parts]),
        data_collator=lambda batches: batches[0],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses == pytest.approx([step["loss"] for step in steps], abs=2e-4)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], tensor, atol=1e-4, rtol=1e-3)


def labelled(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Return rows as a padded batch of transformers: labels of the trained tokens only."""
    width = max(len(row.token_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels, attention = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (own_ids, own_labels, own_attention) in zip(
        rows, zip(ids, labels, attention, strict=True), strict=True
    ):
        size = len(row.token_ids)
        own_ids[:size] = torch.from_numpy(row.token_ids.astype(np.int64))
        own_labels[:size] = torch.where(torch.from_numpy(row.mask), own_ids[:size], -100)
        own_attention[:size] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": attention}


@pytest.mark.parametrize(
    ("section", "learner", "expected"),
    [
        (SftSection(from_scratch=True), {"optimizer": "muon"}, ("muon", 1e-3, 0.02)),
        (SftSection(), {"optimizer": "muon"}, ("adamw", 2e-5, 3e-4)),
        (SftSection(), {"lora": LoraSection(rank=4)}, ("adamw", 2e-4, 3e-4)),
        (SftSection(optimizer="muon", lr=1e-2, muon_lr=0.1), {}, ("muon", 1e-2, 0.1)),
        (DpoSection(), {"optimizer": "muon"}, ("adamw", 5e-7, 3e-4)),
        (DpoSection(lr=1e-6), {"lora": LoraSection(rank=4)}, ("adamw", 1e-6, 3e-4)),
    ],
)
def test_rates_follow_the_kind_of_start(
    section: SftSection | DpoSection, learner: dict[str, Any], expected: tuple[str, float, float]
) -> None:
    learner = {**learner, "optimizer": OptimizerKind(learner.get("optimizer", "adamw"))}
    rated = section.rated(LearnerSection(**learner))
    assert (rated.optimizer, rated.lr, rated.muon_lr) == expected


@pytest.mark.slow
def test_loss_falls_on_trained_tokens_only() -> None:
    rows = rows_of(*CORPUS)
    model = make_policy(TINY, TOKENIZER, seed=0)
    losses = sft.train(model, rows, TINY, LearnerSection(warmup_steps=0), seed=0)
    assert len(losses) == 40
    assert losses[0] < 1.05 * math.log(model.config.vocab_size)
    assert losses[-1] < 0.3
    ids = torch.from_numpy(rows[0].token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    is_trained = torch.from_numpy(rows[0].mask[1:])
    assert -chosen[is_trained].mean() < 0.3
    assert -chosen[~is_trained].mean() > 2.0


def test_losses_in_fp16_are_those_of_fp32_within_rounding() -> None:
    losses: dict[Precision, list[float]] = {}
    scales: list[float] = []
    for precision in (Precision.FP32, Precision.FP16):
        model = make_policy(TINY, TOKENIZER, seed=0)
        losses[precision] = sft.train(
            model,
            rows_of(*CORPUS),
            replace(TINY, num_epochs=4),
            LearnerSection(device="cpu", precision=precision, warmup_steps=0),
            seed=0,
            log=lambda each: scales.append(each.get("train/loss_scale", 1.0)),
        )
    assert losses[Precision.FP16] == pytest.approx(losses[Precision.FP32], rel=5e-3)
    assert losses[Precision.FP16][-1] < losses[Precision.FP16][0] - 0.5
    assert set(scales) == {1.0, LossScale.FIRST}


@pytest.mark.parametrize("prompt_coef", [0.0, 0.25, 1.0])
def test_prompt_tokens_count_by_their_weight(prompt_coef: float) -> None:
    rows = rows_of(*CORPUS[:2])
    model = make_policy(TINY, TOKENIZER, seed=0)
    losses: list[Tensor] = []
    weights: list[Tensor] = []
    for row in rows:
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        with torch.no_grad():
            logprobs = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        losses.append(-logprobs.gather(1, ids[1:, None])[:, 0])
        weights.append(torch.where(torch.from_numpy(row.mask[1:]), 1.0, prompt_coef))
    loss, weight = torch.cat(losses), torch.cat(weights)
    is_own = torch.cat([torch.from_numpy(row.mask[1:]) for row in rows])
    found, sums = sft.nll(make_passes(model, LearnerSection()), rows, prompt_coef=prompt_coef)
    assert found.item() == pytest.approx(((loss * weight).sum() / weight.sum()).item(), rel=1e-4)
    assert sums["weight"] == is_own.sum()
    assert sums["loss"] == pytest.approx(loss[is_own].sum().item(), rel=1e-4)


@pytest.mark.parametrize("prompt_coef", [0.0, 0.3])
def test_packed_rows_have_the_padded_loss_and_gradient(prompt_coef: float) -> None:
    found: list[tuple[Tensor, Tensor]] = []
    for layout in (Layout.PADDED, Layout.PACKED):
        model = make_policy(TINY, TOKENIZER, seed=0)
        passes = make_passes(model, LearnerSection(layout=layout, precision=Precision.FP32))
        assert passes.is_packed is (layout is Layout.PACKED)
        loss, _ = sft.nll(passes, rows_of(*CORPUS), prompt_coef=prompt_coef)
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((loss, gradient))
    (loss, gradient), (packed_loss, packed) = found
    assert packed_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert (packed - gradient).norm() < 1e-6 * gradient.norm()


@pytest.mark.slow
def test_policy_from_scratch_is_written_in_a_loadable_form(tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.jsonl"
    records = [
        {
            "conversations": [
                {"from": "gpt" if m.is_agent else "human", "loss": m.is_trained, "value": m.text}
                for m in conversation.messages
            ]
        }
        for conversation in CORPUS
    ]
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    cfg = SftConfig(sft=TINY, learner=LearnerSection(device="cpu"))
    cfg = edited(cfg, {"sft.output": str(tmp_path / "policy")})
    folder = sft.run(cfg, path)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.chat_template == TOKENIZER.chat_template
    model = load_policy(str(folder), device=torch.device("cpu"))
    assert model.config.vocab_size % 64 == 0
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.slow
def test_adapters_are_merged_into_written_policy(tmp_path: Path) -> None:
    model = make_policy(TINY, TOKENIZER, seed=0)
    save_policy(tmp_path / "base", model, TOKENIZER)
    learner = LearnerSection(device="cpu", lora=LoraSection(rank=4))
    adapted, _ = load_start(str(tmp_path / "base"), learner)
    losses = sft.train(adapted, rows_of(*CORPUS), TINY, learner, seed=0)
    assert losses[-1] < losses[0] - 0.3  # The random head stays frozen.
    folder = save_policy(tmp_path / "policy", adapted, TOKENIZER)
    plain = load_policy(str(folder), device="cpu")
    ids = torch.arange(9)[None]
    torch.testing.assert_close(plain(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(
        plain.lm_head.weight, load_start(str(tmp_path / "base"), learner)[0].lm_head.weight
    )


@pytest.mark.slow
def test_language_model_of_a_composite_is_tuned_alone(tmp_path: Path) -> None:
    start = save_composite("mistral3", tmp_path / "start")
    learner = LearnerSection(device="cpu")
    model, tokenizer = load_start(str(start), learner)
    rows = [row_of_conversation(tokenizer, conversation) for conversation in CORPUS]
    small = replace(TINY, num_epochs=1, batch_tokens=512)
    sft.train(model, rows, small, learner, seed=0)
    written = save_policy(tmp_path / "policy", model, tokenizer)
    changed: dict[bool, set[bool]] = {}  # By whether the weight is the language model's.
    for path in start.glob("*.safetensors"):
        after = load_file(written / path.name)
        for name, tensor in load_file(path).items():
            is_text = name.startswith("language_model.")
            changed.setdefault(is_text, set()).add(not tensor.equal(after[name]))
    assert changed == {True: {True}, False: {False}}


def test_adapters_need_a_base(tmp_path: Path) -> None:
    cfg = SftConfig(sft=TINY, learner=LearnerSection(lora=LoraSection(rank=4)))
    with pytest.raises(ConfigError, match=r"^learner\.lora\.rank=4: .*sft\.from_scratch=false"):
        sft.run(cfg, tmp_path / "demonstrations.jsonl")


def test_no_conversation_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("\n", encoding="utf-8")
    cfg = SftConfig(sft=TINY, learner=LearnerSection(device="cpu"))
    with pytest.raises(ConfigError, match=r"sft\.demonstrations=.*no episode has a token"):
        sft.run(cfg, path)


def test_bf16_checkpoint_is_tuned_in_fp32_and_hidden_updates_are_measured(tmp_path: Path) -> None:
    save_policy(tmp_path, make_policy(TINY, TOKENIZER, seed=0).bfloat16(), TOKENIZER)
    small = replace(TINY, num_epochs=1, lr=3e-5, muon_lr=3e-5)
    hidden: dict[Precision, list[float]] = {}
    for precision in (Precision.AUTO, Precision.BF16):
        learner = LearnerSection(device="cpu", precision=precision)
        model, _ = load_start(str(tmp_path), learner)
        shares = hidden.setdefault(precision, [])
        log = shares.append
        sft.train(
            model,
            rows_of(*CORPUS),
            small,
            learner,
            seed=0,
            log=lambda each, log=log: log(each["train/vanished_update_frac"]),
        )
    assert set(hidden[Precision.AUTO]) == {0.0}
    assert hidden[Precision.BF16]
    assert min(hidden[Precision.BF16]) > 0.5
