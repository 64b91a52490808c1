"""Laws of a version's numbers: they are those that the learner's forward pass uses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Mamba2Config, Mamba2ForCausalLM

from benchmarks.conformance.networks import save_network
from common.config.learner import LoraSection, Precision
from learner.policy.model import load_policy
from learner.policy.precision import DTYPES
from learner.training.trainer import Trainer
from learner.weights.source import PublishedWeights, VersionKeeper
from tests.learner.builders import (
    make_model,
    make_model_with_adapters,
    make_samples,
    tensors_of,
    trainer_of,
)
from tests.learner.experts import make_experts, save_experts

IDS = [[5, 9, 17, 30, 41, 8, 7, 12, 6, 33, 25, 19], [3, 44, 2, 11, 29, 13, 40]]
# In units of the last place of fp32: 7/16 of a unit of the pass.
BELOW_HALF = {Precision.BF16: 0x7000, Precision.FP16: 0xE00}


@torch.no_grad()
def lay_on_grid(model: Any, precision: Precision = Precision.BF16) -> Any:
    """Round the weights to numbers of 16 bits, as a checkpoint in 16 bits has them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(DTYPES[precision]).float())
    return model


def is_on_grid(each: Tensor, precision: Precision) -> bool:
    return torch.equal(each, each.to(DTYPES[precision]).to(each.dtype))


def make(kind: str) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 1, "initializer_range": 0.2}
    match kind:
        case "tied":
            return make_model(is_tied=True)
        case "biases and positions":
            still: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
            gpt2 = GPT2Config(n_embd=32, n_head=2, n_positions=64, **still, **sizes)
            return GPT2LMHeadModel(gpt2).train()
        case "recurrent":
            heads: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 32}
            return Mamba2ForCausalLM(Mamba2Config(hidden_size=32, **heads, **sizes)).train()
        case "dense":
            return make_model()
    return make_experts(kind)


@pytest.mark.parametrize(
    "kind",
    ["dense", "tied", "biases and positions", "recurrent", "qwen3_moe", "mixtral", "gpt_oss"],
)
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        (Precision.BF16, "float32"),
        (Precision.BF16, "bfloat16"),
        (Precision.FP16, "float32"),
        (Precision.FP16, "float16"),
    ],
)
def test_change_that_a_pass_rounds_away_is_not_published(
    kind: str, precision: Precision, dtype: str
) -> None:
    model = lay_on_grid(make(kind), precision)
    trainer = trainer_of(model, precision, dtype=dtype)
    source = trainer.live_weights()
    before, scores = tensors_of(source), trainer.score(IDS)
    kinds = {"seen": 0, "hidden": 0}
    for name, weight in model.named_parameters():
        old = weight.detach().clone()
        with torch.no_grad():  # Away from zero, by less than half a unit.
            bits = weight.view(torch.int32) + BELOW_HALF[precision]
            weight.copy_(torch.where(weight == 0, weight, bits.view(torch.float32)))
        after = tensors_of(source)
        is_sent = any(not torch.equal(each, before[key]) for key, each in after.items())
        is_seen = trainer.score(IDS) != scores
        # The pass may use a number whose small change has no effect on these scores.
        assert is_sent or not is_seen, name
        if is_sent:
            assert weight.ndim == 1 or "mixer" in name or "experts" in name, name
        kinds["seen" if is_sent else "hidden"] += 1
        with torch.no_grad():
            weight.copy_(old)
    assert min(kinds.values()) > 0


STATE_FAMILIES = ["mamba2", "granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_next", "mamba"]
SINK_FAMILIES = ["gpt_oss", "granite_swa", "granitemoe_swa"]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*STATE_FAMILIES, *SINK_FAMILIES])
def test_small_tensors_are_published_as_the_pass_uses_them(tmp_path: Path, family: str) -> None:
    save_network(family, tmp_path)
    model = load_policy(str(tmp_path), device="cpu")
    trainer = trainer_of(lay_on_grid(model), Precision.BF16)
    source = trainer.live_weights()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):  # Large, so that a small share of them has an effect.
                weight.copy_(weight.sign() + 3)
    before, scores = tensors_of(source), trainer.score(IDS)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and weight.numel() > 2000:
            continue
        old = weight.detach().clone()
        with torch.no_grad():
            bits = weight.view(torch.int32) + BELOW_HALF[Precision.BF16]
            weight.copy_(torch.where(weight == 0, weight, bits.view(torch.float32)))
        is_sent = any(
            not torch.equal(each, before[key]) for key, each in tensors_of(source).items()
        )
        assert is_sent == (trainer.score(IDS) != scores), name
        with torch.no_grad():
            weight.copy_(old)


def engine_scores(engine: Any, version: dict[str, Tensor]) -> Tensor:
    """Return the logprobs of an engine in fp32 with the weights of a version."""
    missing, unexpected = engine.load_state_dict(version, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lm_head" not in name]
    scores = []
    with torch.no_grad():
        for row in IDS:
            logits = engine(input_ids=torch.tensor([row])).logits[0, :-1].float()
            scores.append(logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0])
    return torch.cat(scores)


@pytest.mark.parametrize(
    ("precision", "limit"),
    [(Precision.BF16, 0.02), (Precision.FP16, 0.005), (Precision.FP32, 1e-5)],
)
def test_canary_of_a_checkpoint_stays_flat(precision: Precision, limit: float) -> None:
    model, engine = lay_on_grid(make_model(), precision), make_model().eval()
    trainer = trainer_of(model, precision)
    source = trainer.live_weights()
    deltas: list[float] = []
    first = engine_scores(engine, tensors_of(source))
    for version in range(21):
        ours = torch.tensor([each for row in trainer.score(IDS) for each in row])
        version_now = tensors_of(source)
        deltas.append((engine_scores(engine, version_now) - ours).abs().mean().item())
        if precision is not Precision.FP32:
            assert all(
                is_on_grid(each, precision) for each in version_now.values() if each.ndim > 1
            )
        trainer.train_on(make_samples(seed=version), version=version)
    assert deltas[0] < limit
    assert max(deltas) < deltas[0] + limit / 20
    moved = (engine_scores(engine, tensors_of(source)) - first).abs().mean()
    assert moved > (1e-3 if precision is Precision.FP32 else 0.0)


def test_pass_in_fp32_publishes_the_masters() -> None:
    trainer = trainer_of(make_model(), Precision.FP32)
    masters = dict(trainer._model.named_parameters())
    for name, each in tensors_of(trainer.live_weights()).items():
        assert torch.equal(each, masters[name])


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.FP32])
def test_adapters_are_published_as_the_pass_uses_them(precision: Precision) -> None:
    model = make_model_with_adapters()
    trainer = trainer_of(model, precision)
    adapters = tensors_of(trainer.live_weights())
    masters = {name: each for name, each in model.named_parameters() if ".lora_" in name}
    assert len(adapters) == len(masters)
    for each, master in zip(adapters.values(), masters.values(), strict=True):
        used = master.to(DTYPES[precision]).float()
        assert torch.equal(each, used)


@pytest.mark.parametrize("targets", [["experts"], ["q_proj", "o_proj", "experts"]])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.FP32])
def test_engine_with_merged_weights_computes_the_same(
    tmp_path: Path, kind: str, precision: Precision, targets: list[str]
) -> None:
    save_experts(tmp_path, kind)
    lora = LoraSection(rank=4, targets=targets)
    torch.manual_seed(1)
    model = load_policy(str(tmp_path), device="cpu", lora=lora)
    for name, each in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(each, std=0.1)
    trainer = trainer_of(model, precision)
    version = tensors_of(trainer.live_weights())
    plain = load_policy(str(tmp_path), device="cpu")
    receiver = trainer_of(plain, precision)
    before = tensors_of(receiver.live_weights())
    for (name, each), target in zip(version.items(), before.values(), strict=True):
        assert each.shape == target.shape, name
    with torch.no_grad():
        for weight, offset, number in _places(receiver, version):
            weight.reshape(-1)[offset : offset + number.numel()].copy_(number.flatten())
    assert receiver.score(IDS) == trainer.score(IDS)
    assert all(torch.equal(a, version[n]) for n, a in tensors_of(receiver.live_weights()).items())


def _places(receiver: Trainer, version: dict[str, Tensor]) -> Iterator[tuple[Any, int, Tensor]]:
    """Yield each range of a weight in memory, with the numbers of the version that belong there."""
    source = receiver.live_weights()
    for spec, runs in zip(source.specs, source._runs, strict=True):
        flat, at = version[spec.name].flatten(), 0
        for weight, offset, count in runs:
            yield weight, offset, flat[at : at + count]
            at += count


def test_changes_between_versions_are_those_of_the_pass() -> None:
    model = lay_on_grid(make_model())
    trainer = trainer_of(model, Precision.BF16, dtype="bfloat16", lr=1e-6)
    source, keeper = trainer.live_weights(), VersionKeeper()
    keeper.keep(PublishedWeights(version=0, source=source))
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer.train_on(make_samples(), version=0)
    changed = keeper.keep(PublishedWeights(version=1, source=source))
    sent = tensors_of(changed.whole.source)
    for name, each in model.named_parameters():
        assert not torch.equal(each, before[name])
        assert torch.equal(sent[name], each if each.ndim == 1 else each.bfloat16())
    assert changed.changed_frac is not None
    assert 0 < changed.changed_frac < 0.05
