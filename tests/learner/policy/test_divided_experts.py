"""Laws of experts that ranks divide: tokens travel, and everything is as on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from common.config.algorithm import AlgorithmSection
from common.config.learner import (
    Activations,
    ControllerSection,
    LearnerSection,
    LoraSection,
    Moments,
    OptimizerKind,
    Precision,
)
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from learner.batch.batching import Sample
from learner.policy.expert_ranks import ExpertRanks
from learner.policy.model import whole
from learner.training.build import load_start, make_trainer
from learner.training.rank_processes import expert_mesh
from learner.training.ranks import Ranks
from learner.training.trainer import Trainer
from tests.learner.builders import make_trajectory, tensors_of
from tests.learner.experts import make_experts, save_experts
from tests.learner.policy.test_loading import CPU

NUM_STEPS = 3
LENGTHS = (40, 9, 31, 22, 14, 27)
ATTENTION = LoraSection(rank=4, targets=["q_proj", "o_proj"])
EXPERTS = LoraSection(rank=4, targets=["q_proj", "experts"])
BF16 = {"precision": Precision.BF16}
FP16 = {"precision": Precision.FP16}
RECOMPUTED = {"activations": Activations.RECOMPUTE, "mlp_chunk_tokens": 8}
ROWS = {"sequence_ranks": 2, "max_tokens_per_microbatch": 256}  # The auxiliary loss is by block.


# Two of eight experts for each of four tokens, of which four ranks have two each.
CHOICES = [[0, 1], [1, 4], [2, 7], [5, 6]]
GATES = [[0.5, 0.5], [0.25, 0.75], [1.0, 0.5], [0.3, 0.7]]
# Tokens of each rank that others receive, by the number of ranks.
NUM_SENT = {2: [3, 3], 4: [5, 6, 5, 5]}


@dataclass(frozen=True)
class Case:
    """A network and settings that several ranks and one rank train alike."""

    kind: str
    expert_ranks: int = 2
    replay: str = ""  # "random": recorded experts; "few": all tokens choose the same two.
    aux: float = 0.0
    learner: dict[str, Any] = field(default_factory=dict)
    is_saved: bool = False  # Also publish, save and resume.

    @property
    def is_16_bit(self) -> bool:
        return "precision" in self.learner


# Cases by the number of ranks.
CASES = {
    2: {
        "replay": Case("qwen3_moe", replay="random"),
        "recomputed": Case("mixtral", learner=RECOMPUTED),
        "biases": Case("gpt_oss", is_saved=True),
        "recomputed without chunks": Case("gpt_oss", learner=RECOMPUTED),  # GptOssMLP has experts.
        "shared expert": Case("deepseek_v3"),
        "idle experts": Case("qwen3_moe", replay="few"),
        "divided rows": Case("qwen3_moe", aux=0.1, learner=ROWS),
        "bf16": Case("gpt_oss", replay="random", learner=BF16, is_saved=True),
        "fp16": Case("gpt_oss", replay="random", learner=FP16, is_saved=True),
        "adapted experts in bf16": Case(
            "qwen3_moe", replay="random", learner=BF16 | {"lora": EXPERTS}, is_saved=True
        ),
        "8-bit moments": Case("qwen3_moe", learner={"moments": Moments.INT8}),
        "muon": Case("mixtral", learner={"optimizer": OptimizerKind.MUON, "muon_lr": 1e-3}),
        "adapters": Case("qwen3_moe", learner={"lora": ATTENTION}),
        "adapted experts": Case("qwen3_moe", learner={"lora": EXPERTS}, is_saved=True),
        "adapted, [in, out]": Case("gpt_oss", learner={"lora": EXPERTS}),
    },
    4: {
        "four": Case("qwen3_moe", 4),
        "copies": Case("gpt_oss", 2, replay="random", is_saved=True),
        "idle experts, recomputed": Case("mixtral", 4, replay="few", learner=RECOMPUTED),
        "adapted copies": Case("mixtral", 2, learner={"lora": EXPERTS}, is_saved=True),
        "copies of rows": Case("deepseek_v3", 2, learner={"sequence_ranks": 2}),
    },
}


def config_of(case: Case, path: Path, size: int, **algorithm: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "device": "cpu",
        "precision": Precision.FP32,
        "lr": 1e-3,
        "warmup_steps": 0,
        "max_tokens_per_microbatch": 64,
        "controller": ControllerSection(scale_lr=False, skip_step=False),
    }
    settings |= case.learner
    if size == 1:
        settings["sequence_ranks"] = 1
    return RunConfig(
        model=ModelSection(path=str(path), dtype="float32"),
        learner=LearnerSection(
            num_ranks=size, expert_ranks=case.expert_ranks if size > 1 else 1, **settings
        ),
        algorithm=AlgorithmSection(
            routing_replay=bool(case.replay), router_aux_coef=case.aux, **algorithm
        ),
    )


def samples_of(case: Case, trainer: Trainer) -> list[Sample]:
    draw = np.random.default_rng(3)
    samples = []
    for number, length in enumerate(LENGTHS):
        ids = draw.integers(3, 320, length)
        recorded: dict[str, Any] = {}
        if trainer.routing is not None:
            sizes = trainer.routing
            shape = (length, sizes.num_layers, sizes.num_experts)
            order = np.argsort(draw.random(shape), axis=-1)[..., : sizes.num_chosen]
            if case.replay == "few":
                order = np.broadcast_to(np.arange(sizes.num_chosen), order.shape)
            recorded["expert_ids"] = np.ascontiguousarray(order.astype(np.uint8))
            recorded["expert_mask"] = np.ones(length, dtype=bool)
        mask = [0, 0, 0, *[1] * (length - 3)]
        trajectory = make_trajectory(
            ids.tolist(),
            mask,
            logprobs=[-5.7] * sum(mask),
            group_id=f"g{number // 2}",
            member=number % 2,
            **recorded,
        )
        samples.append(Sample(trajectory=trajectory, advantage=1.0 - 2.0 * (number % 2)))
    return samples


@dataclass
class Life:
    """A short training, as one rank sees it."""

    gradient: dict[str, Tensor]  # Of the first update, whole.
    weights: dict[str, Tensor]  # After the last one, whole.
    metrics: list[dict[str, float]]
    scores: list[list[float]]
    # With `Case.is_saved`, on rank 0: what engines receive, and the checkpoint's other values.
    published: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)  # Metrics of the step after it.


def published(trainer: Trainer, ranks: Ranks) -> dict[str, Tensor]:
    """Return the version as rank 0 gathers it, {} on the other ranks, which serve its parts."""
    request: list[Any] = [None]
    if ranks.index == 0:

        def ask(part: bytes) -> None:
            dist.broadcast_object_list([part])

        tensors = tensors_of(trainer.live_weights(ask=ask))
        dist.broadcast_object_list([None])
        return tensors
    source = trainer.live_weights()
    while True:
        dist.broadcast_object_list(request)
        if request[0] is None:
            return {}
        source.serve(request[0])


def lived(
    case: Case, path: Path, size: int, ranks: Ranks | None = None, saved: Path | None = None
) -> Life:
    """Train some steps; with `saved`, publish, save there, and train one step more."""
    cfg = config_of(case, path, size)
    torch.manual_seed(0)
    model, _ = load_start(cfg, None, CPU)
    gradient: dict[str, Tensor] = {}

    def note() -> None:
        if not gradient:
            for name, each in model.named_parameters():
                if each.grad is not None:
                    gradient[name] = whole(each.grad).clone()

    trainer, _ = make_trainer(cfg, model, None, ranks=ranks, before_update=note)
    samples = samples_of(case, trainer)
    metrics = [trainer.train_on(samples, version=each).metrics for each in range(NUM_STEPS)]
    weights = {
        name: whole(each.detach()).clone()
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    scores = trainer.score([[5, 9, 17, 30, 41], [8, 77, 120]])
    life = Life(gradient, weights, metrics, scores)
    if saved is not None and ranks is not None:
        life.published = published(trainer, ranks)
        trainer.save(saved).result(60)
        life.values = trainer.values()
        life.after = trainer.train_on(samples, version=NUM_STEPS).metrics
    return life


def _be_other(index: int, folder: Path, size: int) -> None:
    _be_rank(index + 1, folder, size)


def _be_rank(rank: int, folder: Path, size: int) -> None:
    torch.set_num_threads(1)
    store = cast(Any, dist).FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        mesh = cast(Any, dist).init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        torch.save(exchanged(size), folder / f"exchanged.{rank}.pt")
        for name, case in CASES[size].items():
            rows = None
            if (width := case.learner.get("sequence_ranks", 1)) > 1:
                rows, _ = cast(Any, dist).new_subgroups(width)
            experts = expert_mesh(size, case.expert_ranks, "cpu")
            ranks = Ranks(
                mesh,
                sequence_group=rows,
                expert_mesh=experts,
                publish_group=cast(Any, dist.new_group()),
            )
            saved = folder / f"{name}.state" if case.is_saved else None
            life = lived(case, folder / case.kind, size, ranks, saved)
            torch.save(life, folder / f"{name}.{rank}.pt")
            if case.is_16_bit and "lora" not in case.learner:
                gathered = replace(case, expert_ranks=1)
                life = lived(gathered, folder / case.kind, size, Ranks(mesh))
                torch.save(life, folder / f"{name}.gathered.{rank}.pt")
    finally:
        dist.destroy_process_group()


def exchanged(size: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return the states and outputs of this rank's tokens, and the counts of their exchange."""
    module = make_experts("qwen3_moe").model.layers[0].mlp.experts
    mesh = expert_mesh(size, size, "cpu")
    assert mesh is not None
    ranks = ExpertRanks(mesh, dtype=torch.float32)
    ranks.divide(torch.nn.ModuleList([module]), ())
    states = torch.randn(len(CHOICES), 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    with torch.no_grad():
        outputs = module(states, torch.tensor(CHOICES), torch.tensor(GATES))
    return states, outputs, ranks.take_counts()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.long)])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start one group of ranks for all cases: each process takes seconds to import packages."""
    size = request.param
    folder = tmp_path_factory.mktemp(f"experts-{size}")
    for kind in {case.kind for case in CASES[size].values()}:
        save_experts(folder / kind, kind)
    others = cast(Any, mp).spawn(_be_other, args=(folder, size), nprocs=size - 1, join=False)
    _be_rank(0, folder, size)
    while not others.join():
        pass
    return size, folder


def lives(together: tuple[int, Path]) -> Iterator[tuple[str, Life, Life]]:
    """Yield the name of a case in fp32, and its lives: alone, and as each of the ranks saw it."""
    size, folder = together
    exact = {name: case for name, case in CASES[size].items() if not case.is_16_bit}
    for name, case in exact.items():
        alone = lived(case, folder / case.kind, 1)
        for rank in range(size):
            life = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
            yield name, alone, life


@pytest.mark.slow
def test_ranks_with_divided_experts_train_as_one(together: tuple[int, Path]) -> None:
    for name, alone, both in lives(together):
        assert alone.gradient.keys() == both.gradient.keys(), name
        largest = max(float(each.abs().max()) for each in alone.gradient.values())
        for key, each in alone.gradient.items():
            gap = float((each - both.gradient[key]).abs().max())
            assert gap < 1e-5 * max(1.0, largest), (name, key, gap, largest)
        for was, now in zip(alone.metrics, both.metrics, strict=True):
            for key in was:
                if key.startswith(("policy/", "train/grad_norm", "offpolicy/", "routing/ba")):
                    assert now[key] == pytest.approx(was[key], rel=1e-3, abs=1e-5), (name, key)
        for was, now in zip(alone.scores, both.scores, strict=True):
            assert now == pytest.approx(was, abs=2e-3), name


@pytest.mark.slow
def test_divided_experts_in_16_bits_train_as_gathered_ones(together: tuple[int, Path]) -> None:
    """One rank computes under autocast, which rounds at other places than shards in 16 bits."""
    size, folder = together
    for name in (name for name in CASES[size] if (folder / f"{name}.gathered.0.pt").exists()):
        both, gathered = (
            torch.load(folder / f"{name}.{each}.pt", weights_only=False)
            for each in ("0", "gathered.0")
        )
        parts = [
            torch.cat([life.gradient[key].flatten() for key in gathered.gradient])
            for life in (both, gathered)
        ]
        assert (parts[0] - parts[1]).norm() < 0.01 * parts[1].norm(), name


@pytest.mark.slow
def test_tokens_travel_once_to_each_rank_of_their_experts(together: tuple[int, Path]) -> None:
    """Each token has 64 numbers of 4 bytes, two ids and two gates; its output has 64 numbers."""
    size, folder = together
    module = make_experts("qwen3_moe").model.layers[0].mlp.experts
    found = [torch.load(folder / f"exchanged.{rank}.pt") for rank in range(size)]
    for rank, (states, outputs, _) in enumerate(found):
        with torch.no_grad():
            expected = module(states, torch.tensor(CHOICES), torch.tensor(GATES))
        assert (outputs - expected).abs().max() < 1e-5, rank
    # All ranks have the same choices, so each returns the rows that the others send.
    owners = [{expert * size // 8 for expert in chosen} for chosen in CHOICES]
    for rank, (_, _, (num_bytes, num_pairs)) in enumerate(found):
        num_sent = sum(len(of_token - {rank}) for of_token in owners)
        num_received = sum(rank in of_token for of_token in owners) * (size - 1)
        assert num_sent == NUM_SENT[size][rank]
        assert num_bytes == num_sent * (64 * 4 + 2 * 4 + 2 * 4) + num_received * 64 * 4
        assert num_pairs == size * sum(e * size // 8 == rank for each in CHOICES for e in each)


@pytest.mark.slow
def test_divided_experts_are_published_and_resumed_as_whole_ones(
    together: tuple[int, Path],
) -> None:
    """One rank that has the weights of several publishes their version, bit for bit."""
    size, folder = together
    saved = {name: case for name, case in CASES[size].items() if case.is_saved}
    assert saved
    for name, case in saved.items():
        life: Life = torch.load(folder / f"{name}.0.pt", weights_only=False)
        cfg = config_of(case, folder / case.kind, 1)
        model, _ = load_start(cfg, None, CPU)
        trainer, _ = make_trainer(cfg, model, None)
        trainer.restore(folder / f"{name}.state", life.values)
        for key, each in model.named_parameters():
            assert not each.requires_grad or torch.equal(each, life.weights[key]), (name, key)
        alone = tensors_of(trainer.live_weights())
        assert alone.keys() == life.published.keys(), name
        for key, each in alone.items():
            assert torch.equal(each, life.published[key]), (name, key)
        after = trainer.train_on(samples_of(case, trainer), version=NUM_STEPS).metrics
        norm = life.after["train/grad_norm"]
        assert case.is_16_bit or after["train/grad_norm"] == pytest.approx(norm, rel=1e-4), name
