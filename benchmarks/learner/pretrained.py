"""The suite `pretrained`: a training step of a model on disk against the CPU's own matrix rate."""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.learner.batch import BatchShape, make_batch, with_sampler_logprobs
from benchmarks.learner.step import STILL, clock_of, make_trainer, step_of
from benchmarks.suite import Suite
from common.config.learner import FULL, Attention, Layout, LoraSection, OptimizerKind, Precision
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.batch.batching import Sample
from learner.batch.packing import forest_of
from learner.policy.model import load_policy, vocabulary_size
from learner.policy.precision import DTYPES
from learner.training.throughput import matrix_rate, step_flops
from learner.training.trainer import Trainer

CPU = torch.device("cpu")
NUM_ROUNDS = 2
LEAST_SHARE = {Precision.FP32: 0.6, Precision.BF16: 0.4}
MOST_LORA = 0.72  # Share of the seconds of a step that trains all weights.
MOST_BYTES = 5.5e9  # Resident memory of the process, for the first shape.
RANK = 16
PRESET = "smollm2-chain-sum"  # Its learner's settings are measured.
# 48 and 16 episodes, in groups of eight with a common prompt.
SHAPES = {
    "rows of 88": BatchShape(
        num_groups=6, group_size=8, max_turns=1, observation_tokens=55, action_tokens=33
    ),
    "rows of 256": BatchShape(
        num_groups=2, group_size=8, max_turns=1, observation_tokens=56, action_tokens=200
    ),
}
LEGEND = (
    "Share: the operations that a training step needs at least, over its seconds and over the\n"
    "rate of 2,048-matrices in the same precision. Common tokens count once, recomputation not\n"
    "at all. Step and rate alternate in one process, on one thread, in its own CPU time. Memory:\n"
    "the most that was resident, with Python and its libraries."
)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A trainer and its network."""

    trainer: Trainer
    network: PreTrainedModel


def run_suite(suite: Suite, *, overrides: Sequence[str]) -> None:
    """Measure the steps of the model at `model.path`, in fp32 and in bf16, with and without LoRA.

    Raises: ConfigError: an override is wrong, or `model.path` is not set.
    """
    if not any(each.startswith("model.path=") for each in overrides):
        raise ConfigError("--suite=pretrained: add model.path=FOLDER, the model to measure")
    cfg = load_config(PRESET, overrides)
    torch.set_num_threads(max(1, cfg.learner.num_threads))
    suite.title(LEGEND)
    for precision in (Precision.FP32, Precision.BF16):
        _measure_precision(suite, cfg, precision)
        gc.collect()


def _measure_precision(suite: Suite, cfg: RunConfig, precision: Precision) -> None:
    """Add the figures of one precision."""
    name = precision.value
    engine_dtype = "bfloat16" if precision is Precision.BF16 else "float32"
    full = _make_trainer(cfg, precision, engine_dtype, FULL)
    vocab_size = vocabulary_size(full.network)
    batches: dict[str, list[Sample]] = {}
    for label, shape in SHAPES.items():
        drawn = _with_common_prompts(make_batch(shape, vocab_size=vocab_size, seed=0))
        batches[label] = with_sampler_logprobs(drawn, full.trainer, seed=0)
        step = step_of(full.trainer, batches[label])
        step()  # From here on the optimizer has its state.
        _reset_peak()
        step()
        if label == next(iter(SHAPES)):
            bound = MOST_BYTES / 1e9
            suite.at_most(f"{name}, {label}: memory", _peak_bytes() / 1e9, "GB", bound)
        else:
            suite.figure(f"{name}, {label}: memory", _peak_bytes() / 1e9, "GB")
    adapted = _make_trainer(cfg, precision, engine_dtype, LoraSection(rank=RANK))
    clock = clock_of(CPU)

    def seconds_of(run: Callable[[], object]) -> float:
        started_s = clock()
        run()
        return clock() - started_s

    for label, samples in batches.items():
        contenders: dict[str, Callable[[], float]] = {
            "full": partial(seconds_of, step_of(full.trainer, samples)),
            "lora": partial(seconds_of, step_of(adapted.trainer, samples)),
            "rate": partial(matrix_rate, CPU, DTYPES[precision], clock=clock),
        }
        results = suite.in_turn(contenders, num_rounds=NUM_ROUNDS)
        rate = max(results.pop("rate"))
        rows = [each.trajectory for each in samples]
        lengths = [len(row.token_ids) for row in rows]
        forest = forest_of(rows)
        for kind, of in (("full", full), ("lora", adapted)):
            flops = step_flops(of.network, lengths, forest.num_scored(rows), forest.shared)
            took_s = statistics.median(results[kind])
            share = flops / took_s / rate
            note = f"{took_s:.1f} s, {flops / took_s / 1e9:.0f} of {rate / 1e9:.0f} GFLOP/s"
            note += f", {sum(lengths) / took_s:.0f} tokens/s"
            shown = f"{name}, {label}, {kind}: share of the matrix rate"
            if kind == "full":
                suite.at_least(shown, share, "", LEAST_SHARE[precision], note)
            else:
                suite.figure(shown, share, "", note)
        pairs = zip(results["lora"], results["full"], strict=True)
        ratio = statistics.median(lora / whole for lora, whole in pairs)
        suite.at_most(f"{name}, {label}: LoRA step over full", ratio, "", MOST_LORA)


def _make_trainer(
    cfg: RunConfig, precision: Precision, engine_dtype: str, lora: LoraSection
) -> _Measured:
    """Load the model; return its trainer, whose rate hardly changes the weights."""
    learner = cfg.learner
    section = replace(
        learner,
        device="cpu",
        precision=precision,
        lr=STILL,
        lora=lora,
        optimizer=OptimizerKind.ADAMW if lora.rank else learner.optimizer,
        layout=Layout.PACKED if learner.layout is Layout.AUTO else learner.layout,
        attention=Attention.PRODUCTS if learner.attention is Attention.AUTO else learner.attention,
    )
    network = load_policy(cfg.model.path, device=CPU, lora=lora)
    trainer = make_trainer(section, cfg.algorithm, network, engine_dtype=engine_dtype)
    return _Measured(trainer, network)


def _with_common_prompts(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the prompt of their group's first member."""
    prompts: dict[str, np.ndarray] = {}
    result: list[Sample] = []
    for sample in samples:
        whole = sample.trajectory
        size = int(np.argmax(whole.loss_mask))
        prompt = prompts.setdefault(whole.group_id, whole.token_ids[:size])
        ids = np.concatenate([prompt, whole.token_ids[size:]])
        result.append(replace(sample, trajectory=replace(whole, token_ids=ids)))
    return result


def _reset_peak() -> None:
    """Let Linux count this process's largest resident memory from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _peak_bytes() -> int:
    """Return the largest resident memory of this process since `_reset_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (peak,) = [line for line in lines if line.startswith("VmHWM:")]
    return int(peak.split()[1]) * 1024
