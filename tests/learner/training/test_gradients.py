"""Laws of the gradient: it depends on sampled tokens only, and not on how a batch is cut up."""

import copy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.config.compute import CriticSection, Precision
from common.config.learning import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    ControllerSection,
    Correction,
    LearnerSection,
    PolicyLoss,
)
from learner.batch.batching import Sample
from learner.policy.critic import make_critic
from learner.policy.forward import Networks
from learner.policy.model import whole
from learner.training.ranks import Ranks
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_model_with_adapters, make_samples

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


def gradient_step(
    samples: list[Sample],
    algorithm: AlgorithmSection,
    *,
    max_tokens: int = 10_000,
    ranks: Ranks | None = None,
    checkpointing: bool = False,
    has_adapters: bool = False,
) -> torch.Tensor:
    """Return the weights after one plain step of rate 1 on the gradient, flat: their change."""
    model = make_model_with_adapters() if has_adapters else make_model()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic = None
    if algorithm.advantage is Advantage.PPO:
        critic = make_critic(CriticSection(), model, policy_path="")
        critic.head.weight.data.fill_(0.02)
    settings = TrainerSettings(
        learner=LearnerSection(
            warmup_steps=0,
            precision=Precision.FP32,
            max_grad_norm=1e9,
            max_tokens_per_microbatch=max_tokens,
            logprob_chunk_tokens=max_tokens,
            controller=QUIET,
        ),
        algorithm=algorithm,
        num_steps=10,
    )
    reference = make_model(seed=1) if algorithm.kl_coef and not has_adapters else None
    networks = Networks(
        policy=model,
        critic=critic,
        reference=reference,
        is_base_reference=algorithm.kl_coef != 0 and has_adapters,
    )
    trainer = Trainer(settings, networks, ranks=ranks)
    trainer._optimizer.optimizers[0] = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer._optimizer._base_lrs = [[1.0]]
    before = torch.cat([whole(p.detach()).flatten().clone() for p in model.parameters()])
    trainer.train_on(samples, version=0)
    after = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
    return after - before


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


@pytest.mark.parametrize("has_adapters", [False, True])
def test_activation_checkpointing_changes_no_gradient(has_adapters: bool) -> None:
    samples, algorithm = make_samples(), AlgorithmSection()
    whole = gradient_step(samples, algorithm, has_adapters=has_adapters)
    again = gradient_step(samples, algorithm, checkpointing=True, has_adapters=has_adapters)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "pairs"),
    [
        pytest.param(2, ONE_EACH, id="2"),
        pytest.param(2, PAIRS, id="2 with all pairs", marks=pytest.mark.long),
        pytest.param(4, PAIRS, id="4", marks=pytest.mark.long),
    ],
)
def test_ranks_make_together_the_gradient_of_one(
    tmp_path: Path, size: int, pairs: list[tuple[str, str]]
) -> None:
    """Uneven batches: blocks of at most two samples, and more ranks than the last one has."""
    others = cast(Any, mp).spawn(
        _be_other, args=(tmp_path, size, pairs), nprocs=size - 1, join=False
    )
    _be_rank(0, tmp_path, size, pairs)
    while not others.join():
        pass
    has_adapters = RANKS[size]
    for name, part in pairs:
        samples = make_samples()[PARTS[part]]
        alone = gradient_step(samples, ALGORITHMS[name], has_adapters=has_adapters)
        assert alone.abs().max() > 1e-3
        for rank in range(size):
            together = torch.load(tmp_path / f"{size}.{name}.{part}.{rank}.pt")
            assert (together - alone).abs().max() < 1e-6 * max(1.0, float(alone.abs().max()))


def _be_other(index: int, folder: Path, size: int, pairs: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    _be_rank(index + 1, folder, size, pairs)


def _be_rank(rank: int, folder: Path, size: int, pairs: list[tuple[str, str]]) -> None:
    has_adapters = RANKS[size]
    store = cast(Any, dist).FileStore(f"{folder}/store-{size}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks(cast(Any, dist).init_device_mesh("cpu", (size,)))
    for name, part in pairs:
        samples, algorithm = make_samples()[PARTS[part]], ALGORITHMS[name]
        change = gradient_step(
            samples, algorithm, ranks=ranks, max_tokens=MAX_TOKENS, has_adapters=has_adapters
        )
        torch.save(change, f"{folder}/{size}.{name}.{part}.{rank}.pt")
    dist.destroy_process_group()
