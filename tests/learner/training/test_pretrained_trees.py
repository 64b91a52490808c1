"""Laws of prefix trees with a pretrained model and the conversations of its chat template."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actor.formats.renderer import Renderer
from actor.rollout.context import Turn
from common.config.actor import AgentOptions, KeepThinking
from common.config.algorithm import AlgorithmSection
from common.config.learner import Layout, LearnerSection
from common.wire.messages import Trajectory
from learner.batch.batching import rows_of
from learner.ingest.buffer import Group
from learner.objective.advantages import samples_of
from learner.policy.forward import Networks
from learner.training.ranks import Ranks
from learner.training.step import Gradients, TrainerSettings
from tests.actor.rollout.playing import LEASE, Count, go_on, play
from tests.pretrained import make_smollm2

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

LIMIT = 1e-5
COMPUTED = "train/num_computed_tokens"
NUM_TURNS = 6
OPTIONS = AgentOptions(keep_thinking=KeepThinking.LAST)
WORDS = ("look", "at", "the", "old", "red", "door", "and", "then", "walk", "north", "again")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_smollm2(tmp_path_factory.mktemp("smollm2"))


def answers_of(rng: random.Random) -> list[str]:
    """Return the answers of an episode."""
    texts = [" ".join(rng.choices(WORDS, k=8)) for _ in range(NUM_TURNS)]
    return [f"<think>\n{text} {text} {text}\n</think>\n\n{text}" for text in texts]


def episode_of(renderer: Renderer, member: int) -> Trajectory:
    """Return an episode of a group."""
    rng = random.Random(member)
    turns: list[Turn] = []
    for text in answers_of(rng):
        ids = [*renderer.completion(text), renderer.end_of_turn_ids[0]]
        turns.append(Turn(ids, [-2.0 - rng.random() for _ in ids], [0] * len(ids)))
    answers: list[Any] = [go_on()] * (NUM_TURNS - 1) + [go_on(done=True, reward=float(member))]
    session = Count(answers)
    return play(
        session,
        lease=replace(
            LEASE, member=member, episode_id=f"{LEASE.group_id}/{member}", horizon=NUM_TURNS
        ),
        turns=turns,
        render=renderer,
        instruction="You walk through a house. Answer with one action.",
        max_tokens=2_000,
        turn_tokens=120,
        options=OPTIONS,
    )


def computed(
    model: Any, groups: list[Group], *, shared_prefix: bool
) -> tuple[dict[str, float], torch.Tensor]:
    """Return the sums of a pass over a batch, and its gradient as one vector."""
    learner = LearnerSection(
        precision=cast(Any, "fp32"),
        layout=Layout.PACKED,
        shared_prefix=shared_prefix,
        max_tokens_per_microbatch=8_192,
    )
    algorithm = AlgorithmSection()
    settings = TrainerSettings(learner=learner, algorithm=algorithm, num_steps=10)
    gradients = Gradients(settings, Networks(policy=model), Ranks())
    samples = rows_of(samples_of(groups, algorithm))
    batch = gradients.prepare(samples, version=1)
    result = gradients.accumulate(batch, range(len(samples)))
    vector = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return result.sums, vector


def test_pretrained_trees_have_the_gradient_of_separate_rows(smollm2: Path) -> None:
    renderer = Renderer(AutoTokenizer.from_pretrained(smollm2, local_files_only=True))
    members = [episode_of(renderer, member) for member in range(2)]
    assert min(len(member.segment_starts) for member in members) > 2
    groups = [Group(group_id=LEASE.group_id, members=members)]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).train()
    apart, expected = computed(model, groups, shared_prefix=False)
    shared, gradient = computed(model, groups, shared_prefix=True)
    assert shared[COMPUTED] < 0.7 * apart[COMPUTED]
    assert expected.norm() > 1e-3
    assert (gradient - expected).norm() < LIMIT * expected.norm()
    for metric, value in apart.items():
        if metric != COMPUTED:
            assert shared[metric] == pytest.approx(value, rel=LIMIT, abs=LIMIT), metric
