"""Laws of frozen weights in 8 or 4 bits: learner and engine have equal numbers."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from common.config.learner import (
    Activations,
    ControllerSection,
    LearnerSection,
    LoraSection,
    Moments,
    Precision,
)
from common.config.load import load_config
from common.config.model import BaseFormat, ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.machine import GIB, Gpu
from common.repository import ROOT
from learner.policy.lora import ADAPTER_TENSORS, load_adapter
from learner.policy.model_shape import read_shape
from learner.policy.quantised_base import NF4, dequantise, quantise, quantised_layers
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from tests.learner.builders import VOCAB, make_samples, tensors_of
from tests.pretrained import make_smollm2
from tools.checks.memory_plan import make_plan
from tools.dequantise.models import plain_models
from tools.dequantise.record import read_record

CPU = torch.device("cpu")
FORMATS = [BaseFormat.INT8, BaseFormat.NF4]


@pytest.mark.parametrize("base", FORMATS)
def test_numbers_of_a_format_are_kept_exactly(base: BaseFormat) -> None:
    weight = torch.randn(96, 128, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3] = 0.0
    codes, scales = quantise(weight, base)
    first = dequantise(codes, scales, base, torch.bfloat16)
    again, same_scales = quantise(first.view(96, 128), base)
    assert again.equal(codes)
    assert same_scales.equal(scales)
    assert dequantise(again, same_scales, base, torch.float32).equal(first.float())


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize("size", [1e-34, 1e-36, 1e-38, 1e-39, 1e-40])
def test_small_numbers_are_kept_or_zero(base: BaseFormat, size: float) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * size
    first = dequantise(*quantise(weight, base), base, torch.float32)
    again = dequantise(*quantise(first, base), base, torch.float32)
    assert again.equal(first)
    assert (first.view(64, 64) - weight).abs().max() <= max(0.2 * float(weight.abs().max()), 1e-35)


def test_nf4_takes_the_nearest_of_its_numbers() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    weight = weight.to(torch.bfloat16).float()
    restored = dequantise(*quantise(weight, BaseFormat.NF4), BaseFormat.NF4, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    choices = torch.tensor(NF4) * largest[..., None]  # [row, 1, number]
    nearest = (weight[..., None] - choices).abs().argmin(-1)
    expected = choices.expand(4, 64, 16).gather(2, nearest[..., None])[..., 0]
    assert restored.view(4, 64).equal(expected.to(torch.bfloat16).float())


def test_int8_differs_by_half_a_step_at_most() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    restored = dequantise(*quantise(weight, BaseFormat.INT8), BaseFormat.INT8, torch.float32)
    step = weight.abs().amax(1, keepdim=True) / 127
    rounding = (weight.abs() + step) * 2**-7  # To bf16, before and after.
    assert ((restored.view(4, 64) - weight).abs() <= 0.51 * step + rounding).all()


def config(folder: Path, base: BaseFormat, **learner: Any) -> RunConfig:
    """Save a policy with a tokenizer; return a config that trains adapters beside it."""
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        attention_bias=True,
    )
    network = Qwen3ForCausalLM(shape)
    network.save_pretrained(folder / "policy")
    AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny").save_pretrained(folder / "policy")
    return config_of(folder / "policy", folder / "cache", base, **learner)


def config_of(policy: Path, cache: Path, base: BaseFormat, **learner: Any) -> RunConfig:
    """Return a config that trains adapters beside a policy."""
    section = LearnerSection(
        **{
            "device": "cpu",
            "precision": Precision.FP32,
            "warmup_steps": 0,
            "lr": 1e-2,
            "lora": LoraSection(rank=4),
            "controller": ControllerSection(skip_step=False),
            **learner,
        }
    )
    model = ModelSection(path=str(policy), dtype="float32", base=base, cache_folder=str(cache))
    return plain_models(RunConfig(model=model, learner=section))


def steps(cfg: RunConfig, num: int = 2) -> tuple[Any, Any, list[dict[str, float]]]:
    model, _ = load_start(cfg, None, CPU)
    trainer, _ = make_trainer(cfg, model, None)
    metrics = [trainer.train_on(make_samples(seed=n), version=n).metrics for n in range(num)]
    return trainer, model, metrics


def trained(model: torch.nn.Module) -> list[Tensor]:
    return [each for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("base", FORMATS)
@pytest.mark.parametrize(
    ("precision", "activations"),
    [
        (Precision.FP32, Activations.KEEP),
        (Precision.FP32, Activations.OFFLOAD),
        (Precision.BF16, Activations.KEEP),
    ],
)
def test_training_equals_that_beside_the_dequantised_base(
    base: BaseFormat, precision: Precision, activations: Activations, tmp_path: Path
) -> None:
    cfg = config(tmp_path, base, precision=precision, activations=activations)
    assert cfg.model.path != str(tmp_path / "policy")
    plain = replace(cfg, model=replace(cfg.model, base=BaseFormat.FULL))
    _, expected, of_plain = steps(plain)
    _, model, metrics = steps(cfg)
    assert len(list(quantised_layers(model))) == 14
    assert not list(quantised_layers(expected))
    changed = [each for name, each in model.named_parameters() if "lora_B" in name]
    assert all(each.abs().max() > 1e-3 for each in changed)
    for a, b in zip(trained(model), trained(expected), strict=True):
        assert (a - b).abs().max() <= 1e-6
    assert metrics[0]["train/grad_norm"] == pytest.approx(of_plain[0]["train/grad_norm"], rel=1e-5)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("smollm2"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("base", FORMATS)
def test_pretrained_base_trains_as_the_dequantised_one(
    base: BaseFormat, smollm2: Path, tmp_path: Path
) -> None:
    cfg = config_of(smollm2, tmp_path / "cache", base, lr=1e-4)
    plain = replace(cfg, model=replace(cfg.model, base=BaseFormat.FULL))
    _, expected, of_plain = steps(plain)
    adapters = [each.detach().clone() for each in trained(expected)]
    _, model, metrics = steps(cfg)
    assert len(list(quantised_layers(model))) == 210  # Seven in each of 30 layers.
    for a, b in zip(trained(model), adapters, strict=True):
        assert (a - b).abs().max() <= 1e-6
    for of_base, of_weights in zip(metrics, of_plain, strict=True):
        assert of_base["train/grad_norm"] > 0
        assert of_base["train/grad_norm"] == pytest.approx(of_weights["train/grad_norm"], rel=1e-5)


def test_graph_keeps_no_dequantised_weight(tmp_path: Path) -> None:
    cfg = config(tmp_path, BaseFormat.NF4)
    model, _ = load_start(cfg, None, CPU)
    shapes = {tuple(layer.weight.shape) for _, layer in quantised_layers(model)}
    found: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        model(input_ids=torch.arange(11)[None])
    assert found
    assert not shapes & set(found)


@pytest.mark.parametrize("base", FORMATS)
def test_start_rounds_the_checkpoint_once(base: BaseFormat, tmp_path: Path) -> None:
    cfg = config(tmp_path, base)
    record = read_record(Path(cfg.model.path))
    assert record is not None
    assert record.method == f"model.base={base.value}"
    assert plain_models(cfg) == cfg  # A later start, and each role.
    source = load_file(tmp_path / "policy/model.safetensors")
    stored = load_file(Path(cfg.model.path) / "model.safetensors")
    assert stored.keys() == source.keys()
    for name, weight in source.items():
        is_rounded = "_proj.weight" in name
        assert stored[name].equal(weight) != is_rounded, name
    model, _ = load_start(cfg, None, CPU)
    for name, layer in quantised_layers(model):
        expected = stored[f"{name.replace('.base_layer', '')}.weight"]
        assert layer.weight.numbers(torch.float32).equal(expected)


@pytest.mark.parametrize("is_trained", [True, False])
def test_lost_cache_is_written_again(is_trained: bool, tmp_path: Path) -> None:
    cfg = config(tmp_path, BaseFormat.NF4)
    file = Path(cfg.model.path) / "model.safetensors"
    before = load_file(file)
    shutil.rmtree(file.parent)
    assert plain_models(cfg, is_trained=is_trained) == cfg
    after = load_file(file)
    assert all(after[name].equal(each) for name, each in before.items())


def test_other_numbers_than_those_of_the_format_are_refused(tmp_path: Path) -> None:
    cfg = config(tmp_path, BaseFormat.NF4)
    cfg = replace(cfg, model=replace(cfg.model, path=str(tmp_path / "policy")))
    with pytest.raises(ConfigError, match=r"model\.base=nf4: a weight .* other weights than"):
        load_start(cfg, None, CPU)


def test_version_and_checkpoint_have_the_adapters_only(tmp_path: Path) -> None:
    cfg = config(tmp_path, BaseFormat.NF4, moments=Moments.INT8)
    trainer, model, _ = steps(cfg)
    published = tensors_of(trainer.live_weights())
    assert published
    assert all("lora_" in name for name in published)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    checkpoints = Checkpoints(tmp_path / "checkpoints", cfg.learner)
    folder = checkpoints.save(2, model=model, tokenizer=tokenizer, trainer=trainer)
    checkpoints.wait()
    assert all("lora_" in name for name in load_file(folder / ADAPTER_TENSORS))
    again, _ = load_start(cfg, folder, CPU)
    restored, version = make_trainer(cfg, again, folder)
    assert version == 2
    sequence = [(np.arange(20) % VOCAB).tolist()]
    assert restored.score(sequence) == trainer.score(sequence)
    # The merged policy has the dequantised base and the adapters.
    plain = replace(cfg, model=replace(cfg.model, base=BaseFormat.FULL))
    beside, _ = load_start(plain, None, CPU)
    load_adapter(beside, folder)
    assert make_trainer(plain, beside, None)[0].score(sequence) == [
        pytest.approx(each, abs=1e-5) for each in trainer.score(sequence)
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], r"model\.base='nf4': needs learner\.lora\.rank > 0"),
        (["learner.lora.rank=4", "learner.num_ranks=2"], r"must be full with learner\.num_ranks"),
        (["learner.lora.rank=4", "model.dtype=float16"], r"model\.base='nf4': must be full"),
        (
            ["learner.lora.rank=4", "learner.lora.targets=[experts]"],
            r"learner\.lora\.targets='experts': must not name experts",
        ),
    ],
)
def test_base_that_cannot_be_quantised_is_refused(overrides: list[str], words: str) -> None:
    settings = ["learner.optimizer=adamw", *overrides]
    with pytest.raises(ConfigError, match=words):
        load_config("smoke", ["model.path=unset", "model.base=nf4", *settings])


@pytest.mark.parametrize(
    ("name", "gpu_gib"), [("qwen2.5-7b-instruct", 12), ("qwen2.5-32b-instruct", 48)]
)
def test_learner_of_a_large_model_fits_one_gpu(name: str, gpu_gib: int) -> None:
    settings = ["model.path=unset", "learner.device=cuda", "actor.num_actors=0"]
    settings += ["learner.optimizer=adamw"]
    settings += ["learner.lora.rank=16", "learner.moments=8bit", "model.base=nf4"]
    settings += ["learner.max_tokens_per_microbatch=8192", "actor.max_model_len=8192"]
    cfg = load_config("smoke", settings)
    shape = read_shape(ROOT / "configs/architectures" / name)
    gpu = Gpu(name="", memory_bytes=gpu_gib * GIB)
    place, *_ = make_plan(cfg, shape, on=(gpu,), host_bytes=256 * GIB)
    assert place.total_bytes <= gpu.memory_bytes
    weights = next(part for part in place.parts if part.label == "frozen weights")
    tables = 2 * shape.vocab * shape.hidden
    expected = (shape.num_params - tables) * (0.5 + 2 / 64) + 2 * tables
    assert weights.num_bytes == pytest.approx(expected, abs=1)
    full = replace(cfg, model=replace(cfg.model, base=BaseFormat.FULL))
    beside, *_ = make_plan(full, shape, on=(gpu,), host_bytes=256 * GIB)
    assert beside.total_bytes > gpu.memory_bytes
