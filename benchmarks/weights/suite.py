"""The suite `weights`: transfers of versions, compared with a raw collective and a step."""

import threading
import time
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.learner.batch import (
    MAX_LAG,
    MODELS,
    QUICKSTART,
    make_batch,
    make_random_model,
    with_sampler_logprobs,
)
from benchmarks.learner.step import STILL, make_trainer
from benchmarks.suite import Suite
from benchmarks.weights.receiver import TIMEOUT_S
from benchmarks.weights.rounds import (
    ALLOWANCE_BYTES,
    TransferSetup,
    make_slots,
    receivers,
    send_rounds,
)
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, Precision
from common.weights.buckets import CPU, BucketLayout, send_buckets
from common.weights.transport import lower_priority
from learner.weights.lock import WeightsLock
from learner.weights.source import LiveWeights

MIN_BROADCAST_FRAC = 0.8
MAX_BUCKETS = 2.0
MIN_STEP_FRAC = 0.95
MIN_MEMORY_GB_PER_S = 3.0  # To one engine of the learner's node.


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferVolume:
    """The amount of data and the number of transfers."""

    num_bytes: int = 1_000_000_000  # In bf16.
    bucket_bytes: int = 256 << 20
    num_receivers: int = 4
    num_rounds: int = 7


def run_suite(suite: Suite) -> None:
    """Measure the weight plane on the CPUs of this machine in four minutes."""
    with suite.check("memory"):
        check_memory(suite, TransferVolume())
    torch.set_num_threads(1)
    with suite.check("broadcast"):
        check_broadcast(suite, TransferVolume())
    with suite.check("step"):
        check_step(suite, num_rounds=6)


def check_memory(suite: Suite, size: TransferVolume) -> None:
    """Send live fp32 weights as verified bf16 by memory and over gloo, with all cores."""
    weights = torch.randn(size.num_bytes // 2)
    source = LiveWeights([("weights", weights)], torch.bfloat16)
    cut = BucketLayout(source.total_bytes, size.bucket_bytes)
    plan = ["ours"] * (size.num_rounds + 1)
    for num_receivers in (1, size.num_receivers):
        speeds: dict[str, float] = {}
        per_cpu_s: dict[str, float] = {}
        for transport in ("gloo", "memory"):
            route = TransferSetup(transport=transport, num_receivers=num_receivers)
            sent = send_rounds(source, cut, plan, route=route)
            speeds[transport] = cut.total_bytes / 1e9 / median(sent.took_s["ours"][1:])
            per_cpu_s[transport] = cut.total_bytes / 1e9 / median(sent.cpu_s["ours"][1:])
        name = f"weights: {cut.total_bytes / 1e9:.2f} GB to {num_receivers} by memory"
        copies = _copy_speed(cut.total_bytes)
        suite.compare(name, speeds["memory"], speeds["gloo"], "GB/s", against="gloo")
        suite.compare(name, speeds["memory"], copies, "GB/s", against="a plain copy")
        per_second = f"{name}, in a second of CPU time"
        suite.compare(per_second, per_cpu_s["memory"], per_cpu_s["gloo"], "GB", against="gloo")
        if num_receivers == 1:
            suite.at_least(f"{name}, bound", speeds["memory"], "GB/s", MIN_MEMORY_GB_PER_S)


def _copy_speed(num_bytes: int) -> float:
    """Return GB/s of the second copy of bytes into the same memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = source.clone()
    started = time.perf_counter()
    target.copy_(source)
    return num_bytes / 1e9 / (time.perf_counter() - started)


def check_broadcast(suite: Suite, size: TransferVolume) -> None:
    """Send live fp32 weights as verified bf16, and the same bytes by one broadcast, in turn."""
    weights = torch.randn(size.num_bytes // 2)
    source = LiveWeights([("weights", weights)], torch.bfloat16)
    cut = BucketLayout(source.total_bytes, size.bucket_bytes)
    plan = ["ours", "raw"] * (size.num_rounds + 1)
    route = TransferSetup(num_receivers=size.num_receivers)
    sent = send_rounds(source, cut, plan, route=route, watches_memory=True)
    speeds = {
        kind: cut.total_bytes / 1e9 / median(seconds[1:]) for kind, seconds in sent.took_s.items()
    }
    suite.compare(
        f"weights: {cut.total_bytes / 1e9:.2f} GB to {size.num_receivers}, cast and checked",
        speeds["ours"],
        speeds["raw"],
        "GB/s",
        against="raw collective",
        at_least=MIN_BROADCAST_FRAC,
        note=f"of {size.num_rounds} rounds in turn",
    )
    suite.compare(
        "weights: memory of the sender beside what it has",
        sent.peak_bytes / 1e6,
        cut.slot_bytes / 1e6,
        "MB",
        against="a bucket",
        at_most=MAX_BUCKETS + ALLOWANCE_BYTES / cut.slot_bytes,
    )


def check_step(suite: Suite, *, num_rounds: int) -> None:
    """Time training steps with and without a concurrent transfer to one receiver, in turn."""
    model = make_random_model(MODELS["larger"], device=CPU)
    weights_lock = WeightsLock(timeout_s=TIMEOUT_S)
    cfg = LearnerSection(precision=Precision.FP32, lr=STILL)  # All steps see the same ratios.
    trainer = make_trainer(
        cfg, AlgorithmSection(), model, engine_dtype="bfloat16", before_update=weights_lock.close
    )
    samples = make_batch(QUICKSTART, vocab_size=model.config.vocab_size, seed=suite.seed)
    samples = with_sampler_logprobs(samples, trainer, seed=suite.seed)
    source = trainer.live_weights()
    cut = BucketLayout(source.total_bytes, max(16, source.total_bytes // 64 * 16))
    slots = make_slots(cut, CPU)
    took_s: dict[bool, list[float]] = {False: [], True: []}
    with receivers(["ours"] * (num_rounds + 1), cut=cut, route=TransferSetup()) as side:

        def send() -> None:
            """Send a version during a training step."""
            lower_priority()
            side.meeting.barrier()
            send_buckets(side.carrier, cut, slots, source.read, check=source.check)
            weights_lock.leave()
            side.meeting.barrier()

        for number in range(2 * num_rounds + 2):
            travels = number % 2 == 1
            sending = threading.Thread(target=send, daemon=True)
            started = time.perf_counter()
            if travels:
                weights_lock.open()
                weights_lock.enter()
                sending.start()
            trainer.train_on(samples, version=MAX_LAG, must_train=True)
            took_s[travels].append(time.perf_counter() - started)
            if travels:
                sending.join(TIMEOUT_S)
    alone, beside = (median(took_s[travels][1:]) for travels in (False, True))
    suite.compare(
        f"step: while {cut.total_bytes / 1e6:.0f} MB travel",
        1.0 / beside,
        1.0 / alone,
        "steps/s",
        against="without",
        at_least=MIN_STEP_FRAC,
    )
