"""Law: a learner that was killed ends as one that lived, through batches of all kinds."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config.algorithm import Advantage, AlgorithmSection, Correction
from common.config.learner import LearnerSection, Precision
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeOutcome, Outcome, Trajectory
from learner.ingest.buffer import Group
from learner.ingest.journal_index import FROM_THE_START
from learner.journal.journal import JournalWriter
from learner.journal.metrics import MetricsWriter
from learner.objective.advantages import samples_of
from learner.policy.forward import Networks
from learner.policy.model import make_critic
from learner.recovery.resume import repeat_steps, steps_since
from learner.recovery.step_log import LoggedStep, StepLog
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tests.learner.builders import make_model, make_model_with_adapters, make_trajectory
from tests.marks import long_for

KINDS = ("good", "far", "good", "nan", "far", "nan", "short", "far", "good")
KILLED_BEFORE = (2, 4, 6, 8)  # Kill before these batches.
SAVED_AFTER = (2, 5)  # batches; the second checkpoint lies between two that are not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    algorithm: AlgorithmSection
    learner: dict[str, Any]
    has_adapters: bool = False


CASES = {
    "minibatches": Case(algorithm=AlgorithmSection(), learner={"num_minibatches": 2}),
    "critic, reused anchor": Case(
        algorithm=AlgorithmSection(advantage=Advantage.PPO), learner={"ppo_epochs": 2}
    ),
    "running baseline": Case(
        algorithm=AlgorithmSection(
            advantage=Advantage.RUNNING, correction=Correction.SECOND_MOMENT, m2_threshold=0.5
        ),
        learner={"num_minibatches": 2},
    ),
    "adapters and their base": Case(
        algorithm=AlgorithmSection(kl_coef=0.1), learner={"num_minibatches": 2}, has_adapters=True
    ),
}


def trainer_of(case: Case, seed: int) -> Trainer:
    model = (make_model_with_adapters if case.has_adapters else make_model)(seed=seed)
    critic = None
    if case.algorithm.advantage is Advantage.PPO:
        critic = make_critic(LearnerSection().critic, model, policy_path="")
    settings = TrainerSettings(
        learner=LearnerSection(lr=1e-3, warmup_steps=0, precision=Precision.FP32, **case.learner),
        algorithm=case.algorithm,
        num_steps=20,
        engine_dtype="float32",
        max_ahead_steps=2,
    )
    networks = Networks(policy=model, critic=critic, is_base_reference=case.has_adapters)
    return Trainer(settings, networks)


def batches(scorer: Trainer) -> list[list[Group]]:
    """Return a batch of each of `KINDS`; those that are far were sampled by another policy."""
    made: list[list[Group]] = []
    for batch, kind in enumerate(KINDS):
        groups: list[Group] = []
        for number in range(1 if kind == "short" else 3):
            name = f"g{10 * batch + number:07d}"
            members = [_member(scorer, name, member, kind) for member in range(2)]
            groups.append(Group(group_id=name, members=members))
        made.append(groups)
    return made


def _member(scorer: Trainer, name: str, member: int, kind: str) -> Trajectory:
    rng = np.random.default_rng(int(name[1:]) * 2 + member)
    ids = rng.integers(0, 50, size=10).tolist()
    logprobs = np.array(scorer.score([ids])[0][2:])
    if kind == "far":
        logprobs = np.minimum(logprobs + rng.normal(0, 3, size=logprobs.size), -0.01)
    if kind == "nan" and member == 0:
        logprobs[:] = np.nan
    mask = [0] * 3 + [1] * 7
    return make_trajectory(
        ids, mask, logprobs=logprobs.tolist(), group_id=name, member=member, reward=float(member)
    )


class Life:
    """A learner from its start to its end, without the parts that talk to others."""

    def __init__(self, root: Path, case: Case, seed: int) -> None:
        self._case, self._root, run_dir = case, root, RunDir(root=root)
        self.trainer, self._version = trainer_of(case, seed), 0
        saved = root / "values.json"
        if saved.exists():
            values = json.loads(saved.read_text(encoding="utf-8"))
            self._version = values["version"]
            self.trainer.restore(root / f"state-{self._version}", values)
        self._log = StepLog(run_dir.steps)
        counted = {"version": self._version, "num_batches": self.trainer.num_batches}
        steps = steps_since(run_dir, start=FROM_THE_START, **counted)
        metrics = MetricsWriter(run_dir, [])
        repeat_steps(
            *(case.algorithm, run_dir, self.trainer, steps),
            start=FROM_THE_START,
            metrics=metrics,
            rewards={},
        )
        metrics.close()
        self._version = steps[-1].version if steps else self._version

    def train_on(self, groups: list[Group]) -> bool:
        """Take a batch as the learner's loop does; return whether it was skipped."""
        samples = samples_of(groups, self._case.algorithm, self.trainer.baseline)
        is_skipped = self.trainer.train_on(samples, version=self._version).decision.is_skipped
        self._version += not is_skipped
        names = [[t.episode_id for t in group.members] for group in groups]
        told = [EpisodeOutcome(episode_id=n, outcome=Outcome.TRAINED, cause="") for n in names[0]]
        number = self.trainer.num_batches
        step = LoggedStep(version=self._version, groups=names, outcomes=told, number=number)
        self._log.append(replace(step, is_skipped=is_skipped))
        return is_skipped

    def save(self) -> None:
        self.trainer.save(self._root / f"state-{self._version}").result(60)
        values = {"version": self._version} | self.trainer.values()
        (self._root / "values.json").write_text(json.dumps(values), encoding="utf-8")

    def end(self) -> None:
        self._log.close()


def play(root: Path, case: Case, given: list[list[Group]], *, is_killed: bool) -> Trainer:
    """Train on all batches and return the trainer of the last life."""
    journal = JournalWriter(RunDir(root=root).journal)
    life = Life(root, case, seed=0)
    for number, groups in enumerate(given):
        for member in (member for group in groups for member in group.members):
            journal.append(member)
        journal.sync()
        if is_killed and number in KILLED_BEFORE:
            life.end()
            # Adapters lie beside the base that the run names; all else is in the checkpoint.
            has_saved = number > SAVED_AFTER[0] and not case.has_adapters
            life = Life(root, case, seed=9 if has_saved else 0)
        assert life.train_on(groups) == (KINDS[number] == "far")
        if number in SAVED_AFTER:
            life.save()
    life.end()
    journal.close()
    return life.trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", long_for(CASES, CASES.keys() - {"critic, reused anchor"}))
def test_repeatedly_killed_learner_ends_bit_identical(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    given = batches(trainer_of(case, 0))
    whole = play(tmp_path / "whole", case, given, is_killed=False)
    killed = play(tmp_path / "killed", case, given, is_killed=True)
    assert killed.values() == whole.values()
    assert whole.values()["num_batches"] == len(KINDS)
    assert whole.max_ahead_steps == 0  # the gate is closed, and stays so
    is_running = case.algorithm.advantage is Advantage.RUNNING
    assert bool(whole.baseline.items) == is_running
    ours, theirs = killed.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
