"""Laws of trees: loss, gradient and metrics are those of rows that share nothing."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    PolicyLoss,
    Proximal,
)
from common.config.learner import Attention, CriticKind, CriticSection, Layout, LearnerSection
from common.wire.messages import EndReason
from learner.batch.batching import Sample
from learner.policy.forward import Networks
from learner.policy.model import Critic, whole
from learner.training.ranks import Ranks
from learner.training.step import Gradients, ScoredBatch, TrainerSettings
from tests.learner.builders import (
    VOCAB,
    make_model,
    make_model_with_adapters,
    make_trajectory,
    recompute,
)
from tests.learner.training.test_teacher import SAMPLED, TOPK, taught_by

LIMIT = 1e-5
MAX_LENGTH = 60
COMPUTED = "train/num_computed_tokens"
PPO = AlgorithmSection(advantage=Advantage.PPO)


class Case(NamedTuple):
    """An objective, and the networks that it trains."""

    algorithm: AlgorithmSection
    has_adapters: bool = False
    critic: CriticKind | None = None
    window: int | None = None
    is_checkpointed: bool = False


CASES = {
    **{loss.value: Case(AlgorithmSection(policy_loss=loss)) for loss in PolicyLoss},
    **{
        f"correction {kind.value}": Case(
            AlgorithmSection(correction=kind, aggregation=Aggregation.SEQUENCE, drift_coef=0.1)
        )
        for kind in Correction
    },
    "adapters, base as reference": Case(AlgorithmSection(kl_coef=0.1), has_adapters=True),
    "reference, entropy": Case(
        AlgorithmSection(kl_coef=0.1, entropy_coef=0.01, aggregation=Aggregation.CONSTANT)
    ),
    "window": Case(AlgorithmSection(entropy_coef=0.01), window=5),
    "critic's head": Case(PPO, critic=CriticKind.HEAD, window=9),
    "critic's trunk": Case(PPO, critic=CriticKind.MODEL, is_checkpointed=True),
    "recomputed": Case(
        AlgorithmSection(proximal=Proximal.RECOMPUTED, negative_mask_delta=0.01),
        has_adapters=True,
        is_checkpointed=True,
    ),
    "teacher": Case(AlgorithmSection(teacher=SAMPLED)),
    "teacher's top": Case(AlgorithmSection(teacher=TOPK), has_adapters=True),
}
QUICK = {"gspo", "turn", "correction second_moment", "window", "critic's head", "teacher's top"}
QUICK |= {"adapters, base as reference"}


def random_paths(rng: np.random.Generator, num: int, root: list[int]) -> list[list[int]]:
    """Return rows of a tree: branches anywhere after the root, rows within others, equal rows."""
    paths = [[*root, *rng.integers(0, VOCAB, 12).tolist()]]
    while len(paths) < num:
        start = paths[rng.integers(len(paths))]
        kept = start[: rng.integers(len(root), len(start) + 1)]
        tail = rng.integers(0, VOCAB, rng.integers(0, 14)).tolist()
        paths.append([*kept, *tail][:MAX_LENGTH])
    return paths


def random_samples(seed: int, *, num_groups: int = 2, num_rows: int = 7) -> list[Sample]:
    """Return episodes of one to three rows. The groups' prompts begin with the same tokens."""
    rng = np.random.default_rng(seed)
    system = rng.integers(0, VOCAB, 9).tolist()
    samples: list[Sample] = []
    for group in range(num_groups):
        root = [*system, *rng.integers(0, VOCAB, 3).tolist()]
        rows: list[Sample] = []
        for path in random_paths(rng, num_rows, root):
            mask = rng.integers(0, 2, len(path))
            mask[0], mask[-1] = 0, 1
            turns = np.cumsum(rng.integers(0, 2, len(path))) // 4
            trajectory = make_trajectory(
                path,
                mask.tolist(),
                logprobs=(-3.9 + 0.2 * rng.standard_normal(mask.sum())).tolist(),
                group_id=f"g{group}",
                member=len(rows),
                version=int(rng.integers(0, 2)),
                turn_ids=turns.astype(np.int32),
                num_turns=int(turns.max()) + 1,
            )
            rows.append(Sample(trajectory=trajectory, advantage=float(rng.standard_normal())))
        rng.shuffle(cast(Any, rows))
        while rows:
            episode = [rows.pop() for _ in range(min(len(rows), int(rng.integers(1, 4))))]
            total = sum(row.num_sampled_tokens for row in episode)
            samples += [
                replace(row, row=number, num_episode_tokens=total)
                for number, row in enumerate(episode)
            ]
    return samples


def ended(samples: list[Sample], seed: int) -> list[Sample]:
    """Return episodes that are cut short, with a prompt after their last turn as a row."""
    rng = np.random.default_rng(seed)
    rows: list[Sample] = []
    for number, sample in enumerate(samples):
        trajectory = replace(sample.trajectory, end_reason=EndReason.HORIZON)
        end = None
        if number + 1 == len(samples) or samples[number + 1].row == 0:
            ids = [*trajectory.token_ids[:9].tolist(), *rng.integers(0, VOCAB, 20).tolist()]
            end = make_trajectory(ids, [0] * len(ids), group_id=trajectory.group_id)
        rows.append(replace(sample, trajectory=trajectory, end=end))
    return rows


def networks_of(case: Case) -> Networks:
    """Return small networks of random weights."""
    policy = make_model_with_adapters() if case.has_adapters else make_model()
    if case.window is not None:
        policy = windowed_model(case.window)
    trunk: Any = make_model(seed=2).model if case.critic is CriticKind.MODEL else None
    critic = None if case.critic is None else Critic(policy.config.hidden_size, trunk)
    if critic is not None:
        torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(3))
    has_reference = case.algorithm.kl_coef > 0
    for network in [policy, *([] if trunk is None else [trunk])]:
        for weight in network.parameters():
            weight.data.mul_(0.5)
        if case.is_checkpointed:
            recompute(network)
    return Networks(
        policy=policy,
        critic=critic,
        reference=make_model(seed=1) if has_reference and not case.has_adapters else None,
        is_base_reference=has_reference and case.has_adapters,
    )


def windowed_model(window: int) -> Any:
    """Return the small network with a window in its first layer."""
    config = copy.deepcopy(make_model().config)
    config.layer_types = ["sliding_attention", "full_attention"]
    config.use_sliding_window, config.sliding_window = True, window
    torch.manual_seed(0)
    return type(make_model())(config).train()


class Outcome(NamedTuple):
    """The results of one pass over a batch."""

    batch: ScoredBatch
    sums: dict[str, float]
    logprobs: dict[int, torch.Tensor]
    gradient: torch.Tensor


def computed(
    case: Case, samples: list[Sample], *, ranks: Ranks | None = None, **learner: Any
) -> Outcome:
    """Return the results of a pass, with the gradient of all networks as one vector."""
    networks = networks_of(case)
    section = LearnerSection(
        precision=cast(Any, "fp32"),
        layout=Layout.PACKED,
        critic=CriticSection(whiten=False),
        **learner,
    )
    settings = TrainerSettings(learner=section, algorithm=case.algorithm, num_steps=10)
    gradients = Gradients(settings, networks, ranks or Ranks())
    batch = gradients.prepare(samples, version=1)
    found = gradients.accumulate(batch, range(len(samples)))
    modules = [networks.policy] + ([] if networks.critic is None else [networks.critic])
    gradients = [p.grad for m in modules for p in m.parameters() if p.grad is not None]
    parts = [whole(gradient).flatten() for gradient in gradients]
    return Outcome(batch, found.sums, found.logprobs, torch.cat(parts))


def check_equal(found: Outcome, expected: Outcome) -> None:
    """Compare all results but the number of computed tokens."""
    assert expected.gradient.norm() > 1e-3
    assert (found.gradient - expected.gradient).norm() < LIMIT * expected.gradient.norm()
    for name, value in expected.sums.items():
        if name != COMPUTED:
            assert found.sums[name] == pytest.approx(value, rel=LIMIT, abs=LIMIT), name
    for ours, theirs in (
        (found.logprobs, expected.logprobs),
        (found.batch.before, expected.batch.before),
        (found.batch.reference, expected.batch.reference),
    ):
        assert ours.keys() == theirs.keys()
        for index, values in theirs.items():
            torch.testing.assert_close(ours[index], values, atol=LIMIT, rtol=LIMIT)
    for ours, theirs in zip(found.batch.samples, expected.batch.samples, strict=True):
        assert (ours.value_targets is None) == (theirs.value_targets is None)
        if ours.value_targets is not None and theirs.value_targets is not None:
            np.testing.assert_allclose(ours.value_targets, theirs.value_targets, atol=LIMIT)


def num_beginnings(samples: list[Sample]) -> int:
    """Return the number of distinct beginnings of rows."""
    ids = [sample.trajectory.token_ids.tolist() for sample in samples]
    return len({tuple(each[: n + 1]) for each in ids for n in range(len(each))})


@pytest.mark.parametrize("attention", [Attention.PRODUCTS, Attention.FUSED])
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def test_trees_have_the_loss_and_gradient_of_separate_rows(name: str, attention: Attention) -> None:
    case = CASES[name]
    samples = random_samples(len(name))
    if case.algorithm.teacher.is_on:
        samples = taught_by(make_model(seed=9), samples, case.algorithm.teacher)
    apart = computed(case, samples, shared_prefix=False, attention=attention)
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    assert apart.sums[COMPUTED] == num_tokens
    for max_tokens in (10_000, 50):
        how: dict[str, Any] = {"max_tokens_per_microbatch": max_tokens, "attention": attention}
        result = computed(case, samples, shared_prefix=True, **how)
        check_equal(result, apart)
        if max_tokens == 10_000:
            assert result.sums[COMPUTED] == num_beginnings(samples) < 0.7 * num_tokens
        else:
            assert num_beginnings(samples) < result.sums[COMPUTED] < num_tokens


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let two ranks compute all cases of `RANKED`."""
    folder = tmp_path_factory.mktemp("ranks")
    cast(Any, mp).spawn(_be_rank, args=(folder,), nprocs=2)
    return folder


RANKED = {name: CASES[name] for name in ("gspo", "window", "adapters, base as reference")}
RANKED |= {"critic": Case(PPO, critic=CriticKind.HEAD)}
RANKED |= {"critic, reference": Case(replace(PPO, kl_coef=0.1), critic=CriticKind.HEAD)}


def ranked_samples(case: Case) -> list[Sample]:
    """Return the episodes of a case; those of a critic have ends."""
    samples = random_samples(7)
    return samples if case.critic is None else ended(samples, 7)


def _be_rank(rank: int, folder: Path) -> None:
    """Compute each case with divided rows, and with trees that are dealt to two shares."""
    torch.set_num_threads(1)
    store = cast(Any, dist).FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = cast(Any, dist).init_device_mesh("cpu", (2,))
    group, _ = dist.new_subgroups(2)
    assert isinstance(group, dist.ProcessGroup)
    ways = {
        "rows": (Ranks(mesh, sequence_group=group), {"num_ranks": 2, "sequence_ranks": 2}),
        "shares": (Ranks(mesh), {"num_ranks": 2}),
    }
    for name, case in RANKED.items():
        for way, (ranks, learner) in ways.items():
            how: dict[str, Any] = {"max_tokens_per_microbatch": 60, **learner}
            result = computed(case, ranked_samples(case), ranks=ranks, **how)
            places = (set(result.batch.before), set(result.logprobs))
            torch.save((result.sums, result.gradient, places), f"{folder}/{name}.{way}.{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["rows", "shares"])
def test_ranks_have_the_loss_and_gradient_of_separate_rows(divided: Path, way: str) -> None:
    for name, case in RANKED.items():
        samples = ranked_samples(case)
        apart = computed(case, samples, shared_prefix=False)
        for rank in range(2):
            sums, gradient, (before, now) = torch.load(divided / f"{name}.{way}.{rank}.pt")
            assert not before or before == now  # A rank scores the same rows in all passes.
            assert (gradient - apart.gradient).norm() < LIMIT * apart.gradient.norm(), name
            for metric, value in apart.sums.items():
                if metric == COMPUTED:
                    assert num_beginnings(samples) <= sums[metric] < value
                else:
                    assert sums[metric] == pytest.approx(value, rel=1e-4, abs=LIMIT), metric
