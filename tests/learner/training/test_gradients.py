"""Laws of the gradient: it depends on sampled tokens only, and not on how a batch is cut up."""

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.config.algorithm import Advantage, Aggregation, AlgorithmSection, Correction, PolicyLoss
from common.config.learner import (
    Activations,
    Attention,
    ControllerSection,
    CriticKind,
    CriticSection,
    LearnerSection,
    Precision,
)
from learner.batch.batching import Sample
from learner.policy.forward import Networks
from learner.policy.model import Critic, make_critic, whole
from learner.training.ranks import Ranks
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_model_with_adapters, make_samples, with_prompts

QUIET = ControllerSection(scale_lr=False, tighten_gate=False, skip_step=False)
ALGORITHMS = {
    "grpo": AlgorithmSection(),
    "gspo by sequence": AlgorithmSection(
        policy_loss=PolicyLoss.GSPO, aggregation=Aggregation.SEQUENCE
    ),
    "ppo": AlgorithmSection(advantage=Advantage.PPO),
    "reference": AlgorithmSection(kl_coef=0.1, entropy_coef=0.01),
    "turns, trusted tokens": AlgorithmSection(
        policy_loss=PolicyLoss.TURN, correction=Correction.SECOND_MOMENT, m2_threshold=0.02
    ),
}

PARTS = {"all": slice(None), "few": slice(3)}  # a rank of four gets none of three
PAIRS = list(product(ALGORITHMS, PARTS))
ONE_EACH = [pair for i, pair in enumerate(PAIRS) if i % 4 in (0, 3)]  # Parts take turns.
RANKS = {4: False, 2: True}  # how many -> whether they train adapters
MAX_TOKENS = 40
CHUNK_TOKENS = 7  # Of the feed-forward parts of layers that recompute.
SEQUENCES = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
SPEEDS = {"perf/tokens_per_s_per_device", "perf/mfu", "perf/matrix_tflops"}


class Divided(NamedTuple):
    """A case of ranks that compute packed rows together."""

    algorithm: str
    has_adapters: bool = False
    shares_prefix: bool = True
    attention: Attention = Attention.PRODUCTS
    activations: Activations = Activations.KEEP
    critic: CriticKind = CriticKind.HEAD
    group_size: int = 2


# Cases by the number of ranks.
DIVIDED = {
    2: [
        Divided("gspo by sequence", has_adapters=True),
        Divided(
            "ppo", shares_prefix=False, attention=Attention.FUSED, activations=Activations.OFFLOAD
        ),
    ],
    4: [
        *(
            Divided(name, has_adapters, shares_prefix, attention)
            for name in ALGORITHMS
            for has_adapters in (False, True)
            for shares_prefix in (False, True)
            for attention in (Attention.PRODUCTS, Attention.FUSED)
        ),
        Divided("ppo", critic=CriticKind.MODEL, activations=Activations.OFFLOAD),
        Divided("reference", has_adapters=True, activations=Activations.RECOMPUTE),
        Divided("grpo", group_size=4),  # each of two kv heads serves two ranks
        Divided("ppo", group_size=4, shares_prefix=False, attention=Attention.FUSED),
    ],
}


def trainer_of(
    algorithm: AlgorithmSection,
    *,
    max_tokens: int = 10_000,
    ranks: Ranks | None = None,
    has_adapters: bool = False,
    critic: CriticKind = CriticKind.HEAD,
    **learner: Any,
) -> Trainer:
    """Return a trainer that makes plain steps of rate 1."""
    model = make_model_with_adapters() if has_adapters else make_model()
    value = None
    if algorithm.advantage is Advantage.PPO:
        value = make_critic(CriticSection(), model, policy_path="")
        if critic is CriticKind.MODEL:
            value = Critic(model.config.hidden_size, cast(Any, make_model(seed=2).model))
        value.head.weight.data.fill_(0.02)
    settings = TrainerSettings(
        learner=LearnerSection(
            warmup_steps=0,
            precision=Precision.FP32,
            max_grad_norm=1e9,
            max_tokens_per_microbatch=max_tokens,
            logprob_chunk_tokens=max_tokens,
            controller=QUIET,
            mlp_chunk_tokens=CHUNK_TOKENS,
            **learner,
        ),
        algorithm=algorithm,
        num_steps=10,
    )
    reference = make_model(seed=1) if algorithm.kl_coef and not has_adapters else None
    networks = Networks(
        policy=model,
        critic=value,
        reference=reference,
        is_base_reference=algorithm.kl_coef != 0 and has_adapters,
    )
    trainer = Trainer(settings, networks, ranks=ranks)
    trainer._updates.optimizer.optimizers[0] = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer._updates.optimizer._base_lrs = [[1.0]]
    return trainer


def weights_of(trainer: Trainer) -> torch.Tensor:
    return torch.cat([whole(p.detach()).flatten().clone() for p in trainer._model.parameters()])


def gradient_step(samples: list[Sample], algorithm: AlgorithmSection, **how: Any) -> torch.Tensor:
    """Return the change of the weights, flat, by one plain step of rate 1 on the gradient."""
    trainer = trainer_of(algorithm, **how)
    before = weights_of(trainer)
    trainer.train_on(samples, version=0)
    return weights_of(trainer) - before


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_gradient_does_not_depend_on_the_microbatch_size(name: str, has_adapters: bool) -> None:
    samples, algorithm = make_samples(), ALGORITHMS[name]
    whole = gradient_step(samples, algorithm, has_adapters=has_adapters)
    parts = gradient_step(samples, algorithm, max_tokens=13, has_adapters=has_adapters)
    assert whole.abs().max() > 1e-3
    assert (whole - parts).abs().max() < 1e-6


def test_gradient_does_not_depend_on_the_sample_order() -> None:
    samples = make_samples()
    whole = gradient_step(samples, AlgorithmSection())
    turned = gradient_step(samples[::-1], AlgorithmSection())
    assert (whole - turned).abs().max() < 1e-6


@pytest.mark.parametrize("activations", [Activations.RECOMPUTE, Activations.OFFLOAD])
@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("name", ["grpo", "ppo", "reference"])
def test_gradient_does_not_depend_on_stored_activations(
    name: str, has_adapters: bool, activations: Activations
) -> None:
    samples, algorithm = with_prompts(make_samples()), ALGORITHMS[name]
    how: dict[str, Any] = {"has_adapters": has_adapters, "critic": CriticKind.MODEL}
    whole = gradient_step(samples, algorithm, activations=Activations.KEEP, **how)
    again = gradient_step(samples, algorithm, activations=activations, **how)
    assert whole.abs().max() > 1e-3
    assert (whole - again).abs().max() < 1e-6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_masked_values_change_no_gradient(name: str) -> None:
    samples = make_samples()
    changed = copy.deepcopy(samples)
    for sample in changed:
        t = sample.trajectory
        t.logprobs[~t.loss_mask] = 7.0
        t.versions[~t.loss_mask] = 5
        t.turn_ids[~t.loss_mask] = 99
    padded = [replace(s, trajectory=_with_trailing_observation(s.trajectory)) for s in changed]
    same = gradient_step(samples, ALGORITHMS[name])
    assert gradient_step(changed, ALGORITHMS[name]).equal(same)
    longer = gradient_step(padded, ALGORITHMS[name])
    assert (longer - same).abs().max() < 1e-6


def _with_trailing_observation(t):
    """Append three observation tokens after the last action."""
    more = {"token_ids": [3, 4, 5], "loss_mask": [False] * 3, "logprobs": [0.0] * 3}
    more |= {"versions": [-1] * 3, "turn_ids": [0] * 3}
    grown = {
        name: np.concatenate([getattr(t, name), np.array(tail, dtype=getattr(t, name).dtype)])
        for name, tail in more.items()
    }
    return replace(t, **grown)


class Together(NamedTuple):
    """The files of ranks that have computed all cases together."""

    size: int
    pairs: list[tuple[str, str]]
    folder: Path


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, ONE_EACH), id="2"),
        pytest.param((2, PAIRS), id="2 with all pairs", marks=pytest.mark.long),
        pytest.param((4, PAIRS), id="4", marks=pytest.mark.long),
    ],
)
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Together:
    """Start one group of ranks for all laws: each process takes seconds to import its packages."""
    size, pairs = request.param
    folder = tmp_path_factory.mktemp(f"ranks-{size}")
    others = cast(Any, mp).spawn(_be_other, args=(folder, size, pairs), nprocs=size - 1, join=False)
    _be_rank(0, folder, size, pairs)
    while not others.join():
        pass
    return Together(size, pairs, folder)


@pytest.mark.slow
def test_ranks_make_together_the_gradient_of_one(together: Together) -> None:
    """Uneven batches: blocks of at most two samples, and more ranks than the last one has."""
    size, pairs, folder = together
    has_adapters = RANKS[size]
    for name, part in pairs:
        samples = make_samples()[PARTS[part]]
        alone = gradient_step(samples, ALGORITHMS[name], has_adapters=has_adapters)
        assert alone.abs().max() > 1e-3
        for rank in range(size):
            change = torch.load(folder / f"{name}.{part}.{rank}.pt")
            assert (change - alone).abs().max() < 1e-6 * max(1.0, float(alone.abs().max()))


@pytest.mark.slow
def test_ranks_of_one_row_make_the_gradient_of_one(together: Together) -> None:
    """Rows of up to 80 positions hold several sequences, whose tokens are on different ranks."""
    for number, case in enumerate(DIVIDED[together.size]):
        trainer = trainer_of(ALGORITHMS[case.algorithm], **_how(case))
        change, metrics, scores = _divided_step(trainer)
        assert change.abs().max() > 1e-3
        for rank in range(together.size):
            state = torch.load(together.folder / f"divided.{number}.{rank}.pt")
            limit = 1e-5 * max(1.0, float(change.abs().max()))
            assert (state[0] - change).abs().max() < limit, case
            assert state[1].keys() == metrics.keys()
            for name in metrics.keys() - {"train/step_s", "train/tokens_per_s", *SPEEDS}:
                expected = pytest.approx(metrics[name], rel=1e-4, abs=1e-5)
                assert state[1][name] == expected, (case, name)
            assert state[2] == [pytest.approx(each, abs=1e-5) for each in scores]


def _divided_step(trainer: Trainer) -> tuple[torch.Tensor, dict[str, float], list[list[float]]]:
    """Return the change of the weights by a step, its metrics, and scores before it."""
    scores = trainer.score(SEQUENCES)
    before = weights_of(trainer)
    metrics = trainer.train_on(with_prompts(make_samples()), version=0).metrics
    return weights_of(trainer) - before, metrics, scores


def _how(case: Divided) -> dict[str, Any]:
    return {
        "has_adapters": case.has_adapters,
        "shared_prefix": case.shares_prefix,
        "attention": case.attention,
        "activations": case.activations,
        "critic": case.critic,
    }


def _be_other(index: int, folder: Path, size: int, pairs: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    _be_rank(index + 1, folder, size, pairs)


def _be_rank(rank: int, folder: Path, size: int, pairs: list[tuple[str, str]]) -> None:
    has_adapters = RANKS[size]
    store = cast(Any, dist).FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    mesh = cast(Any, dist).init_device_mesh("cpu", (size,))
    ranks = Ranks(mesh)
    for name, part in pairs:
        samples, algorithm = make_samples()[PARTS[part]], ALGORITHMS[name]
        change = gradient_step(
            samples, algorithm, ranks=ranks, max_tokens=MAX_TOKENS, has_adapters=has_adapters
        )
        torch.save(change, f"{folder}/{name}.{part}.{rank}.pt")
    for number, case in enumerate(DIVIDED[size]):
        group, _ = dist.new_subgroups(case.group_size)
        assert isinstance(group, dist.ProcessGroup)
        how: dict[str, Any] = _how(case) | {"num_ranks": size, "sequence_ranks": case.group_size}
        how |= {"ranks": Ranks(mesh, sequence_group=group), "max_tokens": MAX_TOKENS}
        trainer = trainer_of(ALGORITHMS[case.algorithm], **how)
        torch.save(_divided_step(trainer), f"{folder}/divided.{number}.{rank}.pt")
    dist.destroy_process_group()
