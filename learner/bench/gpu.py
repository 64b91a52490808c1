"""The suite that a CUDA machine checks itself with: transfers, a step, memory, agreement, engine.

Every check is a function of a device and of sizes, so that the same code runs small on a CPU.
"""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from common.config.learning import AlgorithmSection, LearnerSection
from common.errors import ConfigError
from common.report.bench_table import BenchTable
from common.repository import ROOT
from learner.batch.batching import collate_tokens
from learner.bench.agree import canary_delta, chunk_costs, repeat_step
from learner.bench.batch import (
    LANGUAGE_MODEL,
    MODELS,
    PACKED,
    BatchShape,
    ModelShape,
    make_batch,
    make_random_model,
)
from learner.bench.checks.training import PackedCase, check_adapters, check_packed, check_shards
from learner.bench.engine import EngineRun, measure_engine
from learner.bench.memory import measure_scoring
from learner.bench.publish import broadcast_alone, broadcast_to_peer, snapshot_weights
from learner.bench.step import BARE, make_trainer, measure_step
from learner.bench.suite import add_peaks, add_step_cost
from learner.policy.model import parameter_count, vocabulary_size

TOKENIZER = ROOT / "configs" / "policies" / "tiny"
TIMEOUT_S = 120.0
MIN_NCCL_GB_PER_S = 5.0  # between two GPUs of one machine, over PCIe at the least
MIN_GLOO_GB_PER_S = 0.2  # between two processes over the loopback
MIN_SNAPSHOT_GB_PER_S = 1.0
MIN_STEP_TOKENS_PER_S = 1_000.0
MIN_ENGINE_TOKENS_PER_S = 100.0
MAX_CANARY_DELTA = LearnerSection().max_canary_delta
MAX_CHUNK_DIFFERENCE = 0.005  # nats: bf16 logits round differently in other tilings
MAX_REPETITION = 0.01  # attention's backward pass adds in no fixed order on CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    model: ModelShape
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


HALF_BILLION = Sizes(
    model=MODELS["half_billion"],
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
    """Check this CUDA machine, in some minutes; the engine's part runs if vLLM is installed.

    Raises: ConfigError: there is no CUDA here.
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
    for name, check in checks(table, HALF_BILLION, device, peer_device):
        table.attempt(name, check)
        torch.cuda.empty_cache()


def checks(
    table: BenchTable, sizes: Sizes, device: torch.device, peer_device: str
) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, check) of everything, to be run in this order. Each makes its own model.

    Args:
        peer_device: another GPU, or "cpu" where there is only one.
    """
    of_step = (sizes.model, sizes.shape, sizes.learner, device)
    return [
        ("weights", lambda: check_transfer(table, sizes, device, peer_device)),
        ("step", lambda: check_step(table, sizes, device)),
        ("memory", lambda: check_memory(table, sizes, device)),
        ("canary", lambda: check_canary(table, sizes, device)),
        ("repetition", lambda: check_repetition(table, sizes, device)),
        ("chunks", lambda: check_chunks(table, sizes, device)),
        ("shards", lambda: check_shards(table, *of_step)),
        ("adapters", lambda: check_adapters(table, *of_step)),
        ("packed", lambda: check_packed(table, sizes.packed, device, sizes.matrix_size)),
        ("engine", lambda: check_engine(table, sizes, device, peer_device)),
    ]


def check_transfer(table: BenchTable, sizes: Sizes, device: torch.device, peer_device: str) -> None:
    """Broadcast the weights to another process: over NCCL to another GPU, else over gloo."""
    weights, took_s = snapshot_weights(_model(sizes, device), torch.bfloat16)
    size_gb = weights.buffer.numel() / 1e9
    table.at_least(
        "weights: copy and checksum",
        size_gb / took_s,
        "GB/s",
        MIN_SNAPSHOT_GB_PER_S if device.type == "cuda" else 0.0,
        f"{size_gb:.2f} GB",
    )
    has_peer = device.type == "cuda" and peer_device.startswith("cuda")
    backend = "nccl" if has_peer else "gloo"
    if device.type == "cuda" and not has_peer:
        table.note("weights over NCCL", "one GPU only; NCCL allows one rank per GPU, gloo instead")
        broadcast_alone(weights.buffer, backend="nccl", timeout_s=TIMEOUT_S)
        weights = replace(weights, buffer=weights.buffer.cpu())
    transfer = broadcast_to_peer(
        weights, backend=backend, peer_device=peer_device, num_rounds=3, timeout_s=TIMEOUT_S
    )
    bound = MIN_NCCL_GB_PER_S if has_peer else MIN_GLOO_GB_PER_S
    name = f"weights: broadcast over {backend} to {peer_device}"
    table.at_least(name, transfer.gb_per_s, "GB/s", bound, f"{transfer.send_s:.3f} s each")
    table.at_least("weights: the same checksum at both ends", transfer.is_equal, "", 1)


def check_step(table: BenchTable, sizes: Sizes, device: torch.device) -> None:
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


def check_memory(table: BenchTable, sizes: Sizes, device: torch.device) -> None:
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


def check_canary(table: BenchTable, sizes: Sizes, device: torch.device) -> None:
    """Hold the trainer's scores (fp32 master weights) against a forward pass in bf16."""
    model = _model(sizes, device)
    trainer = make_trainer(sizes.learner, AlgorithmSection(), model, engine_dtype="bfloat16")
    sequences = _sequences(sizes, vocabulary_size(model))
    known = trainer.score(sequences)
    nn.Module.to(model, torch.bfloat16)  # in place: the trainer has answered already
    delta = canary_delta(known, model, sequences)
    name = "canary: fp32 masters under autocast against bf16 weights"
    table.at_most(name, delta, "nats", MAX_CANARY_DELTA)


def check_repetition(table: BenchTable, sizes: Sizes, device: torch.device) -> None:
    model = _model(sizes, device)
    samples = make_batch(sizes.shape, vocab_size=vocabulary_size(model), seed=0)
    twice = repeat_step(sizes.learner, AlgorithmSection(), model, samples, engine_dtype="bfloat16")
    bound = MAX_REPETITION if device.type == "cuda" else 0.0
    note = "bit for bit" if twice.is_identical else "not bit for bit"
    name = "repetition: |update one - update two| / |update one|"
    table.at_most(name, twice.distance, "", bound, note)


def check_chunks(table: BenchTable, sizes: Sizes, device: torch.device) -> None:
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


def check_engine(table: BenchTable, sizes: Sizes, device: torch.device, peer_device: str) -> None:
    """Start a vLLM engine as an actor does, bring it two versions, sample, compare scores."""
    if importlib.util.find_spec("vllm") is None:
        table.note("engine", "vllm is not installed")
        return
    is_cuda = device.type == "cuda"
    has_peer = peer_device.startswith("cuda")
    is_on_host = is_cuda and not has_peer
    if is_on_host:
        table.note("engine", "one GPU only; weights go through host memory")
    model = _model(sizes, device, vocab_size=448)  # of the tokenizer that it is saved with
    trainer = make_trainer(sizes.learner, AlgorithmSection(), model, engine_dtype="bfloat16")
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        figures = measure_engine(
            trainer,
            model,
            EngineRun(device=device.type, dtype="bfloat16", is_on_host=is_on_host),
            tokenizer_path=str(TOKENIZER),
            canary=_sequences(sizes, vocabulary_size(model)),
            folder=Path(folder),
            environ=_visible(peer_device),
        )
    table.at_most("engine: start", figures.start_s, "s", TIMEOUT_S)
    speed = MIN_ENGINE_TOKENS_PER_S if is_cuda else 0.0
    table.at_least("engine: sampling", figures.tokens_per_s, "tokens/s", speed)
    table.at_least("engine: tokens, logprobs and versions agree", figures.is_sound, "", 1)
    size_gb = figures.num_bytes / 1e9
    name = "engine: a version from offer to loaded"
    table.at_most(name, figures.publish_s, "s", 10.0, f"{size_gb:.2f} GB")
    name = "engine: canary against the trainer"
    table.at_most(name, figures.canary_delta, "nats", MAX_CANARY_DELTA)


def _model(sizes: Sizes, device: torch.device, **changes: int) -> PreTrainedModel:
    return make_random_model({**sizes.model, **changes}, device=device, is_tied=True)


def _visible(peer_device: str) -> dict[str, str]:
    """Return what makes a process see that GPU only; nothing if there is no other one."""
    if not peer_device.startswith("cuda:"):
        return {}
    number = int(peer_device.removeprefix("cuda:"))
    known = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": known.split(",")[number] if known else str(number)}


def _sequences(sizes: Sizes, vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, size=(sizes.num_canaries, sizes.canary_tokens)).tolist()
