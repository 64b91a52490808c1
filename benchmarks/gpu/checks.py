"""Device checks of kernels and memory: calls of flash attention, growth over many steps."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import psutil
from torch.profiler import ProfilerActivity, profile

from benchmarks.learner.batch import BatchShape, make_batch
from benchmarks.learner.checks.bench import DeviceBench
from benchmarks.learner.step import STILL, BareStep
from common.config.learner import Layout
from learner.policy.model import vocabulary_size

PACKED_KERNEL = "torch_attn::_varlen_attn"
ONE_SEQUENCE_KERNEL = "aten::scaled_dot_product_attention"
MAX_GROWTH_BYTES = 100e6
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
