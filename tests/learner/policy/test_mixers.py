"""Laws of packed sequences in layers that have a state, or attention of their own."""

import copy
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.conformance.networks import VOCAB, perturb, stored, tiny_config
from common.config.learner import Attention, Layout
from common.errors import ConfigError
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.determinism import make_deterministic, zero_dropout_rates
from learner.policy.kernels.attention import layout_by_rule, packing_problem, use_attention
from learner.policy.kernels.head import trunk_of
from learner.policy.kernels.mixers import token_mixers
from learner.policy.model import Scoring, flat_hidden, token_logprobs
from learner.policy.selfcheck import check_scores, make_probe, plain_logprobs
from tests.learner.builders import make_mixing_model, recompute
from tests.marks import long_for

EXACT = Scoring(chunk_tokens=64, dtype=torch.float32)
LENGTHS = (20, 72, 41, 53)
PREFIX = 24
SHARED = (0, 0, 20, PREFIX)  # The last is a branch of a branch.
# Positions of these networks begin a new chunk, window or scale within the sequences.
SETTINGS: dict[str, dict[str, Any]] = {
    "llama4_text": {"floor_scale": 8, "attn_scale": 0.5},
    "gpt_oss": {"sliding_window": 16},
    "falcon_alibi": {"alibi": True},
}
USUAL = {"qwen3_5_text", "mamba2", "lfm2", "deepseek_v32", "bloom", "llama4_text", "gpt_oss"}
USUAL |= {"deepseek_v3", "gemma2", "nemotron", "falcon_h1"}
OTHERS = ["mamba", "kimi_linear", "inkling_text", "gptj", "jamba", "zamba2", "deepseek_v4", "hy_v4"]
FAMILIES = long_for(sorted([*USUAL, *OTHERS]), set(OTHERS))


def network_of(family: str) -> Any:
    config = tiny_config(family, SETTINGS.get(family))
    zero_dropout_rates(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    perturb(stored(model), seed=5)
    make_deterministic(model)
    return model


def check_packed(model: Any) -> None:
    """Compare the scores of a network whose attention is packed with those of its own pass."""
    probe = make_probe(model, model.device, vocab_size=VOCAB, is_packed=True, dtype=torch.float32)
    score = partial(token_logprobs, model, scoring=EXACT)
    check_scores(probe, score, partial(plain_logprobs, model, dtype=torch.float32))


def sequences_of(lengths: tuple[int, ...] = LENGTHS) -> list[np.ndarray]:
    draw = np.random.default_rng(3)
    made = [draw.integers(3, VOCAB, length) for length in lengths]
    for index, num in enumerate(SHARED):
        made[index][:num] = made[index - 1][:num]
    return made


def block_of(sequences: list[np.ndarray], **layout: Any) -> TokenBatch:
    masks = [np.arange(len(each)) >= PREFIX // 2 for each in sequences]
    return collate_tokens(sequences, masks, device="cpu", **layout)


def gradient_of(model: nn.Module) -> Tensor:
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.slow
@pytest.mark.parametrize("attention", [Attention.PRODUCTS, Attention.FUSED])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_have_the_scores_and_gradient_of_padded_ones(
    family: str, attention: Attention
) -> None:
    model = network_of(family)
    assert packing_problem(model) == ""
    sequences = sequences_of()
    for shared in ((), SHARED):
        block = block_of(sequences, is_packed=True, shared=shared)
        use_attention([model], "cpu", Layout.PADDED, Attention.PRODUCTS)
        padded = block_of(sequences)
        weights = torch.linspace(-1, 1, len(padded.target_ids))
        expected = token_logprobs(model, padded, EXACT)
        (expected * weights).sum().backward()
        gradient = gradient_of(model)
        use_attention([model], "cpu", Layout.PACKED, attention)
        logprobs = token_logprobs(model, block, EXACT)
        (logprobs * weights).sum().backward()
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=2e-6)
        assert (gradient_of(model) - gradient).norm() < 1e-5 * gradient.norm()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_state_of_one_sequence_never_reaches_the_next(family: str) -> None:
    model = network_of(family)
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    first, second, *rest = sequences_of((30, 30, 41, 53))
    draw = np.random.default_rng(8)
    for name in ("scores", "gradient"):
        results = []
        for neighbour in (first, draw.integers(3, VOCAB, len(first))):
            block = block_of([neighbour, second, *rest], is_packed=True)
            states = flat_hidden(trunk_of(model), block, dtype=torch.float32)
            own = states[len(first) : len(first) + len(second)]
            if name == "gradient":
                own.sum().backward()
                results.append(gradient_of(trunk_of(model)))
            else:
                results.append(own.detach())
        # Tokens of other sequences change the number of tokens of an expert, and so its rounding.
        torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)


def test_recurrent_layers_of_dense_networks_are_bit_equal_beside_other_sequences() -> None:
    model = network_of("mamba2")
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    first, second, *_ = sequences_of((30, 30, 41, 53))
    found = [
        flat_hidden(
            trunk_of(model), block_of([neighbour, second], is_packed=True), dtype=torch.float32
        )[len(first) :]
        for neighbour in (first, first[::-1].copy())
    ]
    assert found[0].equal(found[1])


@pytest.mark.slow
def test_recomputed_layers_separate_sequences() -> None:
    model = network_of("qwen3_5_text")
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    block = block_of(sequences_of(), is_packed=True, shared=SHARED)
    gradients = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            recompute(model)
        token_logprobs(model, block, EXACT).sum().backward()
        gradients.append(gradient_of(model))
    assert gradients[0].norm() > 1e-3
    torch.testing.assert_close(gradients[1], gradients[0])


def test_padded_and_plain_passes_after_a_packed_one_are_whole() -> None:
    model = network_of("lfm2")
    sequences = sequences_of()
    ids = torch.from_numpy(sequences[1])[None]
    model.config._attn_implementation = "eager"
    before = model(input_ids=ids, use_cache=False).logits
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    token_logprobs(model, block_of(sequences, is_packed=True), EXACT)
    copied = copy.deepcopy(model)
    use_attention([model, copied], "cpu", Layout.PADDED, Attention.PRODUCTS)
    for each in (model, copied):
        found = each(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, before, atol=1e-6, rtol=1e-6)


def test_copies_of_a_packed_network_compute_with_their_own_weights() -> None:
    model = network_of("lfm2")
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    copied = copy.deepcopy(model)
    perturb(stored(copied), seed=9)
    block = block_of(sequences_of(), is_packed=True)
    assert not token_logprobs(copied, block, EXACT).equal(token_logprobs(model, block, EXACT))
    check_packed(copied)


def test_layers_that_mix_tokens_are_found_by_their_cache() -> None:
    def kinds(family: str) -> set[str]:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(family))
        return {type(each).__name__ for each in token_mixers(model)}

    assert kinds("llama") == {"LlamaAttention"}
    assert kinds("qwen3_5_text") == {"Qwen3_5GatedDeltaNet", "Qwen3_5Attention"}
    assert kinds("falcon_h1") == {"FalconH1Mixer", "FalconH1Attention"}
    assert kinds("zamba2") == {"Zamba2MambaMixer", "Zamba2Attention"}
    assert kinds("deepseek_v32") == {"DeepseekV32Attention"}  # Its indexer is a part of it.
    assert kinds("inkling_text") == {"InklingAttention", "InklingShortConvolution"}


def test_networks_that_mix_tokens_elsewhere_stay_padded() -> None:
    model = make_mixing_model()
    assert "attend to each other" in packing_problem(model)
    assert not use_attention([model], "cpu", Layout.AUTO, Attention.AUTO)
    with pytest.raises(ConfigError, match="attend to each other"):
        use_attention([model], "cpu", Layout.PACKED, Attention.AUTO)


def test_gpu_packs_by_rule_only_what_its_kernels_separate() -> None:
    def layout_of(family: str) -> Layout:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(tiny_config(family))
        return layout_by_rule([model], "cuda")

    packed = {"llama", "gpt_oss", "gemma2", "deepseek_v3", "llama4_text"}
    assert {layout_of(each) for each in packed} == {Layout.PACKED}
    assert {layout_of(each) for each in ("mamba", "bloom", "deepseek_v32")} == {Layout.PADDED}
    # The packages of its kernels are not installed here.
    assert layout_of("qwen3_5_text") is Layout.PADDED


# Packages with the names and arguments of `causal_conv1d` and `flash-linear-attention`. Each
# computes what the bounds that it gets separate, and counts its calls.
CONV = """
import torch.nn.functional as F
CALLS = []
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    assert x.stride(1) == 1, "the kernel needs the layout with the channel last"
    CALLS.append(0 if seq_idx is None else int(seq_idx.max()) + 1)
    parts = [x] if seq_idx is None else x.split(seq_idx[0].bincount().tolist(), 2)
    outs = []
    for part in parts:
        padded = F.pad(part, (weight.shape[1] - 1, 0))
        outs.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)))
    out = __import__("torch").cat(outs, 2)
    return F.silu(out) if activation else out
def causal_conv1d_update(*args, **kwargs):
    raise NotImplementedError
"""
FLA = """
import torch
CALLS = []
def chunk_gated_delta_rule(
    q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, cu_seqlens=None,
):
    CALLS.append(0 if cu_seqlens is None else len(cu_seqlens) - 1)
    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    outs = []
    for first, end in zip(ends, ends[1:]):
        state = torch.zeros(q.shape[2], q.shape[3], v.shape[3])
        for t in range(first, end):
            state = state * g[0, t].exp()[:, None, None]
            error = v[0, t] - (state * k[0, t][..., None]).sum(1)
            state = state + k[0, t][..., None] * (beta[0, t][:, None] * error)[:, None]
            outs.append((state * (q[0, t] * q.shape[3] ** -0.5)[..., None]).sum(1))
    return torch.stack(outs)[None].to(v.dtype), None
def fused_recurrent_gated_delta_rule(*args, **kwargs):
    raise NotImplementedError
"""
BOUNDED = """
import causal_conv1d, fla, fla.ops.gated_delta_rule as rule, torch
from tests.learner.policy.test_mixers import *
model = network_of("qwen3_5_text")
sequences = sequences_of()
use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
num_layers = sum(kind == "linear_attention" for kind in model.config.layer_types)
for shared in ((), SHARED):
    block = block_of(sequences, is_packed=True, shared=shared)
    rule.CALLS.clear(), causal_conv1d.CALLS.clear()
    found = token_logprobs(model, block, EXACT)
    num = len(block.packing.lengths)
    assert rule.CALLS == causal_conv1d.CALLS == [num] * num_layers, rule.CALLS
    alone = torch.cat([token_logprobs(model, block_of([each]), EXACT) for each in sequences])
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=2e-6)
    found.sum().backward()
check_packed(model)
print("bounded")
"""


@pytest.mark.slow
def test_kernels_with_bounds_compute_all_sequences_in_one_call(tmp_path: Path) -> None:
    (tmp_path / "causal_conv1d.py").write_text(CONV, encoding="utf-8")
    folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
    folder.mkdir(parents=True)
    for each in (tmp_path / "fla", tmp_path / "fla" / "ops"):
        (each / "__init__.py").write_text("", encoding="utf-8")
    (folder / "__init__.py").write_text(FLA, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    done = subprocess.run(
        [sys.executable, "-c", BOUNDED],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert "bounded" in done.stdout, done.stderr[-2000:]
