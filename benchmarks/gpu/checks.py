"""Device checks of kernels and memory: flash attention, packed layers, growth over many steps."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.conformance.networks import VOCAB, perturb, stored, tiny_config
from benchmarks.learner.batch import BatchShape, make_batch
from benchmarks.learner.checks.bench import DeviceBench
from benchmarks.learner.prefix_trees import SHAPES, add_shape, samples_of
from benchmarks.learner.step import STILL, BareStep
from common.config.learner import Attention, Layout
from learner.batch.batching import by_sample, collate_tokens, each_microbatch, in_order
from learner.policy.determinism import make_deterministic, zero_dropout_rates
from learner.policy.kernels import mixers
from learner.policy.kernels.attention import use_attention
from learner.policy.model import Scoring, token_logprobs, vocabulary_size

PACKED_KERNEL = "torch_attn::_varlen_attn"
ONE_SEQUENCE_KERNEL = "aten::scaled_dot_product_attention"
MAX_GROWTH_BYTES = 100e6
LAYER_KINDS = {
    "sinks": "gpt_oss",
    "a cap": "gemma2",
    "latent keys": "deepseek_v3",
    "chunks": "llama4_text",
    "gated delta rule": "qwen3_5_text",
    "Mamba 2": "mamba2",
    "a short convolution": "lfm2",
}
LAYER_LENGTHS = (40, 300, 129, 260)
LAYER_SHARED = (0, 32, 96, 64)  # First tokens that each sequence shares with the one before.
MAX_BF16_GAP = 0.05  # Both layouts round, in other kernels.
MAX_BF16_TURN = 0.1
TREE_TOKENS = 16_384  # Budget of a microbatch of trees.
TREE_ROUNDS = 2
WARM_FRAC = 0.25  # Share of the steps before the growth is measured.


def check_flash_calls(bench: DeviceBench) -> None:
    """Count the calls of attention kernels in a packed step of full weights under autocast."""
    model = bench.model()
    samples = bench.samples(model)
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    cfg = replace(
        bench.sizes.learner, layout=Layout.PACKED, max_tokens_per_microbatch=num_tokens, lr=STILL
    )
    step = BareStep(cfg, model, samples, engine_dtype="bfloat16")
    counts = count_calls(step, (PACKED_KERNEL, ONE_SEQUENCE_KERNEL))
    per_layer = counts[PACKED_KERNEL] / model.config.num_hidden_layers
    name = "flash attention: calls of the packed kernel per layer and microbatch"
    alone = f"attention: sequences computed alone, of {len(samples)} in the microbatch"
    if not bench.is_cuda:
        bench.suite.figure(name, per_layer, "")
        bench.suite.figure(alone, counts[ONE_SEQUENCE_KERNEL], "")
        return
    bench.suite.at_least(name, per_layer, "", 1.0)
    bench.suite.at_most(alone, counts[ONE_SEQUENCE_KERNEL], "", 0)


def count_calls(run: Callable[[], object], names: tuple[str, ...]) -> dict[str, int]:
    """Return how often a run calls each of these operators."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    counted = {event.key: event.count for event in profiler.key_averages()}
    return {name: counted.get(name, 0) for name in names}


def check_packed_layers(bench: DeviceBench) -> None:
    """Compare packed with padded scores and gradients for each kind of layer.

    The networks are small, with random weights. The note names a layer that computes one sequence
    after another, because the packages of its kernels are not installed.
    """
    scoring = Scoring(chunk_tokens=256, dtype=bench.pass_dtype)
    draw = np.random.default_rng(0)
    sequences = [draw.integers(3, VOCAB, length) for length in LAYER_LENGTHS]
    for index, num in enumerate(LAYER_SHARED):
        sequences[index][:num] = sequences[index - 1][:num]
    masks = [np.arange(len(each)) >= min(LAYER_SHARED[1:]) for each in sequences]
    blocks = {
        Layout.PADDED: collate_tokens(sequences, masks, device=bench.device),
        Layout.PACKED: collate_tokens(
            sequences, masks, device=bench.device, is_packed=True, shared=LAYER_SHARED
        ),
    }
    for kind, family in LAYER_KINDS.items():
        model = _layer_network(family, bench.device)
        use_attention([model], bench.device.type, Layout.PACKED, Attention.AUTO)
        looping = mixers.looping_layer(model, is_whole=False)
        scores: list[Tensor] = []
        gradients: list[Tensor] = []
        for layout, block in blocks.items():
            use_attention([model], bench.device.type, layout, Attention.AUTO)
            model.zero_grad()
            logprobs = token_logprobs(model, block, scoring)
            logprobs.mean().backward()
            scores.append(logprobs.detach().float())
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(parts).float())
        gap = float((scores[1] - scores[0]).abs().mean())
        turned = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
        most, most_turned = (MAX_BF16_GAP, MAX_BF16_TURN) if bench.is_cuda else (1e-5, 1e-4)
        note = f"{looping} computes one sequence after another" if looping else ""
        bench.suite.at_most(f"packed rows, {kind}: mean difference", gap, "nats", most, note)
        bench.suite.at_most(f"packed rows, {kind}: gradient", turned, "", most_turned)


def check_prefix_trees(bench: DeviceBench) -> None:
    """Compare scores, gradient and time of branching rows as trees and apart.

    On a GPU the largest shape has 14,880 tokens in its tree, and 84,800 in its rows.
    """
    model = bench.model()
    cfg = replace(bench.sizes.learner, layout=Layout.PACKED, lr=STILL)
    scoring = Scoring(chunk_tokens=cfg.logprob_chunk_tokens, dtype=bench.pass_dtype)
    scale = bench.sizes.tree_scale
    use_attention([model], bench.device.type, Layout.PACKED, Attention.AUTO)
    for name, shape in SHAPES.items():
        rng = np.random.default_rng(0)
        samples = samples_of(shape(rng, vocabulary_size(model), scale=scale))
        longest = max(len(sample.trajectory.token_ids) for sample in samples)
        scores: list[Tensor] = []
        gradients: list[Tensor] = []
        for is_shared in (False, True):
            model.zero_grad()
            parts: dict[int, Tensor] = {}
            for micro in each_microbatch(
                samples,
                range(len(samples)),
                max_tokens=max(longest, TREE_TOKENS),
                device=bench.device,
                is_packed=True,
                shares_prefix=is_shared,
            ):
                logprobs = token_logprobs(model, micro.tokens, scoring)
                logprobs.sum().backward()
                parts |= by_sample(micro, logprobs)
            scores.append(in_order(parts, sorted(parts)).float())
            of_weights = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            gradients.append(torch.cat(of_weights).float())
        gap = float((scores[1] - scores[0]).abs().mean())
        turned = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
        most, most_turned = (MAX_BF16_GAP, MAX_BF16_TURN) if bench.is_cuda else (1e-5, 1e-4)
        bench.suite.at_most(f"prefix trees, {name}: mean difference", gap, "nats", most)
        bench.suite.at_most(f"prefix trees, {name}: gradient", turned, "", most_turned)
        del gradients
        model.zero_grad()
        measured = replace(cfg, max_tokens_per_microbatch=max(longest, TREE_TOKENS))
        add_shape(
            bench.suite,
            f"prefix trees, {name}",
            measured,
            model,
            samples,
            num_rounds=TREE_ROUNDS,
            engine_dtype="bfloat16" if bench.is_cuda else "float32",
        )


def _layer_network(family: str, device: torch.device) -> PreTrainedModel:
    """Return a small network with random weights that draws no numbers in its passes."""
    config = tiny_config(family)
    zero_dropout_rates(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    perturb(stored(model), seed=0)
    make_deterministic(model)
    nn.Module.to(model, device)
    return model


def check_growth(bench: DeviceBench) -> None:
    """Measure the growth of this process over many training steps with random lengths."""
    model = bench.model()
    trainer = bench.trainer(model, replace(bench.sizes.learner, lr=STILL, warmup_steps=0))
    rng = np.random.default_rng(0)
    process = psutil.Process()
    num_steps = bench.sizes.growth_steps
    num_warm = int(WARM_FRAC * num_steps)
    warm_bytes = 0
    lengths: set[int] = set()
    for number in range(num_steps):
        shape = random_shape(bench.sizes.shape, rng)
        samples = make_batch(shape, vocab_size=vocabulary_size(model), seed=number)
        lengths |= {len(sample.trajectory.token_ids) for sample in samples}
        trainer.train_on(samples, version=number, must_train=True)
        if number == num_warm:
            warm_bytes = process.memory_info().rss
    grown = process.memory_info().rss - warm_bytes
    name = f"growth of the process in steps {num_warm} to {num_steps}"
    note = f"{len(lengths)} lengths of sequences"
    bench.suite.at_most(name, grown / 1e6, "MB", MAX_GROWTH_BYTES / 1e6, note)


def random_shape(shape: BatchShape, rng: np.random.Generator) -> BatchShape:
    """Return a small batch whose turns have random lengths up to those of `shape`."""
    return replace(
        shape,
        num_groups=1,
        observation_tokens=int(rng.integers(1, shape.observation_tokens + 1)),
        action_tokens=int(rng.integers(1, shape.action_tokens + 1)),
    )
