"""Laws of attention whose heads are divided over two ranks, by families of networks."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, MistralConfig

from benchmarks.conformance.networks import perturb, stored, tiny_config
from common.config.learner import LearnerSection, Precision
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.determinism import zero_dropout_rates
from learner.policy.forward import Networks, Passes
from tests.learner.experts import make_experts

pytestmark = [pytest.mark.slow, pytest.mark.long]

VOCAB = 320
LENGTHS = (30, 12, 21)
SHARED = (0, 10, 5)  # First tokens that each sequence shares with the one before.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "initializer_range": 0.2,
}
DENSE = ("mistral", "gemma3_text", "gpt2")
# Layers that read the whole row, attention with sinks or a cap, and keys of another size.
WHOLE = ("qwen3_5_text", "mamba2", "lfm2", "gpt_oss", "gemma2", "minicpm3", "bloom", "deepseek_v32")
# In bf16 a router near a tie chooses another expert after another rounding.
CASES = [
    *((family, Precision.FP32) for family in (*DENSE, *WHOLE, "deepseek_v3", "qwen3_moe")),
    *((family, Precision.BF16) for family in DENSE),
]
LIMITS = {Precision.FP32: 1e-5, Precision.BF16: 3e-2}


def network_of(family: str) -> Any:
    torch.manual_seed(0)
    if family == "mistral":
        config: Any = MistralConfig(**SIZES, sliding_window=8)
    elif family == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        config = Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=kinds)
    elif family == "gpt2":
        config = GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=None,
            eos_token_id=2,
        )
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    elif family in WHOLE:
        network = AutoModelForCausalLM.from_config(tiny_config(family))
        zero_dropout_rates(network.config)
        perturb(stored(network), seed=5)
        return network
    else:
        return make_experts(family).float()
    return AutoModelForCausalLM.from_config(config)


def row_of_three() -> TokenBatch:
    """Return a packed row in which both later sequences share tokens with the one before."""
    draw = np.random.default_rng(0)
    sequences = [draw.integers(0, VOCAB, length) for length in LENGTHS]
    for index, num in enumerate(SHARED):
        sequences[index][:num] = sequences[index - 1][:num]
    masks = [np.arange(len(each)) >= 7 for each in sequences]
    return collate_tokens(sequences, masks, device="cpu", is_packed=True, shared=SHARED)


def computed(
    family: str, precision: Precision, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of a row, and the gradient of their weighted sum over all ranks."""
    network = network_of(family)
    ranks = 1 if group is None else group.size()
    cfg = LearnerSection(precision=precision, num_ranks=ranks, sequence_ranks=ranks)
    networks = Networks(policy=network)
    passes = Passes(cfg, networks, temperature=1.0, engine_dtype="float32", sequence_group=group)
    passes.check_start(may_pad=False)
    logprobs = passes.score(row_of_three()).logprobs
    (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters()]
    gradient = torch.cat([part.flatten() for part in parts])
    if group is not None:
        dist.all_reduce(gradient, group=group)
    return logprobs.detach(), gradient


def _be_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = cast(Any, dist).FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group, _ = dist.new_subgroups(2)
    assert isinstance(group, dist.ProcessGroup)
    for family, precision in CASES:
        result = computed(family, precision, group)
        torch.save(result, f"{folder}/{family}.{precision.value}.{rank}.pt")
    dist.destroy_process_group()


def test_families_have_the_scores_and_gradient_of_one_rank(tmp_path: Path) -> None:
    cast(Any, mp).spawn(_be_rank, args=(tmp_path,), nprocs=2)
    for family, precision in CASES:
        limit = LIMITS[precision]
        scores, gradient = computed(family, precision)
        assert gradient.norm() > 1e-3
        for rank in range(2):
            state = torch.load(tmp_path / f"{family}.{precision.value}.{rank}.pt")
            gap = (state[0] - scores).abs().mean() / scores.abs().mean()
            assert gap < limit, (family, precision)
            assert (state[1] - gradient).norm() < limit * gradient.norm(), (family, precision)
