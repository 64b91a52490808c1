"""Laws of a learner that is killed: nothing is lost or trained twice, the weights are the same."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from common.config.load import load_config
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.wire.access.lease_mac import lease_key, lease_mac
from common.wire.codec import decode, encode
from common.wire.messages import Ack, EndReason, Hello, StepDone, Trajectory
from common.wire.security import create_keys
from common.wire.sockets import connect_dealer
from learner.journal.journal import read_journal
from learner.recovery.step_log import LoggedStep, PartName, read_steps
from learner.training.checkpoint import TENSORS, newest_checkpoint
from learner.training.state import read_weights
from tests.learner.builders import make_episode, make_trajectory, so_far
from tests.learner.ingest.intake_rig import Scheduler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_STEPS, SKIPPED = 5, (2, 3)  # the batches that are far off, of NUM_STEPS + 2
SETTINGS = [
    *["train.mode=async", f"train.num_steps={NUM_STEPS}", "eval.before=false", "eval.after=false"],
    *["groups.size=2", "groups.per_step=1", "learner.lr=3e-5", "learner.checkpoint_every_steps=2"],
    *["learner.keep_checkpoints=3", "learner.max_lag_steps=100", "learner.precision=fp32"],
    *["learner.layout=padded", "learner.attention=products", "learner.num_threads=1"],
    *["learner.controller.ess_skip=0.3", "scheduler.heartbeat_s=0.05", "log.wandb=disabled"],
]
KILLS = [
    ("between append and sync", 1),
    ("between sync and acknowledgement", 1),
    ("between acknowledgement and training", 1),
    ("before a checkpoint has its tensors", 1),
    ("after a skipped batch is logged", 1),
    ("between acknowledgement and training", 4),  # The kill comes after the repeated steps.
    ("after a skipped batch is logged", 1),
    ("before a checkpoint has its name", 1),
    ("after a step is logged", 1),
]


class Lives:
    """The process that forks learners."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.learner.lives"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            start_new_session=True,
        )

    def start(self, root: Path, point: str, number: int) -> threading.Event:
        """Begin a life; the event is set when it has ended, `code` is how."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(root), point, number]) + "\n")
        self._process.stdin.flush()
        ended = threading.Event()
        threading.Thread(target=self._wait, args=(ended,), daemon=True).start()
        return ended

    def _wait(self, ended: threading.Event) -> None:
        assert self._process.stdout is not None
        self.code = int(self._process.stdout.readline() or 1)
        ended.set()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # a life that a failed test left, too
        self._process.wait(30)
        self._process.stdout.close()
        self._log.close()


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    made = Lives(tmp_path_factory.mktemp("lives") / "learner.log")
    yield made
    made.close()


def member(batch: int, number: int, version: int) -> Trajectory:
    """Return an episode of a batch's one group; those of some batches are far from any policy."""
    generator = torch.Generator().manual_seed(10 * batch + number)
    token_ids = torch.randint(4, 400, (24,), generator=generator).tolist()
    noise = torch.randn(20, generator=generator) * (4.0 if batch in SKIPPED else 0.0)
    logprobs = (KNOWN[batch, number] + noise.clamp(-6, 6)).clamp(max=-0.01).tolist()
    return make_trajectory(
        token_ids,
        [0] * 4 + [1] * 20,
        logprobs=logprobs,
        version=version,
        group_id=f"g{batch:07d}",
        member=number,
        reward=float(number),
    )


KNOWN: dict[tuple[int, int], Any] = {}  # logprobs of the policy that all begin with


@pytest.fixture(scope="module", autouse=True)
def _known() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "configs/policies/tiny")
    for batch in range(NUM_STEPS + len(SKIPPED)):
        for number in range(2):
            generator = torch.Generator().manual_seed(10 * batch + number)
            ids = torch.randint(4, 400, (1, 24), generator=generator)
            with torch.no_grad():
                scores = model(ids).logits.log_softmax(-1)[0, :-1]
            KNOWN[batch, number] = scores.gather(1, ids[0, 1:, None])[3:, 0]


class Neighbours:
    """The scheduler and the one actor of a run, both in this process."""

    def __init__(self, root: Path, settings: list[str]) -> None:
        self.run_dir = RunDir(root=root)
        root.mkdir()
        save_config(load_config("smoke", settings), self.run_dir.config)
        self._keys = create_keys(self.run_dir.keys)
        self.scheduler = Scheduler(self.run_dir, self._keys)
        self.scheduler.start("epoch-1")
        self._context = zmq.Context()
        self._actor: Any = None
        self._address = ""
        self.acked: set[str] = set()
        self._pending: dict[str, Trajectory] = {}  # sent again to every learner until acknowledged

    def serve(self) -> None:
        """Answer for a moment, and follow the learner to where it is now."""
        until = time.monotonic() + 0.03
        self.scheduler.pump_until(lambda: time.monotonic() > until)
        heard = self.scheduler.heard
        self.scheduler.is_finished |= any(isinstance(m, StepDone) and m.is_last for m in heard)
        hellos = [m for m in heard if isinstance(m, Hello) and m.role == "learner"]
        if hellos and hellos[-1].addresses["learner"] != self._address:
            self._address = hellos[-1].addresses["learner"]
            self._close_actor()
            self._actor = connect_dealer(self._context, self._keys, address=self._address)
            for trajectory in list(self._pending.values()):
                self.send(trajectory)
        while self._actor is not None and self._actor.poll(0):
            answer = decode(self._actor.recv_multipart())
            assert isinstance(answer, Ack)
            assert answer.is_accepted, answer.reason
            for name in (answer.episode_id, *answer.others):
                self.acked.add(name)
                self._pending.pop(name, None)

    def send(self, trajectory: Trajectory) -> bool:
        """Send to the learner that there is now, if there is one."""
        if self._actor is not None:
            if trajectory.end_reason is not EndReason.UNFINISHED:  # A part is sent once.
                self._pending[trajectory.episode_id] = trajectory
            mac = lease_mac(trajectory, trajectory.actor, lease_key(self._keys))
            self._actor.send_multipart(encode(replace(trajectory, lease_mac=mac)))
        return self._actor is not None

    def steps(self) -> list[LoggedStep]:
        return list(read_steps(self.run_dir.steps)) if self.run_dir.steps.exists() else []

    def _close_actor(self) -> None:
        if self._actor is not None:
            self._actor.close(linger=0)

    def close(self) -> None:
        self._close_actor()
        self._context.term()
        self.scheduler.stop()


def batch_of(batch: int, version: int) -> list[Trajectory]:
    return [member(batch, number, version) for number in range(2)]


def play(
    root: Path,
    lives: Lives,
    kills: list[tuple[str, int]],
    *,
    settings: list[str] = SETTINGS,
    batch_of: Callable[[int, int], list[Trajectory]] = batch_of,
) -> Neighbours:
    """Run one learner to its end with the given kills and return its results."""
    run, left = Neighbours(root, settings), [*kills, ("", 0)]
    ended = lives.start(root, *left.pop(0))
    deadline, sent_at, sent_to = time.monotonic() + 280, 0.0, -1
    while True:
        assert time.monotonic() < deadline, f"stands still before {left}"
        run.serve()
        if ended.is_set():
            if lives.code == 0:
                wait_for_acks(run)
                return run
            assert lives.code == -9
            ended, sent_to = lives.start(root, *left.pop(0)), -1
            run._close_actor()
            run._actor = None
        steps = run.steps()
        batch, version = len(steps), max((step.version for step in steps), default=0)
        is_told = version == max(
            (m.version for m in run.scheduler.heard if isinstance(m, StepDone)), default=0
        )
        is_due = batch != sent_to or time.monotonic() - sent_at > 1.0
        is_due &= version < NUM_STEPS and (is_told or not version)
        if is_due and all([run.send(each) for each in batch_of(batch, version)]):
            sent_at, sent_to = time.monotonic(), batch


def wait_for_acks(run: Neighbours) -> None:
    """Read the learner's last messages: they may still be in flight."""
    names = {name for step in run.steps() for ids in step.groups for name in ids}
    consumed = {PartName.parse(name).episode_id for name in names}
    deadline = time.monotonic() + 30
    while not consumed <= run.acked:
        assert time.monotonic() < deadline, f"never acknowledged: {consumed - run.acked}"
        run.serve()


def weights(root: Path) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(root / "checkpoints")
    assert newest is not None
    assert newest.name == f"step-{NUM_STEPS:06d}"
    return dict(read_weights(newest / TENSORS, "model"))


def kept(run: Neighbours) -> list[str]:
    return sorted(each.name for each in run.run_dir.checkpoints.iterdir())


KEPT = ["step-000002", "step-000004", f"step-{NUM_STEPS:06d}"]


@pytest.mark.long
def test_killed_learner_trains_each_episode_once_with_equal_weights(
    tmp_path: Path, lives: Lives
) -> None:
    whole = play(tmp_path / "whole", lives, [])
    killed = play(tmp_path / "killed", lives, KILLS)
    for run in (whole, killed):
        run.close()
        assert kept(run) == KEPT
        steps = run.steps()
        assert [step.is_skipped for step in steps] == [i in SKIPPED for i in range(len(steps))]
        assert [step.number for step in steps] == list(range(1, NUM_STEPS + len(SKIPPED) + 1))
        consumed = [name for step in steps for group in step.groups for name in group]
        assert len(set(consumed)) == len(consumed) == 2 * len(steps)
        assert sorted(t.episode_id for _, t in read_journal(run.run_dir.journal)) == consumed
        assert run.acked == set(consumed)
        told = run.scheduler.outcomes
        for step in steps:
            outcome = ("stale", "controller") if step.is_skipped else ("trained", "")
            assert {told[name] for group in step.groups for name in group} == {outcome}
    assert [step.groups for step in killed.steps()] == [step.groups for step in whole.steps()]
    ours, theirs = weights(killed.run_dir.root), weights(whole.run_dir.root)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


OF_PARTS = [
    *[each for each in SETTINGS if not each.startswith(("learner.max_lag", "learner.controller"))],
    *["learner.partial_episodes=turns", "learner.max_lag_steps=1", "scheduler.max_stretch=1"],
    *["algorithm.advantage=ppo", "learner.controller.skip_step=false"],
]
LONG = make_episode([0, 0, 2, 2], name="g0000100")


def batch_with_parts(batch: int, version: int) -> list[Trajectory]:
    """Return a batch. An episode sends its first turns at version 1, and ends at version 2."""
    if batch == 2:
        return [LONG, replace(make_episode([2, 2], name="g0000100", seed=1), **MEMBER)]
    early = [so_far(LONG, 2)] if batch == 1 else []
    return [*early, *batch_of(0 if batch == 0 else batch + 1, version)]


MEMBER: dict[str, Any] = {"member": 1, "episode_id": "g0000100/1", "reward": 0.0}


def test_killed_learner_trains_each_part_once_with_equal_weights(
    tmp_path: Path, lives: Lives
) -> None:
    how: dict[str, Any] = {"settings": OF_PARTS, "batch_of": batch_with_parts}
    whole = play(tmp_path / "whole", lives, [], **how)
    kills = [
        ("after a step is logged", 2),
        ("after a step is logged", 1),
        ("before a checkpoint has its name", 1),
    ]
    killed = play(tmp_path / "killed", lives, kills, **how)
    for run in (whole, killed):
        run.close()
        assert kept(run) == KEPT
        names = [step.groups for step in run.steps()]
        assert names[1][1][0].startswith("g0000100/0@0-2-")
        assert names[2] == [["g0000100/0@2", "g0000100/1"]]
        assert sum(len(groups) for groups in names) == NUM_STEPS + 1
        assert run.scheduler.outcomes["g0000100/0"] == ("trained", "")
    lines = whole.run_dir.metrics.read_text(encoding="utf-8").splitlines()
    early = [json.loads(line).get("parts/early", 0.0) for line in lines]
    assert sum(early) == 1.0
    assert [step.groups for step in killed.steps()] == [step.groups for step in whole.steps()]
    ours, theirs = weights(killed.run_dir.root), weights(whole.run_dir.root)
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
