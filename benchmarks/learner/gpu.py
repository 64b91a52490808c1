"""The self-check of a CUDA machine: transfers, a step, memory, agreement, engine.

Every check is a function of a device and of sizes. With small sizes the same code runs on a CPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.learner.agree import canary_delta, chunk_costs, repeat_step
from benchmarks.learner.batch import (
    LANGUAGE_MODEL,
    MODELS,
    PACKED,
    BatchShape,
    ModelShape,
    make_batch,
    make_random_model,
)
from benchmarks.learner.checks.training import (
    PackedCase,
    check_adapters,
    check_packed,
    check_shards,
)
from benchmarks.learner.checks.weights import check_adapter_transfer, check_engine, check_transfers
from benchmarks.learner.memory import measure_scoring
from benchmarks.learner.step import BARE, make_trainer, measure_step, measure_ways
from benchmarks.learner.suite import add_peaks, add_step_cost, add_ways
from benchmarks.table import BenchTable
from common.config.learning import AlgorithmSection, LearnerSection
from common.errors import ConfigError
from learner.batch.batching import collate_tokens
from learner.policy.model import parameter_count, vocabulary_size

MAX_SUITE_S = 480.0
ENGINE_LORA_RANK = 8
MIN_STEP_TOKENS_PER_S = 1_000.0
MAX_CANARY_DELTA = LearnerSection().max_canary_delta
MAX_CHUNK_DIFFERENCE = 0.005  # In nats; bf16 logits are rounded differently with other tilings.
MAX_REPETITION = 0.01  # On CUDA the order of additions in attention's backward pass varies.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWorkload:
    model: ModelShape
    full: ModelShape  # Model size for the bounds of an update.
    shape: BatchShape
    learner: LearnerSection
    num_rounds: int
    memory_sequences: int
    memory_seq_tokens: int
    chunk_sizes: tuple[int, ...]
    num_canaries: int
    canary_tokens: int
    packed: tuple[PackedCase, ...]
    matrix_size: int


HALF_BILLION = GpuWorkload(
    model=MODELS["half_billion"],
    full=MODELS["seven_billion"],
    shape=LANGUAGE_MODEL,
    learner=LearnerSection(device="cuda", lr=1e-5, warmup_steps=0, max_tokens_per_microbatch=4_096),
    num_rounds=5,
    memory_sequences=4,
    memory_seq_tokens=1_024,
    chunk_sizes=(256, 512, 1_024, 2_048),
    num_canaries=4,
    canary_tokens=256,
    packed=(
        PackedCase(name="Qwen3-0.6B", model=MODELS["qwen3_0_6b"], shape=PACKED, has_promise=False),
        PackedCase(name="Qwen3-4B", model=MODELS["qwen3_4b"], shape=PACKED),
        PackedCase(name="7B, LoRA", model=MODELS["seven_billion"], shape=PACKED, lora_rank=32),
    ),
    matrix_size=8_192,
)


def run_suite(table: BenchTable) -> None:
    """Check this CUDA machine in some minutes. The engine's part requires vLLM.

    Raises: ConfigError: no CUDA device is available.
    """
    if not torch.cuda.is_available():
        raise ConfigError("no CUDA device here: nothing of this suite was measured")
    num_gpus = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    table.title(
        f"{num_gpus} x {properties.name}, {properties.total_memory / 1e9:.0f} GB, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    )
    device = torch.device("cuda", 0)
    peer_device = "cuda:1" if num_gpus > 1 else "cpu"
    started = time.monotonic()
    for name, check in checks(table, HALF_BILLION, device, peer_device):
        table.attempt(name, check)
        torch.cuda.empty_cache()
    table.at_most("the whole suite", time.monotonic() - started, "s", MAX_SUITE_S)


def checks(
    table: BenchTable, sizes: GpuWorkload, device: torch.device, peer_device: str
) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, check) of all checks in order. Each check makes its own model.

    Args:
        peer_device: another GPU, or "cpu" if there is only one.
    """
    learner = sizes.learner
    of_step = (sizes.model, sizes.shape, learner, device)
    canary = (sizes.num_canaries, sizes.canary_tokens)
    engine = partial(check_engine, table, device=device, learner=learner, canary=canary)
    return [
        ("weights", lambda: check_transfers(table, sizes.full, device, peer_device)),
        ("step", lambda: check_step(table, sizes, device)),
        ("compiled", lambda: check_compiled(table, sizes, device)),
        ("memory", lambda: check_memory(table, sizes, device)),
        ("canary", lambda: check_canary(table, sizes, device)),
        ("repetition", lambda: check_repetition(table, sizes, device)),
        ("chunks", lambda: check_chunks(table, sizes, device)),
        ("shards", lambda: check_shards(table, *of_step)),
        ("adapters", lambda: check_adapters(table, *of_step)),
        ("packed", lambda: check_packed(table, sizes.packed, device, sizes.matrix_size)),
        ("adapters sent", lambda: check_adapter_transfer(table, sizes.full, device, learner)),
        ("engine", lambda: engine(sizes.full)),
        ("engine, adapters", lambda: engine(sizes.model, lora_rank=ENGINE_LORA_RANK)),
    ]


def check_step(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    model = _model(sizes, device)
    size = f"{parameter_count(model) / 1e6:.0f}M weights"
    cost = measure_step(
        sizes.learner,
        {"grpo, token": AlgorithmSection()},
        model,
        sizes.shape,
        num_rounds=sizes.num_rounds,
        engine_dtype="bfloat16",
    )
    add_step_cost(table, cost, of=f"step of {cost.num_tokens} tokens, {size}, bf16 autocast")
    (name,) = set(cost.seconds) - {BARE}
    bound = MIN_STEP_TOKENS_PER_S if device.type == "cuda" else 0.0
    table.at_least(f"step: {name}", cost.tokens_per_s(name), "tokens/s", bound)


def check_compiled(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    ways = {"plain": sizes.learner, "compiled": replace(sizes.learner, compile=True)}
    cost = measure_ways(
        ways,
        _model(sizes, device),
        sizes.shape,
        num_rounds=sizes.num_rounds,
        engine_dtype="bfloat16",
    )
    add_ways(table, cost, against="plain")


def check_memory(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    num_tokens = sizes.memory_sequences * sizes.memory_seq_tokens
    defaults = LearnerSection()
    num_chunks = defaults.max_tokens_per_microbatch // defaults.logprob_chunk_tokens
    peaks = measure_scoring(
        _model(sizes, device, num_hidden_layers=2),
        num_sequences=sizes.memory_sequences,
        num_seq_tokens=sizes.memory_seq_tokens,
        chunk_tokens=num_tokens // num_chunks,
    )
    size = f"vocabulary of {sizes.model['vocab_size']}"
    of = f"memory: {size}, {num_tokens} tokens in {num_chunks} chunks"
    add_peaks(table, peaks, of=of)


def check_canary(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    """Compare the trainer's scores (fp32 master weights) with a forward pass in bf16."""
    model = _model(sizes, device)
    trainer = make_trainer(sizes.learner, AlgorithmSection(), model, engine_dtype="bfloat16")
    sequences = _sequences(sizes, vocabulary_size(model))
    known = trainer.score(sequences)
    # This changes the trainer's own model in place, so its scores are computed before.
    nn.Module.to(model, torch.bfloat16)
    delta = canary_delta(known, model, sequences)
    name = "canary: fp32 masters under autocast against bf16 weights"
    table.at_most(name, delta, "nats", MAX_CANARY_DELTA)


def check_repetition(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    model = _model(sizes, device)
    samples = make_batch(sizes.shape, vocab_size=vocabulary_size(model), seed=0)
    twice = repeat_step(sizes.learner, AlgorithmSection(), model, samples, engine_dtype="bfloat16")
    bound = MAX_REPETITION if device.type == "cuda" else 0.0
    note = "bit for bit" if twice.is_identical else "not bit for bit"
    name = "repetition: |update one - update two| / |update one|"
    table.at_most(name, twice.distance, "", bound, note)


def check_chunks(table: BenchTable, sizes: GpuWorkload, device: torch.device) -> None:
    model = _model(sizes, device, num_hidden_layers=2)
    rng = np.random.default_rng(0)
    shape = (sizes.memory_sequences, sizes.memory_seq_tokens)
    sequences = list(rng.integers(0, vocabulary_size(model), size=shape))
    masks = [np.arange(shape[1]) > 0] * shape[0]
    tokens = collate_tokens(sequences, masks, device=device)
    for cost in chunk_costs(model, tokens, sizes.chunk_sizes, autocast=True):
        table.at_most(
            f"chunks of {cost.chunk_tokens}: difference from one chunk",
            cost.mean_difference,
            "nats",
            MAX_CHUNK_DIFFERENCE,
            f"{cost.tokens_per_s:.0f} tokens/s, {cost.peak_bytes / 1e6:.0f} MB",
        )


def _model(sizes: GpuWorkload, device: torch.device, **changes: int) -> PreTrainedModel:
    return make_random_model({**sizes.model, **changes}, device=device, is_tied=True)


def _sequences(sizes: GpuWorkload, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, size=(sizes.num_canaries, sizes.canary_tokens)).tolist()
