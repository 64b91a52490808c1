"""The speed of checkpoints, alone and during training steps, and of a plain file."""

import os
import tempfile
import time
from pathlib import Path
from statistics import median

from transformers import AutoTokenizer

from benchmarks.learner.batch import MAX_LAG, ModelShape, make_batch, make_random_model
from benchmarks.learner.checks.bench import SMALL
from benchmarks.learner.step import STILL, make_trainer
from common.config.algorithm import AlgorithmSection
from common.config.learner import LearnerSection, Precision
from common.repository import ROOT
from common.weights.buckets import CPU
from learner.training.checkpoint import Checkpoints

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
