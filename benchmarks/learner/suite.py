"""The suite `learner`: the cost of a step, the peak memory of scoring, the speed of checkpoints."""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.learner.batch import (
    LARGER,
    MAX_LAG,
    MODELS,
    QUICKSTART,
    BatchShape,
    ModelShape,
    make_batch,
    make_random_model,
)
from benchmarks.learner.checks.bench import SMALL
from benchmarks.learner.memory import MAX_FRAC, ScoringPeaks, measure_scoring
from benchmarks.learner.step import (
    BARE,
    MAX_RATIO,
    STILL,
    StepCost,
    by_aggregation,
    layouts_of,
    make_trainer,
    measure_step,
    measure_ways,
)
from benchmarks.suite import Suite
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, Precision
from common.config.load import load_config
from common.repository import ROOT
from common.weights.buckets import CPU
from learner.policy.model import load_policy, parameter_count
from learner.training.checkpoint import Checkpoints

NUM_ROUNDS = 12
MAX_DIFFERENCE = 0.005  # In nats; the two methods of scoring round differently.
MEMORY_SEQUENCES = 4
MIN_CHECKPOINT_FRAC = 0.5  # With two idle cores.
PLAIN = "padded, products"
LEGEND = (
    "Ratios: a whole training step over bare forward, backward and optimizer of the same model on\n"
    "the same microbatches, in turn, in one process, in its own CPU time; median of {num_rounds}\n"
    "rounds with quartiles. Memory: the most that torch allocated at once in a forward and\n"
    "backward pass, over the same with one fp32 log-softmax of [batch, seq, vocab].\n"
)


def run_suite(suite: Suite) -> None:
    """Measure the learner in ten minutes of one core."""
    torch.set_num_threads(1)
    suite.title(LEGEND.format(num_rounds=NUM_ROUNDS).rstrip())
    cfg = load_config("quickstart", [])
    path = str(ROOT / cfg.model.path)
    policy = load_policy(path, device=CPU)
    sizes: list[tuple[str, PreTrainedModel, BatchShape]] = [
        ("quickstart's policy", policy, QUICKSTART),
        ("a larger model", make_random_model(MODELS["larger"], device=CPU), LARGER),
    ]
    for name, model, shape in sizes:
        cost = measure_step(
            cfg.learner,
            by_aggregation(cfg.algorithm),
            model,
            shape,
            num_rounds=NUM_ROUNDS,
            engine_dtype=cfg.model.dtype,
        )
        add_step_cost(suite, cost, of=f"{name}, {parameter_count(model) / 1e6:.1f}M weights")
        layouts = measure_ways(
            layouts_of(cfg.learner),
            model,
            shape,
            num_rounds=NUM_ROUNDS // 2,
            engine_dtype=cfg.model.dtype,
        )
        add_ways(suite, layouts, against=PLAIN)
    del policy, sizes
    wide = MODELS["wide"]
    defaults = LearnerSection()
    rows_per_chunk = defaults.max_tokens_per_microbatch // defaults.logprob_chunk_tokens
    chunk_tokens = 64
    peaks = measure_scoring(
        make_random_model(wide, device=CPU),
        num_sequences=MEMORY_SEQUENCES,
        num_seq_tokens=chunk_tokens * rows_per_chunk // MEMORY_SEQUENCES,
        chunk_tokens=chunk_tokens,
    )
    add_peaks(suite, peaks, of=f"vocabulary of {wide['vocab_size']}, {rows_per_chunk} chunks")
    suite.title("checkpoints of 84M weights, and a plain file of the same size, in turn")
    speeds = measure_checkpoints(MODELS["saved"], num_rounds=3)
    for when, least in (("alone", MIN_CHECKPOINT_FRAC), ("training", None)):
        name, peer = f"checkpoint, {when}", speeds["plain"]
        suite.compare(name, speeds[when], peer, "GB/s", against="a file", at_least=least)


def add_step_cost(suite: Suite, cost: StepCost, *, of: str, most: float = MAX_RATIO) -> None:
    """Add the cost of a training step beside that of the bare model."""
    suite.title(f"{of}: bare {cost.tokens_per_s(BARE):.0f} tokens/s")
    for name in cost.seconds:
        if name == BARE:
            continue
        low, high = cost.spread(name)
        note = f"quartiles {low:.3f} to {high:.3f}, {cost.tokens_per_s(name):.0f} tokens/s"
        suite.at_most(f"step over bare: {name}", cost.ratio(name), "", most, note)


def add_ways(suite: Suite, cost: StepCost, *, against: str) -> None:
    """Write the speed of bare steps, compared with those of the settings `against`."""
    plain = cost.tokens_per_s(BARE)
    for name in cost.seconds:
        if name != BARE:
            speed = plain / cost.ratio(name)
            suite.compare(f"bare step: {name}", speed, plain, "tokens/s", against=against)


def add_peaks(suite: Suite, peaks: ScoringPeaks, *, of: str) -> None:
    """Add the peak memory of scoring in chunks and as a whole."""
    suite.title(of)
    sizes = f"{peaks.chunked_bytes / 1e6:.0f} of {peaks.whole_bytes / 1e6:.0f} MB"
    name = "peak of forward and backward, over the whole at once"
    suite.at_most(name, peaks.frac, "", MAX_FRAC, sizes)
    name = "the same log-probabilities, mean difference"
    suite.at_most(name, peaks.mean_difference, "nats", MAX_DIFFERENCE)


TOKENIZER = ROOT / "configs/policies/tiny"


def measure_checkpoints(shape: ModelShape, *, num_rounds: int) -> dict[str, float]:
    """Return the median GB/s of a plain file, a checkpoint alone, and one during training steps.

    They take turns, and each is synced to the disk. A checkpoint has the fp32 weights, their
    moments and the policy in the format of transformers. The first round allocates memory and does
    not count.
    """
    model = make_random_model(shape, device=CPU)
    cfg = LearnerSection(precision=Precision.FP32, lr=STILL)
    trainer = make_trainer(cfg, AlgorithmSection(), model, engine_dtype="float32")
    samples = make_batch(SMALL.shape, vocab_size=model.config.vocab_size, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER, local_files_only=True)
    speeds: dict[str, list[float]] = {"plain": [], "alone": [], "training": []}
    with tempfile.TemporaryDirectory(prefix="longstride-checkpoint-") as folder:
        checkpoints = Checkpoints(Path(folder), cfg)
        for version in range(2 * num_rounds + 2):
            is_training = version % 2 == 1
            trainer.train_on(samples, version=MAX_LAG, must_train=True)
            path = checkpoints.save(version, model=model, tokenizer=tokenizer, trainer=trainer)
            while (took_s := checkpoints.poll()) is None:
                if is_training:
                    trainer.train_on(samples, version=MAX_LAG, must_train=True)
                else:
                    checkpoints.wait()
            num_bytes = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
            speeds["training" if is_training else "alone"].append(num_bytes / 1e9 / took_s)
            if is_training:
                speeds["plain"].append(_plain_speed(Path(folder) / "plain", num_bytes))
    return {name: median(each[1:]) for name, each in speeds.items()}


def _plain_speed(path: Path, num_bytes: int) -> float:
    """Return GB/s of a file with random bytes, which is removed."""
    content = os.urandom(num_bytes)
    started = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        assert file.write(content) == num_bytes, "one call writes two gigabytes at most"
        os.fsync(file.fileno())
    took_s = time.perf_counter() - started
    path.unlink()
    return num_bytes / 1e9 / took_s
