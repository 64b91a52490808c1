"""Laws of every kind of learner: a version has the numbers that its next pass uses, bit for bit."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from common.config.learner import (
    ControllerSection,
    LearnerSection,
    LoraSection,
    Moments,
    Offload,
    Precision,
    Rounding,
)
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.repository import ROOT
from common.weights.buckets import views
from common.weights.delta import apply_delta
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from learner.training.rank_workers import RankWorkers
from learner.training.trainer import Trainer
from learner.weights.source import PublishedWeights, VersionKeeper
from tests.learner.builders import make_samples, tensors_of
from tests.learner.training.test_moments import wide_model
from tests.marks import long_for

IDS = [[5, 9, 17, 30, 41, 8, 7, 12, 6, 33, 25, 19], [3, 44, 2, 11, 29, 13, 40]]
LEARNERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "8-bit moments": {"moments": Moments.INT8},
    "adapters": {"lora": LoraSection(rank=4)},
    "two ranks": {"num_ranks": 2},
    "two ranks, 8-bit moments": {"num_ranks": 2, "moments": Moments.INT8},
    "two ranks, adapters": {"num_ranks": 2, "lora": LoraSection(rank=4)},
    "divided rows": {"num_ranks": 2, "sequence_ranks": 2},
    "offloaded": {"offload": Offload.OPTIMIZER, "device": "auto"},
}
WITH_PROCESSES = [name for name, keys in LEARNERS.items() if "num_ranks" in keys]
TOKENIZER: Any = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")

ARITHMETICS = {
    "fp32": (Precision.FP32, Rounding.NEAREST),
    "bf16": (Precision.BF16, Rounding.NEAREST),
    "bf16 stochastic": (Precision.BF16, Rounding.STOCHASTIC),
    "fp16": (Precision.FP16, Rounding.NEAREST),
}

ENGINE_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}

pytestmark = pytest.mark.parametrize("arithmetic", list(ARITHMETICS))
of_learners = pytest.mark.parametrize("kind", long_for(LEARNERS, WITH_PROCESSES))


def make_cfg(folder: Path, kind: str, arithmetic: str, *, dtype: str = "float32") -> RunConfig:
    """Save a policy of bf16 numbers with its tokenizer; return a configuration that trains it."""
    precision, rounding = ARITHMETICS[arithmetic]
    model = wide_model(width=256 if kind.endswith("moments") else 64)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(each.bfloat16().float())
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    if "lora" in LEARNERS[kind]:
        dtype = ENGINE_DTYPES[precision]
    settings: dict[str, Any] = {
        "device": "cpu",
        "precision": precision,
        "rounding": rounding,
        "lr": 1e-5,
        "warmup_steps": 0,
        "rank_timeout_s": 120.0,
        "controller": ControllerSection(skip_step=False),
        **LEARNERS[kind],
    }
    model_section = ModelSection(path=str(folder), dtype=dtype)
    return RunConfig(model=model_section, learner=LearnerSection(**settings))


class Started:
    """A trainer of all ranks."""

    def __init__(self, trainer: Trainer, workers: RankWorkers, network: Any) -> None:
        self.trainer = trainer
        self.network = network
        self._source = trainer.live_weights(ask=workers.ask_for_part)

    def version(self) -> dict[str, Tensor]:
        return tensors_of(self._source)

    def train(self, *steps: int) -> dict[str, float]:
        """Make steps; return the metrics of the last one that no clock measures."""
        metrics: dict[str, float] = {}
        for step in steps:
            metrics = self.trainer.train_on(make_samples(seed=step), version=step).metrics
        return {
            name: each
            for name, each in metrics.items()
            if "_per_s" not in name and "_s" not in name
        }


@contextmanager
def started(cfg: RunConfig, checkpoint: Path | None = None) -> Iterator[Started]:
    workers = RankWorkers(cfg, checkpoint)
    try:
        network, _ = load_start(cfg, checkpoint, torch.device("cpu"))
        workers.wait_loaded()
        ranks = workers.join(cfg.learner)
        made, _ = make_trainer(cfg, network, checkpoint, ranks=ranks, announce=workers.announce)
        yield Started(made, workers, network)
    finally:
        workers.stop()


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kind", long_for([k for k in LEARNERS if "adapters" not in k], WITH_PROCESSES)
)
def test_learner_that_starts_from_a_version_has_the_same_scores(
    tmp_path: Path, kind: str, arithmetic: str
) -> None:
    cfg = make_cfg(tmp_path / "policy", kind, arithmetic)
    with started(cfg) as first:
        before = first.version()
        first.train(0, 1, 2)
        scores, version = first.trainer.score(IDS), first.version()
    assert not same(before, version)
    copy = shutil.copytree(tmp_path / "policy", tmp_path / "copy")
    save_file(version, copy / "model.safetensors", metadata={"format": "pt"})
    with started(replace(cfg, model=replace(cfg.model, path=str(copy)))) as second:
        assert second.trainer.score(IDS) == scores
        assert same(second.version(), version)


@pytest.mark.slow
@pytest.mark.timeout(600)
@of_learners
def test_resumed_run_continues_as_the_uninterrupted_one(
    tmp_path: Path, kind: str, arithmetic: str
) -> None:
    cfg = make_cfg(tmp_path / "policy", kind, arithmetic)
    with started(cfg) as first:
        first.train(0, 1)
        checkpoints = Checkpoints(tmp_path / "checkpoints", cfg.learner)
        folder = checkpoints.save(
            2, model=first.network, tokenizer=TOKENIZER, trainer=first.trainer
        )
        checkpoints.wait()
        stopped, scores = first.version(), first.trainer.score(IDS)
        metrics = first.train(2)
        after = first.version()
    with started(cfg, folder) as second:
        assert same(second.version(), stopped)
        assert second.trainer.score(IDS) == scores
        assert second.train(2) == metrics
        assert same(second.version(), after)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", long_for(["plain", "two ranks"], ["two ranks"]))
def test_changes_turn_the_copy_into_the_version(
    tmp_path: Path, kind: str, dtype: str, arithmetic: str
) -> None:
    """Base and changes are compared and sent in the dtype of the version, after all rounding."""
    cfg = make_cfg(tmp_path / "policy", kind, arithmetic, dtype=dtype)
    cfg = replace(cfg, learner=replace(cfg.learner, lr=1e-6))
    keeper = VersionKeeper()
    num_changes = 0
    with started(cfg) as learner:
        source = learner._source
        held = keeper.keep(PublishedWeights(version=0, source=source)).whole.source
        engine = torch.zeros(held.total_bytes, dtype=torch.uint8)
        held.fill(0, engine)
        for version in (1, 2, 3):
            learner.train(version)
            kept = keeper.keep(PublishedWeights(version=version, source=source))
            if kept.delta is None:  # Most numbers have changed: the version is sent whole.
                kept.whole.source.fill(0, engine)
            else:
                packed = torch.zeros(kept.delta.source.total_bytes, dtype=torch.uint8)
                kept.delta.source.fill(0, packed)
                apply_delta(engine, packed)
                num_changes += 1
            assert same(dict(views(engine, source.specs)), learner.version())
    assert num_changes == 3 or (arithmetic, dtype) == ("fp32", "float32")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", long_for(["two ranks"], ["two ranks"]))
def test_ranks_round_as_one(tmp_path: Path, kind: str, arithmetic: str) -> None:
    """The same masters make the same version."""
    cfg = make_cfg(tmp_path / "policy", kind, arithmetic)
    with started(cfg) as both:
        both.train(0, 1)
        checkpoints = Checkpoints(tmp_path / "checkpoints", cfg.learner)
        folder = checkpoints.save(2, model=both.network, tokenizer=TOKENIZER, trainer=both.trainer)
        checkpoints.wait()
        version = both.version()
    with started(replace(cfg, learner=replace(cfg.learner, num_ranks=1)), folder) as alone:
        assert same(alone.version(), version)
