"""Laws of stored, recomputed and offloaded activations: the same gradient, the planned memory."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen3ForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from common.config.learner import Activations, CriticKind, CriticSection, LearnerSection, Precision
from common.config.load import load_config
from common.errors import ConfigError
from common.host.machine import GIB
from common.repository import CODE
from learner.batch.batching import collate_tokens
from learner.policy.activation_plan import (
    StoredLayers,
    activation_bytes,
    choose_layers,
    layer_bytes,
    row_of,
)
from learner.policy.activations import HostCopies, _Copy, use_activations
from learner.policy.forward import Networks, Passes
from learner.policy.model import make_critic
from learner.policy.model_shape import ModelShape
from tests.learner.builders import VOCAB, make_model

# Two layers of 8 heads of 128, with 4 key-value heads.
SHAPE = ModelShape(
    num_params=0,
    hidden=1024,
    layers=2,
    heads=8,
    kv_heads=4,
    head_dim=128,
    intermediate=4096,
    vocab=1000,
    context_tokens=0,
    dtype="bfloat16",
)


def gradient(stored: StoredLayers | None, *, chunk: int = 0, precision: Precision) -> list[Tensor]:
    """Return the gradient of a packed row of three layers, by parameter."""
    model = make_model(num_layers=3)
    cfg = LearnerSection(device="cpu", precision=precision, activations=Activations.KEEP)
    passes = Passes(cfg, Networks(policy=model), temperature=1.0, engine_dtype="bfloat16")
    if stored is not None:
        use_activations(model, Activations.RECOMPUTE, stored, chunk)
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, VOCAB, length) for length in (30, 21)]
    masks = [np.arange(len(row)) > 3 for row in rows]
    tokens = collate_tokens(rows, masks, device="cpu", is_packed=True)
    logprobs = passes.score(tokens).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    return [each.grad for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("num_stored", [0, 1])
@pytest.mark.parametrize("is_offloaded", [False, True])
def test_recomputed_layers_give_the_same_bits(
    num_stored: int, is_offloaded: bool, precision: Precision
) -> None:
    expected = gradient(None, precision=precision)
    made = gradient(StoredLayers(num_stored, is_offloaded), precision=precision)
    assert all(a.equal(b) for a, b in zip(expected, made, strict=True))


def test_chunks_of_a_row_give_the_same_gradient() -> None:
    expected = gradient(None, precision=Precision.FP32)
    made = gradient(StoredLayers(0, False), chunk=8, precision=Precision.FP32)
    for a, b in zip(expected, made, strict=True):
        assert (a - b).abs().max() < 1e-6 * max(1.0, float(a.abs().max()))


def count_calls(model: Qwen3ForCausalLM) -> list[int]:
    """Return a list that receives the rows of each call of a feed-forward part's last product."""
    calls: list[int] = []
    for layer in model.model.layers:
        cast(Any, layer.mlp).down_proj.register_forward_pre_hook(
            lambda _, args: calls.append(args[0].shape[-2])
        )
    return calls


def test_chunk_is_computed_once_in_each_pass() -> None:
    model = make_model()
    use_activations(model, Activations.RECOMPUTE, StoredLayers(0, False), 16)
    calls = count_calls(model)
    states = model.model(input_ids=torch.arange(40)[None]).last_hidden_state
    assert calls == [16, 16, 8] * 2
    calls.clear()
    states.sum().backward()
    assert calls == [16, 16, 8] * 2  # The layer itself ends before its feed-forward part.


def recomputing(network: nn.Module) -> list[str]:
    """Return the classes of the layers that compute their activations again."""
    layers = (each for each in network.modules() if getattr(each, "gradient_checkpointing", False))
    return [type(each).__name__ for each in layers if isinstance(each, GradientCheckpointingLayer)]


def test_frozen_layers_in_chunks_have_no_gradient() -> None:
    gradients: list[Tensor] = []
    for chunk in (0, 8):
        model = make_model(num_layers=3)
        model.requires_grad_(False)
        trained = cast(Any, model.model.layers[2].self_attn).q_proj.weight.requires_grad_()
        use_activations(model, Activations.RECOMPUTE, StoredLayers(0, False), chunk)
        model.model(input_ids=torch.arange(30)[None]).last_hidden_state.square().sum().backward()
        assert trained.grad is not None
        gradients.append(trained.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


def test_network_without_layers_to_recompute_is_refused() -> None:
    config = AutoConfig.for_model("openai-gpt", n_embd=16, n_layer=2, n_head=2, vocab_size=VOCAB)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"activations=offload: OpenAIGPT.* Use keep"):
        use_activations(model, Activations.OFFLOAD, StoredLayers(0, True), 0)


@pytest.mark.parametrize("activations", [Activations.KEEP, Activations.RECOMPUTE])
def test_deeper_critic_stores_as_the_policy(activations: Activations, tmp_path: Path) -> None:
    make_model(num_layers=4).save_pretrained(tmp_path)
    policy = make_model(num_layers=2)
    section = CriticSection(kind=CriticKind.MODEL, path=str(tmp_path))
    critic = make_critic(section, policy, policy_path=str(tmp_path))
    cfg = LearnerSection(device="cpu", precision=Precision.FP32, activations=activations)
    networks = Networks(policy=policy, critic=critic)
    Passes(cfg, networks, temperature=1.0, engine_dtype="bfloat16")
    assert critic.trunk is not None
    is_again = activations is Activations.RECOMPUTE
    assert len(recomputing(policy)) == 2 * is_again
    assert len(recomputing(critic.trunk)) == 4 * is_again


def test_layer_within_a_layer_is_no_layer_of_its_own() -> None:
    config = Zamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        layers_block_type=["mamba", "hybrid", "mamba"],
        intermediate_size=64,
        num_attention_heads=4,
        mamba_d_state=8,
        n_mamba_heads=4,
        num_mem_blocks=1,
        use_mem_rope=True,
    )
    with torch.device("meta"):
        model = Zamba2ForCausalLM(config)
    use_activations(model, Activations.RECOMPUTE, StoredLayers(2, False), 0)
    assert recomputing(model) == ["Zamba2MambaDecoderLayer"]
    use_activations(model, Activations.RECOMPUTE, StoredLayers(1, False), 0)
    assert recomputing(model) == ["Zamba2MambaDecoderLayer", "Zamba2HybridLayer"]


def test_kept_tensors_of_a_recomputed_layer_are_its_input() -> None:
    model = make_model()
    use_activations(model, Activations.RECOMPUTE, StoredLayers(0, False), 0)
    sizes: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.shape)
        return tensor

    layers: Any = model.model.layers
    inputs = [torch.randn(1, 40, 32, requires_grad=True)]
    angles = model.model.rotary_emb(inputs[0], torch.arange(40)[None])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        layers[0](inputs[0], position_embeddings=angles, attention_mask=None)
    assert sizes == [torch.Size([1, 40, 32])]


def test_copies_return_in_reverse_order_one_ahead() -> None:
    copies = HostCopies()
    tensors = [torch.randn(4) for _ in range(3)]
    stored = [copies.store(each) for each in tensors]
    assert all(isinstance(each, _Copy) for each in stored)
    first, second, third = (each for each in stored if isinstance(each, _Copy))
    assert copies.fetch(third).equal(tensors[2])
    assert second.fetched is not None  # Its transfer has begun.
    assert first.fetched is None
    assert copies.fetch(second).equal(tensors[1])
    assert first.fetched is not None
    assert copies.fetch(first).equal(tensors[0])
    numbers = torch.arange(3)
    assert copies.store(numbers) is numbers


def test_layer_stores_the_tensors_of_its_operations() -> None:
    cfg = LearnerSection(max_tokens_per_microbatch=8192)
    without, whole = layer_bytes(SHAPE, row_of(cfg, 0, is_cuda=False, is_16_bit=False))
    # Two norms: inputs and normalised rows. Their result is the input of the products.
    rows = (4 + 1) * 1024
    attention = 3 * 8 * 128 + 2 * 4 * 128  # Queries, result, its copy; keys, values.
    assert without == 4 * (rows + attention + 8)  # And a sum of each head.
    assert whole - without == 4 * (1024 + 4 * 4096)  # Gate, its activation, up, product.
    half, _ = layer_bytes(SHAPE, row_of(cfg, 0, is_cuda=False, is_16_bit=True))
    # Norms stay in fp32; queries, keys and values have a copy of their input each.
    assert half == 4 * 4 * 1024 + 2 * (3 * 1024 + attention) + 4 * 8


def test_last_layers_store_theirs_within_the_budget() -> None:
    cfg = LearnerSection(activations=Activations.RECOMPUTE, max_tokens_per_microbatch=8192)
    row = row_of(cfg, 0, is_cuda=False, is_16_bit=False)
    shape = replace(SHAPE, layers=10)
    needs = [
        activation_bytes(shape, row, StoredLayers(n, False), mlp_chunk_tokens=2048).num_bytes
        for n in range(11)
    ]
    assert needs == sorted(needs)
    between = (needs[3] + needs[4]) / 2 / GIB
    budgeted = replace(cfg, activation_gib=between)
    assert choose_layers(budgeted, shape, row, num_layers=10) == StoredLayers(3, False)
    auto = replace(budgeted, activations=Activations.AUTO)
    assert choose_layers(auto, shape, row, num_layers=10) == StoredLayers(3, False)
    small = replace(auto, activation_gib=0.99 * needs[0] / GIB)
    assert choose_layers(small, shape, row, num_layers=10) == StoredLayers(0, True)
    with pytest.raises(ConfigError, match=r"learner\.activation_gib=.* needs at least .* GiB"):
        choose_layers(replace(small, activations=Activations.RECOMPUTE), shape, row, num_layers=10)


def test_offloaded_inputs_move_from_the_device_to_the_host() -> None:
    cfg = LearnerSection(max_tokens_per_microbatch=32_768)
    row = row_of(cfg, 0, is_cuda=True, is_16_bit=True)
    shape = replace(SHAPE, layers=40)
    here, away = (
        activation_bytes(shape, row, StoredLayers(0, is_away), mlp_chunk_tokens=4096)
        for is_away in (False, True)
    )
    per_layer = 32_768 * 1024 * 4
    assert here.num_bytes - away.num_bytes == 38 * per_layer  # Two are on the device.
    assert away.host_bytes == 40 * per_layer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "activations", "gib", "precision", "rank", "vocab_size"),
    [
        (8_192, "recompute", 0, "fp32", 0, 512),
        (2_048, "recompute", 0, "fp32", 8, 32_768),  # The logits take most of it.
        pytest.param(32_768, "keep", 0, "fp32", 0, 512, marks=pytest.mark.long),
        pytest.param(32_768, "recompute", 0, "fp32", 0, 512, marks=pytest.mark.long),
        pytest.param(32_768, "recompute", 1.5, "fp32", 8, 512, marks=pytest.mark.long),
        pytest.param(32_768, "offload", 0, "bf16", 8, 512, marks=pytest.mark.long),
        pytest.param(32_768, "keep", 0, "bf16", 0, 512, marks=pytest.mark.long),
    ],
)
def test_long_row_takes_the_planned_memory(
    num_tokens: int,
    activations: str,
    gib: float,
    precision: str,
    rank: int,
    vocab_size: int,
    tmp_path: Path,
) -> None:
    module = "tests.learner.policy.peak_of_row"
    settings = [num_tokens, activations, gib, precision, rank, vocab_size]
    arguments = [str(tmp_path / "policy"), *map(str, settings)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *arguments],
        cwd=CODE,
        # The allocator returns each block of a mebibyte to the system at once.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert sizes["measured"] > 50 << 20
    assert sizes["measured"] == pytest.approx(sizes["planned"], rel=0.1)


@pytest.mark.parametrize(("old", "new"), [("true", "recompute"), ("false", "keep")])
def test_old_key_is_read_with_a_warning(
    old: str, new: str, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = load_config("smoke", ["model.path=unset", f"learner.gradient_checkpointing={old}"])
    assert cfg.learner.activations == new
    assert f"learner.activations={new}" in caplog.text


def test_old_key_refuses_other_values() -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing=half: expects true or false"):
        load_config("smoke", ["model.path=unset", "learner.gradient_checkpointing=half"])


def test_budget_of_stored_activations_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_gib=2.* must be 0 with .*keep"):
        load_config(
            "smoke", ["model.path=unset", "learner.activations=keep", "learner.activation_gib=2"]
        )
