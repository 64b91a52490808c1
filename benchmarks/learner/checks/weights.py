"""Checks of weight transfers on one device: to another process, in a group of one, to an engine."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.learner.batch import ModelShape, num_weights
from benchmarks.learner.checks.bench import DeviceBench
from benchmarks.learner.engine import (
    MAX_TOKEN_MS,
    MAX_TURN_MS,
    EngineFigures,
    EngineRun,
    measure_engine,
)
from benchmarks.learner.step import clock_of
from benchmarks.weights.rounds import TransferSetup, send_rounds
from common.config.learner import Precision
from common.repository import ROOT
from common.weights.buckets import BucketLayout
from learner.weights.source import LiveWeights, WeightSource

TOKENIZER = ROOT / "configs" / "policies" / "tiny"
TIMEOUT_S = 60.0
BUCKET_BYTES = 256 << 20
NUM_PIECES = 8  # Number of equal pieces of the sent weights.
NUM_ROUNDS = 4  # The first round allocates the memory.
MIN_NCCL_GB_PER_S = 5.0  # Between two GPUs of one machine, at least over PCIe.
MIN_GLOO_GB_PER_S = 3.0  # From a GPU to a process on the CPU, over loopback.
MIN_ENGINE_TOKENS_PER_S = 100.0
MAX_LORA_PAUSE_S_PER_GB = 0.5
MAX_START_S = 120.0
# Bounds for 7.6B weights in bf16 and an engine on the learner's GPU. Fewer bytes have
# proportionally smaller bounds.
FULL_BYTES = 15.2e9
MAX_UPDATE_S = 1.0
MAX_PAUSE_S = 0.1
SENT_BYTES = 6  # Bytes of memory for each weight: fp32 at the sender, bf16 at the receiver.
# Bytes of memory for each weight in bf16: at the sender, in an engine and in transfer.
SHARED_BYTES = 6
WORK_BYTES = 8 << 30


def check_transfers(bench: DeviceBench) -> None:
    """Send fp32 weights as a bf16 version: on this device, alone, and to another device.

    On a GPU the transport is CUDA IPC; on a CPU it is files behind the same mailbox.
    """
    suite = bench.suite
    device = str(bench.device)
    num = num_weights(_fitting(bench, SENT_BYTES))
    pieces = [
        (f"weights.{i}", torch.randn(num // NUM_PIECES, device=bench.device))
        for i in range(NUM_PIECES)
    ]
    source = LiveWeights(pieces, torch.bfloat16)
    took_s = _send(bench, source, _route_on_device(bench), "to a process on the same device")
    alone = TransferSetup(
        transport="nccl" if bench.is_cuda else "gloo",
        device=device,
        num_receivers=0,
        timeout_s=TIMEOUT_S,
    )
    _send(bench, source, alone, "in a group of one")
    if not bench.is_cuda:
        return
    size = f"for {source.total_bytes / 1e9:.1f} GB"
    name = "weights: an update by CUDA IPC, offer to checked"
    suite.at_most(name, took_s, "s", MAX_UPDATE_S * source.total_bytes / FULL_BYTES, size)
    if not bench.peer_device.startswith("cuda"):
        suite.note("weights: NCCL between GPUs", "left out: this machine has one GPU")
        return
    away = replace(_route_on_device(bench), transport="nccl", peer_device=bench.peer_device)
    part = LiveWeights(pieces[:1], torch.bfloat16)
    took_s = _send(bench, part, away, f"to {bench.peer_device}")
    name = f"weights: to {bench.peer_device} over nccl"
    suite.at_least(name, part.total_bytes / 1e9 / took_s, "GB/s", MIN_NCCL_GB_PER_S)


def check_gloo(bench: DeviceBench) -> None:
    """Send a part of the weights over gloo to a process on the CPU."""
    num = num_weights(bench.sizes.full) // NUM_PIECES
    part = LiveWeights([("weights", torch.randn(num, device=bench.device))], torch.bfloat16)
    away = replace(_route_on_device(bench), transport="gloo", peer_device="cpu")
    took_s = _send(bench, part, away, "to a process on the CPU")
    name = "weights: to a process on the CPU over gloo"
    bound = MIN_GLOO_GB_PER_S if bench.is_cuda else 0.0
    bench.suite.at_least(name, part.total_bytes / 1e9 / took_s, "GB/s", bound)


def _route_on_device(bench: DeviceBench) -> TransferSetup:
    """Return the route to another process on the device."""
    return TransferSetup(
        transport="ipc" if bench.is_cuda else "file",
        device=str(bench.device),
        peer_device=str(bench.device),
        timeout_s=TIMEOUT_S,
    )


def _send(bench: DeviceBench, source: WeightSource, route: TransferSetup, where: str) -> float:
    """Return the seconds of the fastest round. The receiver verifies every round."""
    cut = BucketLayout(source.total_bytes, BUCKET_BYTES)
    sent = send_rounds(source, cut, ["ours"] * NUM_ROUNDS, route=route)
    took_s = min(sent.took_s["ours"][1:])
    bench.suite.compare(
        f"weights: {route.transport} {where}",
        source.total_bytes / 1e9 / took_s,
        _copy_rate(source.total_bytes, bench.device),
        "GB/s",
        against="a copy on the device",
        note=f"{source.total_bytes / 1e9:.2f} GB in {took_s:.3f} s, cast and checked",
    )
    return took_s


def _copy_rate(num_bytes: int, device: torch.device) -> float:
    """Return GB/s of plain copies on a device, of a bucket at a time."""
    part = torch.ones(min(num_bytes, BUCKET_BYTES), dtype=torch.uint8, device=device)
    other = torch.zeros_like(part)
    clock = clock_of(device)
    other.copy_(part)
    started = clock()
    for _ in range(8):
        other.copy_(part)
    return 8 * part.numel() / 1e9 / (clock() - started)


def _fitting(bench: DeviceBench, bytes_each: int) -> ModelShape:
    """Return the full shape with as many of its layers as fit into a GPU's free memory."""
    shape = bench.sizes.full
    if not bench.is_cuda:
        return shape
    torch.cuda.empty_cache()
    free_bytes = torch.cuda.mem_get_info(bench.device)[0] - WORK_BYTES
    while shape["num_hidden_layers"] > 1 and bytes_each * num_weights(shape) > free_bytes:
        shape = {**shape, "num_hidden_layers": shape["num_hidden_layers"] - 1}
    return shape


def check_adapter_transfer(bench: DeviceBench) -> None:
    """Send only a model's adapters to another process on the device."""
    model = bench.shaped(bench.sizes.full, lora_rank=8)
    source = bench.trainer(model).live_weights()
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    name = "adapters: bytes of a version for each trained weight"
    bench.suite.at_most(name, source.total_bytes / trained, "", 2.01)
    _send(
        bench, source, _route_on_device(bench), "of adapters alone, to a process on the same device"
    )


def check_engine(bench: DeviceBench, *, is_lora: bool = False) -> None:
    """Start a vLLM engine on the learner's device, send two versions, sample, compare scores.

    With adapters, versions contain adapters alone.
    """
    suite = bench.suite
    name = "engine, adapters" if is_lora else "engine"
    lora_rank = bench.sizes.engine_lora_rank if is_lora else 0
    shape = bench.sizes.model if lora_rank else _fitting(bench, SHARED_BYTES)
    figures = run_engine(bench, shape, lora_rank=lora_rank)
    share = figures.num_bytes / FULL_BYTES if bench.is_cuda and not lora_rank else 1.0
    slack = share if bench.is_cuda else 10.0
    size = f"{figures.num_bytes / 1e9:.2f} GB, transfer {figures.transfer_s:.3f} s"
    speed = MIN_ENGINE_TOKENS_PER_S if bench.is_cuda else 0.0
    suite.at_most(f"{name}: start", figures.start_s, "s", MAX_START_S)
    suite.at_least(f"{name}: sampling", figures.tokens_per_s, "tokens/s", speed)
    suite.at_least(f"{name}: tokens, logprobs and versions agree", figures.is_sound, "", 1)
    update = f"{name}: a version from offer to loaded"
    suite.at_most(update, figures.publish_s, "s", slack * MAX_UPDATE_S, size)
    pause = f"{name}: its pause of generation"
    if lora_rank and bench.is_cuda:
        per_gb = figures.pause_s / (figures.num_bytes / 1e9)
        suite.at_most(f"{pause}, per GB", per_gb, "s", MAX_LORA_PAUSE_S_PER_GB)
    else:
        suite.at_most(pause, figures.pause_s, "s", slack * MAX_PAUSE_S)
    add_actor_cost(bench, name, figures)
    against = f"{name}: canary against the trainer"
    bound = bench.sizes.learner.max_canary_delta
    suite.at_most(against, figures.canary_delta, "nats", bound)


def run_engine(
    bench: DeviceBench,
    shape: ModelShape,
    *,
    lora_rank: int = 0,
    enforce_eager: str = "",
    dtype: str = "bfloat16",
) -> EngineFigures:
    """Return the figures of an engine with a random model of a shape, on the learner's device.

    Args:
        enforce_eager: value of `actor.enforce_eager`; "" keeps the default.
        dtype: value of `model.dtype`. With float16 the trainer computes in fp16, too.
    """
    is_fp16 = dtype == "float16"
    stored = torch.float32 if is_fp16 or not bench.is_cuda else torch.bfloat16
    model = bench.shaped(shape, lora_rank=lora_rank, dtype=stored)
    learner = bench.sizes.learner
    if is_fp16:
        learner = replace(learner, precision=Precision.FP16)
    run = EngineRun(
        dtype=dtype,
        has_weights=lora_rank > 0,
        lora_rank=lora_rank,
        gpu_memory_frac=_engine_share(num_weights(shape), bench.device),
        num_prompts=bench.sizes.num_prompts,
        max_tokens=bench.sizes.turn_tokens,
        enforce_eager=enforce_eager,
    )
    with tempfile.TemporaryDirectory(prefix="longstride-bench-") as folder:
        return measure_engine(
            bench.trainer(model, learner, engine_dtype=dtype),
            model,
            run,
            tokenizer_path=str(TOKENIZER),
            canary=bench.canaries(model),
            folder=Path(folder),
        )


def add_actor_cost(bench: DeviceBench, name: str, figures: EngineFigures) -> None:
    """Write the CPU time of the actor's process for each token, and the share of it allowed."""
    allowed_ms = MAX_TOKEN_MS + MAX_TURN_MS / bench.sizes.turn_tokens
    bench.suite.compare(
        f"{name}: CPU time of the actor for a token",
        figures.actor_ms_per_token,
        allowed_ms,
        "ms",
        against=f"{MAX_TOKEN_MS:g} ms and {MAX_TURN_MS:g} ms a turn",
        at_most=1.0,
    )


def _engine_share(num: int, device: torch.device) -> float:
    """Return the fraction of a GPU for an engine's weights and a small cache."""
    if device.type != "cuda":
        return 0.3
    return min(0.9, (2 * num + WORK_BYTES / 2) / torch.cuda.mem_get_info(device)[1])
