"""Law: no setting of learning is without effect."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from common.config.algorithm import (
    Advantage,
    Aggregation,
    AlgorithmSection,
    Correction,
    CreditLevel,
    PolicyLoss,
    Proximal,
    StateCredit,
)
from common.config.learner import (
    Attention,
    ControllerSection,
    CriticSection,
    CriticTargets,
    Layout,
    LearnerSection,
    OptimizerKind,
    Precision,
)
from common.repository import ROOT
from learner.ingest.buffer import Group
from learner.objective.advantages import group_has_signal, samples_of
from learner.policy.forward import Networks
from learner.policy.model import make_critic
from learner.training.controller import Controller
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_trajectory

FOLDER = TemporaryDirectory()
TRAINED: dict[str, list[float]] = {}  # Results of `train`; most settings share their context.
Effect = Callable[[AlgorithmSection, LearnerSection], Any]


def groups() -> list[Group]:
    """Build two groups of three two-turn episodes in two environments, off-policy at lags 0-2."""
    rng = np.random.default_rng(3)
    built = []
    for number in range(2):
        members = []
        for member in range(3):
            mask = [0, 1, 1, 0, 1, 1, 1][: 5 + member]
            trajectory = make_trajectory(
                rng.integers(0, 50, size=len(mask)).tolist(),
                mask,
                logprobs=(-3.2 - 1.2 * rng.random(sum(mask))).tolist(),
                group_id=f"g{number}",
                member=member,
            )
            turns = np.array([0, 0, 0, 1, 1, 1, 1][: len(mask)], dtype=np.int32)
            versions = np.where(trajectory.loss_mask, rng.integers(0, 3, len(mask)), -1)
            reward = [0.2, 1.0, 0.6][member] * (number + 1) / 2
            members.append(
                replace(
                    trajectory,
                    env=f"env{number}",
                    num_turns=2,
                    reward=reward,
                    turn_scores=np.array([reward / 3, reward], dtype=np.float32),
                    invalid_turns=np.array([member == 0, False]),
                    num_invalid_actions=int(member == 0),
                    turn_ids=turns,
                    turn_states=np.array([0, member % 2], dtype=np.int32),
                    item_id=f"a-train-{number}",
                    versions=versions.astype(np.int32),
                )
            )
        built.append(Group(group_id=f"g{number}", members=members))
    return built


@cache
def policy_path() -> str:
    """Return a checkpoint for critics of their own; removed when the interpreter ends."""
    make_model(seed=2).save_pretrained(FOLDER.name)
    return FOLDER.name


def trained(algorithm: AlgorithmSection, learner: LearnerSection) -> list[float]:
    """Return numbers that any change of loss, gradient or update must move."""
    key = repr((algorithm, learner))
    if key not in TRAINED:
        TRAINED[key] = train(algorithm, learner)
    return TRAINED[key]


def train(algorithm: AlgorithmSection, learner: LearnerSection) -> list[float]:
    """Return the metrics of two steps, and the norms of the weights after them."""
    model = make_model()
    critic = None
    if algorithm.advantage is Advantage.PPO:
        critic = make_critic(learner.critic, model, policy_path=policy_path())
        critic.head.weight.data.fill_(0.01)
    settings = TrainerSettings(
        learner=learner,
        algorithm=algorithm,
        num_steps=10,
        engine_dtype="float32",
        max_ahead_steps=2,
    )
    reference = make_model(seed=1) if algorithm.kl_coef else None
    trainer = Trainer(settings, Networks(policy=model, critic=critic, reference=reference))
    numbers: list[float] = []
    for version in (2, 7):
        samples = samples_of(groups(), algorithm, trainer.baseline)
        metrics = trainer.train_on(samples, version=version).metrics
        names = ("loss/policy", "train/grad_norm", "train/lr", "controller/max_ahead_steps")
        numbers += [metrics.get(name, -1.0) for name in names]
        numbers.append(metrics["controller/skipped"])
    tensors = [*model.parameters(), *(critic.parameters() if critic else [])]
    return [*numbers, *(float(p.detach().double().pow(2).sum()) for p in tensors)]


def decided(_: AlgorithmSection, learner: LearnerSection) -> list[Any]:
    """Return what the controller does over a bad and then a good stretch."""
    controller = Controller(learner.controller, max_ahead_steps=3)
    path = [0.8, 0.6, 0.4, 0.4, 0.4, 0.4, 0.03, *[0.95] * 45]
    told = [controller.decide(version=0, ess_frac=ess, masked_frac=0.0) for ess in path]
    return [*told, controller.decide(version=0, ess_frac=0.95, masked_frac=0.0, clipped_frac=0.12)]


def signal(algorithm: AlgorithmSection, _: LearnerSection) -> bool:
    members = [replace(t, reward=1.0) for t in groups()[0].members]
    return algorithm.filter_zero_variance and not group_has_signal(members, algorithm)


A = AlgorithmSection
L = LearnerSection
PPO = {"advantage": Advantage.PPO}
SHARED = {"reward_level": CreditLevel.TURN}  # turns of one state then have unlike returns
# Settings without an effect on a training step; each is read in the file named here.
ELSEWHERE = {
    "learner.profile_steps": "common/config/learner.py",
    "learner.memory_snapshot": "common/config/learner.py",
    "algorithm.router_aux_coef": "tests/learner/policy/test_expert_balance.py",
    "algorithm.routing_replay": "tests/learner/policy/test_expert_routing.py",
    "algorithm.row_credit": "tests/learner/batch/test_rows.py",  # The episodes here have one row.
    # Without path or url there is no teacher; test_teacher.py has the effects of one.
    **{
        f"algorithm.teacher.{name}": place
        for place, names in {
            "learner/teacher/scorer.py": (
                *("path", "url", "model", "key_env", "timeout_s", "concurrency", "max_waiting"),
            ),
            "learner/algorithms/teacher.py": ("coef", "reward_coef", "form"),
            "common/config/algorithm.py": ("k",),
            "tools/checks/served_engines.py": ("serve", "gpus"),
        }.items()
        for name in names
    },
    "learner.host": "learner/build.py",
    "learner.advertise": "learner/build.py",
    "learner.port": "learner/build.py",
    "learner.device": "learner/build.py",
    "learner.num_threads": "learner/training/build.py",
    "learner.num_ranks": "learner/training/rank_processes.py",
    "learner.num_nodes": "learner/training/rank_workers.py",
    "learner.ranks_per_node": "common/config/load.py",
    "learner.shard_nodes": "common/config/learner.py",
    "learner.sequence_ranks": "learner/training/rank_processes.py",
    "learner.expert_ranks": "learner/training/rank_processes.py",
    "learner.join_timeout_s": "learner/training/rank_workers.py",
    "learner.num_gpus": "common/config/load.py",
    "learner.publish": "learner/build.py",
    "learner.publish_bucket_mb": "learner/build.py",
    "learner.publish_parts": "learner/build.py",
    "learner.weights_transport": "learner/build.py",
    "learner.rank_timeout_s": "learner/training/rank_processes.py",
    "learner.activations": "changes no number, by law",
    "learner.activation_gib": "changes no number, by law",
    "learner.mlp_chunk_tokens": "changes no number, by law",
    "learner.offload": "learner/policy/forward.py",  # See test_offload.py for its effect.
    "learner.moments": "learner/training/optimizer.py",  # see test_moments.py
    "learner.rounding": "learner/training/optimizer.py",  # see test_vanished.py
    "learner.max_lag_steps": "learner/main.py",
    "learner.partial_episodes": "learner/build.py",  # See tests/learner/ingest/test_parts.py.
    "learner.hold_back_steps": "common/config/run_config.py",
    "learner.batch_timeout_s": "learner/main.py",
    "learner.publish_timeout_s": "learner/build.py",
    "learner.max_canary_delta": "learner/build.py",
    "learner.max_canary_alarms": "learner/weights/publisher.py",
    "learner.checkpoint_every_steps": "learner/training/checkpoint.py",
    "learner.checkpoint_every_s": "learner/training/checkpoint.py",
    "learner.keep_checkpoints": "learner/training/checkpoint.py",
    "learner.max_redo_s": "learner/training/checkpoint.py",
    "learner.checkpoint_shards": "learner/training/rank_processes.py",
    "learner.shard_folder": "learner/node.py",
    "learner.max_bad_steps": "learner/training/trainer.py",
    "algorithm.reference_path": "learner/training/build.py",
    "learner.lora.rank": "learner/policy/lora.py",
    "learner.lora.alpha": "learner/policy/lora.py",
    "learner.lora.targets": "learner/policy/lora.py",
    "learner.critic.path": "learner/policy/model.py",
    "learner.controller.masked_warn_frac": "learner/training/controller.py",
    "learner.max_tokens_per_microbatch": "changes no number, by law",
    "learner.logprob_chunk_tokens": "changes no number, by law",
    "learner.shared_prefix": "changes no number, by law",
    "learner.compile": "learner/policy/forward.py",
}
# What must be set for a leaf to matter: (algorithm, learner, critic, controller).
CONTEXT: dict[str, tuple[dict, dict, dict, dict]] = {
    "algorithm.constant_tokens": ({"aggregation": Aggregation.CONSTANT}, {}, {}, {}),
    "algorithm.invalid_action_level": ({"invalid_action_penalty": 0.4}, {}, {}, {}),
    "algorithm.dppo_delta": ({"policy_loss": PolicyLoss.DPPO}, {}, {}, {}),
    "algorithm.mask_low": ({"correction": Correction.ICEPOP}, {}, {}, {}),
    "algorithm.mask_high": ({"correction": Correction.ICEPOP}, {}, {}, {}),
    "algorithm.geometric_low": ({"correction": Correction.GEOMETRIC}, {}, {}, {}),
    "algorithm.geometric_high": (
        {"correction": Correction.GEOMETRIC, "geometric_low": 0.01},
        *({}, {}, {}),
    ),
    "algorithm.m2_threshold": ({"correction": Correction.SECOND_MOMENT}, {}, {}, {}),
    "algorithm.state_weight": ({"state_credit": StateCredit.GIGPO, **SHARED}, {}, {}, {}),
    "algorithm.state_discount": ({"state_credit": StateCredit.GIGPO, **SHARED}, {}, {}, {}),
    "algorithm.state_prior": ({"state_credit": StateCredit.ECPO, **SHARED}, {}, {}, {}),
    "algorithm.state_lambda": ({"state_credit": StateCredit.GAGPO, **SHARED}, {}, {}, {}),
    "algorithm.state_credit": (SHARED, {}, {}, {}),
    "algorithm.running_memory": ({"advantage": Advantage.RUNNING}, {}, {}, {}),
    "algorithm.running_prior": ({"advantage": Advantage.RUNNING}, {}, {}, {}),
    "algorithm.kl_estimator": ({"kl_coef": 0.5}, {}, {}, {}),
    "algorithm.tis_cap": ({}, {"ppo_epochs": 2}, {}, {}),
    "learner.muon_lr": ({}, {"optimizer": OptimizerKind.MUON}, {}, {}),
    "learner.min_lr_frac": ({}, {"decay_start_frac": 0.1}, {}, {}),
    "learner.critic.clip": (PPO, {"ppo_epochs": 2}, {}, {}),
    "learner.critic.vtrace_rho": (PPO, {}, {"targets": CriticTargets.VTRACE}, {}),
    "learner.critic.vtrace_c": (PPO, {}, {"targets": CriticTargets.VTRACE}, {}),
}
OTHER: dict[str, Any] = {  # a value that is not simply larger
    "algorithm.dual_clip": 1.01,
    "algorithm.tis_cap": 0.5,
    "algorithm.dppo_delta": 1e-4,
    "algorithm.m2_threshold": 0.6,
    "algorithm.mask_low": 0.95,
    "algorithm.mask_high": 1.05,
    "algorithm.geometric_low": 0.1,
    "algorithm.geometric_high": 9.0,
    "algorithm.clip_low": 0.01,
    "algorithm.clip_high": 0.01,
    "algorithm.turn_discount": 0.5,
    "algorithm.state_discount": 0.5,
    "algorithm.negative_mask_delta": 1e-6,
    "learner.decay_start_frac": 0.1,
    "learner.max_grad_norm": 1e-3,
    "learner.beta1": 0.5,
    "learner.beta2": 0.5,
    "learner.warmup_steps": 5,
    "learner.critic.gae_lambda": 0.3,
    "learner.critic.warmup_steps": 5,
    "learner.critic.clip": 1e-6,
    "learner.critic.vtrace_rho": 0.2,
    "learner.critic.vtrace_c": 0.2,
    "learner.controller.ess_gate": 0.85,
    "learner.controller.ess_skip": 0.65,
    "learner.controller.ess_target": 0.97,
    "learner.controller.min_lr_scale": 0.7,
    "learner.controller.recover_steps": 3,
    "learner.controller.max_skips": 1,
}


def leaves(section: Any, prefix: str) -> Iterator[str]:
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}.{field.name}")
        else:
            yield f"{prefix}.{field.name}"


LEAVES = [*leaves(A(), "algorithm"), *leaves(L(), "learner")]
MEMBERS = [
    (leaf, member)
    for leaf in LEAVES
    for section in [{"algorithm": A(), "learner": L(), "critic": CriticSection()}]
    if isinstance(
        default := getattr(section.get(leaf.split(".")[-2]), leaf.split(".")[-1], None), Enum
    )
    for member in type(default)
    if member is not default and leaf not in ELSEWHERE
]


def perturbed(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return value * 1.5 if value else 0.25


def pair(leaf: str, member: Any = None) -> tuple[tuple[A, L], tuple[A, L]]:
    """Return the context of a leaf as configurations, before and after the leaf is changed."""
    *path, name = leaf.split(".")
    given: list[dict[str, Any]] = [dict(each) for each in CONTEXT.get(leaf, ({},) * 4)]
    algorithm, learner, critic, controller = given
    if path[-1] == "critic" and not algorithm:
        algorithm = dict[str, Any](PPO)
    quiet = {"scale_lr": False, "tighten_gate": False, "skip_step": False}
    if path[-1] != "controller":
        controller = quiet | controller
    learner = {
        "lr": 1e-2,
        "warmup_steps": 0,
        "precision": Precision.FP32,
        "max_grad_norm": 0.5,
    } | learner
    if member is Precision.FP32:
        learner["precision"] = Precision.BF16  # auto is one of the two, by the machine

    def build() -> tuple[A, L]:
        nested: dict[str, Any] = {
            "critic": CriticSection(**critic),
            "controller": ControllerSection(**controller),
        }
        return A(**algorithm), L(**learner, **nested)

    before = build()
    target = {"algorithm": algorithm, "learner": learner, "critic": critic}.get(
        path[-1], controller
    )
    section = {"algorithm": before[0], "learner": before[1], "critic": before[1].critic}.get(
        path[-1], before[1].controller
    )
    new = OTHER.get(leaf, perturbed(getattr(section, name))) if member is None else member
    assert new != getattr(section, name)
    target[name] = new
    return before, build()


def effect_of(leaf: str) -> Effect:
    if leaf.startswith("learner.controller."):
        return decided
    return signal if leaf == "algorithm.filter_zero_variance" else trained


@pytest.mark.parametrize(
    "leaf",
    [leaf for leaf in LEAVES if leaf not in ELSEWHERE and leaf not in {x for x, _ in MEMBERS}],
)
def test_every_knob_of_learning_has_an_effect(leaf: str) -> None:
    before, after = pair(leaf)
    effect = effect_of(leaf)
    assert effect(*before) != effect(*after)


@pytest.mark.parametrize(("leaf", "member"), MEMBERS, ids=str)
def test_every_choice_of_learning_changes_something(leaf: str, member: Enum) -> None:
    if member in (Advantage.RLOO, Proximal.SAMPLER, Layout.PACKED, Attention.PRODUCTS):
        pytest.skip("the same as the default, spelt out")
    before, after = pair(leaf, member)
    assert trained(*before) != trained(*after)


@pytest.mark.parametrize("leaf", ["max_tokens_per_microbatch", "logprob_chunk_tokens"])
def test_block_sizes_change_no_number(leaf: str) -> None:
    quiet = ControllerSection(scale_lr=False, tighten_gate=False, skip_step=False)
    shared: dict[str, Any] = {
        "lr": 1e-2,
        "warmup_steps": 0,
        "precision": Precision.FP32,
        "controller": quiet,
    }
    large = trained(A(), L(**shared))
    shared[leaf] = 8
    small = trained(A(), L(**shared))
    assert small == pytest.approx(large, rel=1e-5)


def test_settings_tested_elsewhere_exist() -> None:
    assert set(ELSEWHERE) <= set(LEAVES)
    for leaf, where in ELSEWHERE.items():
        if where.endswith(".py"):
            assert leaf.rsplit(".", 1)[1] in (ROOT / where).read_text(encoding="utf-8"), leaf
