"""Laws of experts on two learner ranks: they score, publish and train as one process does."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config.algorithm import AlgorithmSection
from common.config.learner import ControllerSection, LearnerSection, Precision
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.segments import RoutingShape
from learner.batch.batching import Sample
from learner.training.build import load_start, make_trainer
from learner.training.rank_workers import RankWorkers
from learner.training.trainer import Trainer
from tests.learner.builders import make_trajectory, tensors_of
from tests.learner.experts import save_experts
from tests.learner.policy.test_expert_conversion import plain_scores, sequences_of
from tests.learner.policy.test_expert_routing import draw_choices
from tests.learner.policy.test_loading import CPU
from tests.marks import long_for

pytestmark = [pytest.mark.slow, pytest.mark.long]
LENGTHS = (40, 23, 31)
DIVIDED = "qwen3_moe, rows divided"
EXPERTS = "qwen3_moe, experts divided"
KINDS = ("qwen3_moe", "mixtral", DIVIDED, EXPERTS)


@dataclass(kw_only=True)
class Life:
    """Records of two ranks, and of one process with the same weights and samples."""

    path: Path
    scores: list[list[float]]
    published: dict[str, torch.Tensor]
    trained: dict[str, float]  # Metrics of a step of two ranks.
    trained_alone: dict[str, float]
    trained_by_own_choice: dict[str, float]  # Metrics of one process without records.


@contextmanager
def trainer_of(cfg: RunConfig) -> Iterator[tuple[Trainer, RankWorkers]]:
    workers = RankWorkers(cfg, None)
    try:
        model, _ = load_start(cfg, None, CPU)
        workers.wait_loaded()
        links: dict[str, Any] = {"ranks": workers.join(cfg.learner), "announce": workers.announce}
        yield make_trainer(cfg, model, None, **links)[0], workers
    finally:
        workers.stop()


def samples_of(shape: RoutingShape | None) -> list[Sample]:
    """Return four samples; with a shape, four of five positions have random recorded experts."""
    made = []
    for number, sequence in enumerate(sequences_of(30, 17, 24, 21)):
        num = len(sequence)
        recorded: dict[str, Any] = {}
        if shape is not None:
            recorded["expert_ids"] = draw_choices(num, shape, seed=number)
            recorded["expert_mask"] = np.arange(num) % 5 > 0
        mask = [0, 0, 0, *[1] * (num - 3)]
        trajectory = make_trajectory(
            sequence.tolist(),
            mask,
            logprobs=[-5.7] * sum(mask),
            group_id=f"g{number // 2}",
            member=number % 2,
            **recorded,
        )
        made.append(Sample(trajectory=trajectory, advantage=1.0 - 2.0 * (number % 2)))
    return made


@pytest.fixture(scope="module", params=long_for(KINDS, KINDS[1:]))
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    """Start one pair of ranks for all laws: each process takes seconds to import its packages."""
    path = tmp_path_factory.mktemp("model")
    is_divided = request.param == DIVIDED
    save_experts(path, request.param.partition(",")[0])
    learner = LearnerSection(
        device="cpu",
        precision=Precision.FP32,
        num_ranks=2,
        sequence_ranks=1 + is_divided,
        expert_ranks=1 + (request.param == EXPERTS),
        rank_timeout_s=60.0,
        controller=ControllerSection(skip_step=False),  # The random records are far off-policy.
    )
    cfg = RunConfig(
        model=ModelSection(path=str(path), dtype="float32"),
        learner=learner,
        # Blocks differ between one rank and two with a row each; the loss depends on the block.
        algorithm=AlgorithmSection(routing_replay=True, router_aux_coef=0.1 * is_divided),
    )
    found: dict[str, Any] = {"path": path}
    with trainer_of(cfg) as (trainer, workers):
        found["scores"] = trainer.score([each.tolist() for each in sequences_of(*LENGTHS)])
        found["published"] = tensors_of(trainer.live_weights(ask=workers.ask_for_part))
        samples = samples_of(trainer.routing)
        found["trained"] = trainer.train_on(samples, version=0).metrics
    alone = replace(cfg, learner=replace(learner, num_ranks=1, sequence_ranks=1, expert_ranks=1))
    for name, own in (("trained_alone", samples), ("trained_by_own_choice", samples_of(None))):
        with trainer_of(alone) as (trainer, _):
            found[name] = trainer.train_on(own, version=0).metrics
    return Life(**found)


def test_two_ranks_score_and_publish_as_one(life: Life) -> None:
    plain = AutoModelForCausalLM.from_pretrained(life.path, attn_implementation="eager")
    expected = torch.cat([plain_scores(plain, each) for each in sequences_of(*LENGTHS)])
    assert (torch.tensor(list(chain(*life.scores))) - expected).abs().max() < 1e-4
    files = load_file(life.path / "model.safetensors")
    assert life.published.keys() == files.keys()
    assert all(torch.equal(life.published[name], files[name]) for name in files)


def test_two_ranks_train_on_recorded_experts_as_one(life: Life) -> None:
    """The records of 72 of 92 tokens cross to the other rank with its samples."""
    together = life.trained
    alone = life.trained_alone
    assert together["routing/recorded_frac"] == alone["routing/recorded_frac"]
    assert together["routing/recorded_frac"] == pytest.approx(72 / 92)
    norm = alone["train/grad_norm"]
    assert together["train/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert life.trained_by_own_choice["train/grad_norm"] != pytest.approx(norm, rel=1e-2)
