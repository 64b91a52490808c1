"""The self-check of a CUDA machine: transfers, a step, memory, agreement, engine.

Every check is a function of a device and of sizes. With small sizes the same code runs on a CPU.
"""

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.learner.batch import LANGUAGE_MODEL, MODELS, PACKED
from benchmarks.learner.checks.agreement import check_canary, check_chunks, check_repetition
from benchmarks.learner.checks.bench import DeviceBench, PackedCase, Sizes
from benchmarks.learner.checks.training import (
    check_adapters,
    check_compiled,
    check_memory,
    check_packed,
    check_shards,
    check_step,
)
from benchmarks.learner.checks.weights import check_adapter_transfer, check_engine, check_transfers
from benchmarks.table import BenchTable
from common.config.learning import LearnerSection
from common.errors import ConfigError

MAX_SUITE_S = 480.0
ENGINE_LORA_RANK = 8
HALF_BILLION = Sizes(
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
CHECKS: dict[str, Callable[[DeviceBench], None]] = {  # In order. Each check makes its own model.
    "weights": check_transfers,
    "step": check_step,
    "compiled": check_compiled,
    "memory": check_memory,
    "canary": check_canary,
    "repetition": check_repetition,
    "chunks": check_chunks,
    "shards": check_shards,
    "adapters": check_adapters,
    "packed": check_packed,
    "adapters sent": check_adapter_transfer,
    "engine": check_engine,
    "engine, adapters": partial(check_engine, lora_rank=ENGINE_LORA_RANK),
}


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
    bench = DeviceBench(
        table=table,
        sizes=HALF_BILLION,
        device=torch.device("cuda", 0),
        peer_device="cuda:1" if num_gpus > 1 else "cpu",
    )
    started = time.monotonic()
    for name, check in CHECKS.items():
        table.attempt(name, partial(check, bench))
        torch.cuda.empty_cache()
    table.at_most("the whole suite", time.monotonic() - started, "s", MAX_SUITE_S)
