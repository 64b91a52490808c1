"""The suite `delta`: bytes and CPU time of versions as changes, over the learning rate."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import mean, median
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.learner.batch import ModelShape, make_random_model
from benchmarks.suite import Suite
from common.config.learner import LearnerSection
from common.weights.buckets import CPU
from common.weights.delta import apply_delta, digest_of_whole
from learner.training.optimizer import PolicyOptimizer, make_optimizer
from learner.weights.source import CopiedWeights, PublishedWeights, VersionKeeper, policy_weights

Result = TypeVar("Result")

MAX_BYTES_FRAC = 0.1
MAX_TIME_RATIO = 1.0
LEARNING_RATES = (1e-7, 1e-6, 3e-6, 1e-5)
TEN_MILLION = {  # 9.9 million weights.
    **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024},
    **{"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
}


@dataclass(slots=True)
class Curve:
    """Figures of each version."""

    bytes_frac: list[float] = field(default_factory=list)  # Sent bytes / bytes of the version.
    changed_frac: list[float] = field(default_factory=list)
    pack_s: list[float] = field(default_factory=list)  # CPU time beside the read with its cast.
    apply_s: list[float] = field(default_factory=list)  # CPU time of a receiver.
    plain_s: list[float] = field(default_factory=list)  # CPU time of a cast and a compare.


def run_suite(suite: Suite) -> None:
    """Train for 50 steps at each learning rate, on one core in two minutes."""
    torch.set_num_threads(1)
    for lr in LEARNING_RATES:
        check_rate(suite, TEN_MILLION, lr=lr, num_steps=50)


def check_rate(suite: Suite, shape: ModelShape, *, lr: float, num_steps: int) -> None:
    """Write the figures of one learning rate."""
    curve = measure(shape, lr=lr, num_steps=num_steps, seed=suite.seed)
    name = f"delta: lr {lr:g},"
    suite.at_most(
        f"{name} bytes of a version, as a share of the whole",
        mean(curve.bytes_frac),
        "",
        MAX_BYTES_FRAC,
        note=f"first {curve.bytes_frac[0]:.3f}, last {curve.bytes_frac[-1]:.3f}; "
        f"changed numbers {mean(curve.changed_frac):.3f}",
    )
    suite.compare(
        f"{name} CPU time to compare and pack",
        1e3 * median(curve.pack_s),
        1e3 * median(curve.plain_s),
        "ms",
        against="a cast and a compare",
        at_most=MAX_TIME_RATIO,
        note=f"a receiver {1e3 * median(curve.apply_s or [math.nan]):.1f} ms with the digest",
    )


def measure(shape: ModelShape, *, lr: float, num_steps: int, seed: int) -> Curve:
    """Train on new random tokens in every step, and send each version to one copy."""
    model = make_random_model(shape, device=CPU)
    optimizer = make_optimizer(model, LearnerSection(lr=lr))
    generator = torch.Generator().manual_seed(seed)
    source = policy_weights(model, torch.bfloat16)
    keeper = VersionKeeper()
    first = keeper.keep(PublishedWeights(version=0, source=source)).whole
    received = _bytes_of(first)
    scratch = torch.zeros_like(received)
    curve = Curve()
    for version in range(1, num_steps + 1):
        tokens = torch.randint(0, shape["vocab_size"], (2, 32), generator=generator)
        _train(model, optimizer, tokens)
        read_s, _ = _timed(partial(source.fill, 0, scratch))
        weights = PublishedWeights(version=version, source=source)
        keep_s, kept = _timed(partial(keeper.keep, weights))
        curve.pack_s.append(keep_s - read_s)
        curve.plain_s.append(_plain_s(model, received))
        assert kept.changed_frac is not None
        curve.changed_frac.append(kept.changed_frac)
        sent = kept.delta or kept.whole
        curve.bytes_frac.append(sent.source.total_bytes / received.numel())
        if kept.delta is None:
            received = _bytes_of(kept.whole)
            continue
        apply_s, digest = _timed(partial(_apply, received, _bytes_of(kept.delta)))
        curve.apply_s.append(apply_s)
        assert digest == kept.whole.digest
    return curve


def _train(model: PreTrainedModel, optimizer: PolicyOptimizer, tokens: Tensor) -> None:
    """Make one training step."""
    optimizer.zero_grad()
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()


def _plain_s(model: PreTrainedModel, before: Tensor) -> float:
    """Return the CPU time to cast all weights and to compare them with those before."""
    old = before.view(torch.bfloat16)
    new = torch.zeros_like(old)
    weights = torch.cat([weight.detach().view(-1) for weight in model.parameters()])
    num = min(weights.numel(), old.numel())
    cast_s, _ = _timed(partial(new[:num].copy_, weights[:num]))
    compare_s, _ = _timed(partial(torch.ne, new, old))
    return cast_s + compare_s


def _apply(buffer: Tensor, packed: Tensor) -> str:
    """Apply changes to a buffer; return its digest."""
    apply_delta(buffer, packed)
    return digest_of_whole(buffer)


def _bytes_of(weights: PublishedWeights) -> Tensor:
    """Return a copy of a version's bytes."""
    assert isinstance(weights.source, CopiedWeights)
    return weights.source.buffer.clone()


def _timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds of CPU time that the work took, and its result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result
