"""Laws of the learner's loop that need no other role."""

import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.config.learner import LearnerSection
from common.config.run import OnStall
from common.config.run_config import RunConfig
from common.store.run_dir import RunDir
from common.wire.messages import Outcome
from learner.build import Learner
from learner.ingest.buffer import Group
from learner.ingest.intake import LearnerStatus
from learner.ingest.journal_index import ReplayPoint
from learner.journal.journal import JournalPosition
from learner.main import Loop, TrainBatch, warn_of_cuts, warn_of_invalid_actions
from learner.training.checkpoint import Checkpoints
from learner.training.controller import Decision
from learner.training.ranks import Ranks
from learner.training.state import StateWriter
from learner.training.trainer import TrainResult
from tests.configs import edited
from tests.learner.builders import make_model, make_trajectory


class Neighbour:
    """A stub for the unused parts of a learner."""

    num_canary_alarms = 0

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, metrics: dict[str, float], *, check: object) -> None:
        self.lines.append(metrics)

    status = LearnerStatus()

    def prune(self, *, before: int, needed: int) -> bool:
        return False

    def drain_stats(self) -> dict[str, float]:
        return {}

    counts = drain_metrics = refused = drain_stats

    def live_weights(self, *, ask: object) -> None: ...

    ask_for_part = gate = recent = score = None

    def values(self) -> dict[str, Any]:
        return {}

    def save(self, folder: Path) -> Future[Any]:
        return StateWriter(Ranks()).start({"model.weight": torch.zeros(2)}, folder)

    def replay_point(self, *, version: int) -> ReplayPoint:
        return ReplayPoint(version=version)

    def first_needed(self, *, version: int, closed_below: int) -> int:
        return 0

    def settled(self, position: JournalPosition) -> None: ...

    def save_pretrained(self, _: Path, **__: Any) -> None:
        pass


def make_learner(root: Path, neighbour: Any) -> Learner:
    (root / "journal").mkdir()
    keeper = Checkpoints(root / "checkpoints", LearnerSection())
    given: dict[str, Any] = {name: neighbour for name in Learner.__dataclass_fields__}
    given |= {"run_dir": RunDir(root=root), "model": make_model(), "version": 1}
    given["checkpoints"] = keeper
    given |= {"teacher": None, "reward_log": None, "part_log": None, "num_skipped": 0}
    return Learner(**given)


def test_checkpoint_seconds_appear_in_the_next_steps_metrics(tmp_path: Path) -> None:
    neighbour = Neighbour()
    loop = Loop(RunConfig(), make_learner(tmp_path, neighbour), threading.Event())
    members = [make_trajectory([1, 2], [0, 1])]
    batch = TrainBatch(groups=[Group(group_id="g", members=members)], stale=[], waited_s=0.0)
    kept = Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=0)
    result = TrainResult(metrics={}, decision=kept)
    loop._log_metrics(batch, result)
    loop.saving.save(loop.version)
    loop.saving.settle(must_wait=True)
    loop._log_metrics(batch, result)
    before, after = neighbour.lines
    assert "train/checkpoint_s" not in before
    assert 0.0 < after["train/checkpoint_stall_s"] < after["train/checkpoint_s"] < 60.0


def test_horizons_of_a_batch_are_those_of_its_groups(tmp_path: Path) -> None:
    neighbour = Neighbour()
    loop = Loop(RunConfig(), make_learner(tmp_path, neighbour), threading.Event())
    member = make_trajectory([1, 2], [0, 1])
    groups = [
        Group(group_id="g0", members=[replace(member, horizon=4)]),
        Group(group_id="g1", members=[replace(member, horizon=50)], is_early=True),
    ]
    batch = TrainBatch(groups=groups, stale=[], waited_s=0.0)
    kept = Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=0)
    loop._log_metrics(batch, TrainResult(metrics={}, decision=kept))
    assert neighbour.lines[0]["horizon/mean"] == 4.0


class Skipping(Neighbour):
    """The parts of a learner that a logged batch reaches."""

    num_batches = 0
    digests = position = SimpleNamespace(file=0)
    num_refused = max_ahead_steps = 0

    def append(self, step: object, *, check: object) -> None: ...

    def mark_trained(self, groups: object, *, step: int, is_skipped: bool) -> None: ...

    def report(self, outcomes: object) -> None: ...


def test_skipped_batches_are_counted_in_the_metrics_of_the_next_step(tmp_path: Path) -> None:
    neighbour = Skipping()
    loop = Loop(RunConfig(), make_learner(tmp_path, neighbour), threading.Event())
    members = [make_trajectory([1, 2], [0, 1])]
    groups = [Group(group_id="g", members=members)]
    batch = TrainBatch(groups=groups, stale=[], waited_s=0.0)
    kept = Decision(lr_scale=1.0, is_skipped=False, max_ahead_steps=0)
    result = TrainResult(metrics={"controller/skipped": 0.0}, decision=kept)
    for num_skipped in (2, 0):
        for _ in range(num_skipped):
            loop._report_skipped(batch)
        loop._log_batch(batch, batch.outcomes(Outcome.TRAINED), is_skipped=False)
        loop._log_metrics(batch, result)
    lines = [line for line in neighbour.lines if isinstance(line, dict)]
    assert [line["controller/skipped"] for line in lines] == [2.0, 0.0]
    assert [line["groups/stale_episodes"] for line in lines] == [2.0, 0.0]


def test_live_rate_begins_a_checkpoint_after_repeated_steps(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, Neighbour())  # Its version is that of a repeated step.
    loop = Loop(RunConfig(), learner, threading.Event())
    for _ in range(2):
        loop._save_if_new()
        loop.saving.settle(must_wait=True)
    assert learner.checkpoints.newest_version == learner.version


@pytest.mark.parametrize(
    ("invalid_frac", "style", "words"),
    [
        (0.95, "compact", ["95 %", "set envhub.style=instructed"]),
        (1.0, "instructed", ["100 %", "actor.format", "actor.max_turn_tokens"]),
        (0.9, "compact", []),
    ],
)
def test_invalid_actions_of_the_first_batch_are_a_warning_with_the_key(
    invalid_frac: float, style: str, words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_invalid_actions(invalid_frac, edited(RunConfig(), {"envhub.style": style}))
    assert all(word in caplog.text for word in words)
    assert bool(caplog.records) == bool(words)


@pytest.mark.parametrize(("num_cut", "words"), [(0.0, ""), (0.25, "0.25 observations of an")])
def test_cut_observations_of_the_first_batch_are_a_warning_with_the_key(
    num_cut: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_cuts(num_cut, RunConfig())
    assert (words in caplog.text, "actor.max_model_len" in caplog.text) == (True, bool(words))


class Waiting(Neighbour):
    """A buffer without a batch for a while, and the learner's status calls."""

    has_no_room = False

    def __init__(self, num_timeouts: int) -> None:
        super().__init__()
        self.left = num_timeouts

    def next_batch(self, *_: Any, **__: Any) -> tuple[list[Group], list[Any]]:
        self.left -= 1
        if self.left >= 0:
            raise TimeoutError("no batch for 1,800s: 3 groups wait for members of actor-0")
        return [], []


def test_learner_without_batch_warns_and_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for policy in (OnStall.WARN, OnStall.RESTART):
        root = tmp_path / policy
        root.mkdir()
        loop = Loop(_config(policy), make_learner(root, Waiting(3)), threading.Event())
        loop._set_status = lambda **_: None
        caplog.clear()
        assert loop._wait_for_batch().groups == []
        told = [record.getMessage() for record in caplog.records]
        assert (
            len(
                [text for text in told if "still waiting for a batch" in text and "actor-0" in text]
            )
            == 3
        )
    (tmp_path / "stop").mkdir(exist_ok=True)
    stopping = make_learner(tmp_path / "stop", Waiting(1))
    loop = Loop(_config(OnStall.STOP), stopping, threading.Event())
    loop._set_status = lambda **_: None
    with pytest.raises(TimeoutError, match="actor-0"):
        loop._wait_for_batch()


def test_status_returns_to_the_wait_once_a_missing_resource_is_there(tmp_path: Path) -> None:
    neighbour = Neighbour()
    loop = Loop(RunConfig(), make_learner(tmp_path, neighbour), threading.Event())
    engines = "actors: an engine that loads weights"
    for wait in ("actors: a batch", "actors: evaluation", ""):
        loop._set_status(waiting_for=wait)
        for missing in ("teacher: scores", engines, engines, ""):
            loop._note_wait(missing)
            assert neighbour.status.waiting_for == (missing or wait)


def _config(policy: OnStall) -> RunConfig:
    return edited(RunConfig(), {"run.on_stall": policy})
