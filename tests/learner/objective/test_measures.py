"""Mutual information of prompts and answers against its definition by enumeration."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from common.config.algorithm import AlgorithmSection
from common.config.learner import Layout, LearnerSection, Precision
from learner.batch.batching import Sample
from learner.objective.measures import NUM_PROMPTS, first_answers, mutual_information
from learner.policy.forward import Networks
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_trajectory


def test_mutual_information_estimate_is_unbiased() -> None:
    channel = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.5, 0.25]])  # [prompt, answer]
    marginal = channel.mean(0)
    exact = sum(
        channel[x, z] / 3 * math.log(channel[x, z] / marginal[z])
        for x in range(3)
        for z in range(3)
    )
    estimates = 0.0
    for answers in np.ndindex(3, 3, 3):  # one answer of each prompt, with its probability
        chance = math.prod(channel[x, z] for x, z in enumerate(answers))
        cross = torch.tensor([[math.log(channel[x, z]) for x in range(3)] for z in answers])
        estimates += chance * mutual_information(cross)["policy/mutual_information"]
    assert estimates == pytest.approx(exact, abs=1e-6)


def test_mutual_information_is_zero_for_prompt_independent_answers() -> None:
    rng = np.random.default_rng(0)
    template = torch.from_numpy(np.tile(rng.normal(size=(4, 1)) - 20, (1, 4)))
    assert mutual_information(template) == {
        "policy/mutual_information": pytest.approx(0.0, abs=1e-12),
        "policy/prompt_recall": 0.0,  # ties are not recalled
    }
    named = torch.full((4, 4), -400.0).fill_diagonal_(-3.0)
    assert mutual_information(named) == {
        "policy/mutual_information": pytest.approx(math.log(4)),
        "policy/prompt_recall": 1.0,
    }
    with pytest.raises(ValueError, match="answer >= 2, prompt >= 2"):
        mutual_information(torch.zeros(1, 1))


def test_pairs_are_first_turns_of_prompts() -> None:
    def episode(ids: list[int], mask: list[int], turns: list[int]) -> Sample:
        own = make_trajectory(ids, mask)
        return Sample(
            trajectory=replace(own, turn_ids=np.array(turns, dtype=np.int32)), advantage=1
        )

    given = [
        episode([1, 2, 3, 4, 5], [0, 0, 1, 0, 1], [0, 0, 0, 1, 1]),
        episode([1, 2, 9, 9, 9], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0]),  # the same prompt
        episode([1, 2, 3, 4], [0, 0, 0, 1], [0, 0, 1, 1]),  # its first turn sampled nothing
        *(episode([n, 7, 8], [0, 1, 1], [0, 0, 0]) for n in range(20, 26)),
    ]
    pairs = [(p.tolist(), a.tolist()) for p, a in first_answers([s.trajectory for s in given])]
    assert pairs[:2] == [([1, 2], [3]), ([20], [7, 8])]
    assert len(pairs) == NUM_PROMPTS


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
def test_step_reports_mutual_information_of_the_previous_policy(layout: Layout) -> None:
    rng = np.random.default_rng(3)
    samples = [
        Sample(
            trajectory=make_trajectory(
                rng.integers(0, 50, size=4 + n).tolist(), [0] * (2 + n % 2) + [1] * (2 + n - n % 2)
            ),
            advantage=1.0,
        )
        for n in range(4)
    ]
    learner = LearnerSection(precision=Precision.FP32, layout=layout, lr=0.1, warmup_steps=0)
    settings = TrainerSettings(
        learner=learner, algorithm=AlgorithmSection(), num_steps=4, engine_dtype="float32"
    )
    trainer = Trainer(settings, Networks(policy=make_model()))
    pairs = first_answers([sample.trajectory for sample in samples])
    cross = [
        [sum(trainer.score([[*p.tolist(), *z.tolist()]])[0][len(p) - 1 :]) for p, _ in pairs]
        for _, z in pairs
    ]
    rows = np.array(cross)
    own = [rows[i, i] - math.log(np.exp(rows[i]).mean()) for i in range(4)]
    told = trainer.train_on(samples, version=0).metrics
    assert told["policy/mutual_information"] == pytest.approx(np.mean(own), abs=1e-5)
    assert told["policy/prompt_recall"] == np.mean([rows[i].argmax() == i for i in range(4)])
    later = trainer.train_on(
        samples, version=1
    ).metrics  # it is no small part of a step: now and then
    assert "policy/mutual_information" not in later
