"""A real intake between a dealer (the actor) and a router (the scheduler)."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from common.config.algorithm import AlgorithmSection, TeacherSection
from common.config.groups import GroupsSection
from common.store.run_dir import RunDir
from common.wire.codec import decode, encode
from common.wire.messages import (
    Ack,
    Heartbeat,
    Hello,
    LagBound,
    Outcomes,
    Progress,
    Rejected,
    StepDone,
    Trajectory,
    Welcome,
)
from common.wire.security import RunKeys, create_keys
from common.wire.sockets import Router, connect_dealer
from learner.ingest.buffer import GroupAssembly, RewardGroup, ScoreGroup, TrajectoryBuffer
from learner.ingest.intake import Admission, Intake
from learner.ingest.journal_index import JournalIndex
from learner.ingest.reports import ReportClient, ReportLog
from learner.journal.journal import JournalWriter, read_journal
from learner.objective.advantages import group_has_signal
from scheduler.core import ReportCursor
from tests.learner.builders import make_trajectory

HOST = "127.0.0.1"
VOCAB_SIZE = 100
HELLO = Hello(role="learner", name="learner-1", incarnation="i", version=0)


class Scheduler:
    """Welcomes the learner and answers its heartbeats. Runs only while `pump_until` waits."""

    def __init__(self, run_dir: RunDir, keys: RunKeys) -> None:
        self._run_dir = run_dir
        self._keys = keys
        self._router: Router | None = None
        self.epoch = ""
        self.heard: list[Any] = []
        self.revoked: list[str] = []
        self.lag_bounds: list[LagBound] = []
        self.num_slots = 0
        self.is_finished = False
        self.rejects = False
        self.told = ReportCursor()
        self.num_to_lose = 0  # numbered messages that never arrive
        self.num_answers = 0  # Answers to heartbeats.
        self.num_applied = 0  # Answers that the learner has applied.

    def start(self, epoch: str, *, is_at_new_address: bool = True) -> None:
        """Begin a new epoch without state."""
        self.epoch, self.heard = epoch, []
        if is_at_new_address:
            self.stop()
            self._router = Router(self._keys, host=HOST, port=0)
            self._run_dir.publish_address("scheduler", f"tcp://{HOST}:{self._router.port}")

    def stop(self) -> None:
        if self._router is not None:
            self._router.close()

    def pump_until(self, condition: Callable[[], bool]) -> None:
        assert self._router is not None
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, f"heard only {self.heard}"
            for received in self._router.receive_all(timeout_s=0.05):
                if self._is_lost(received.message):
                    continue
                self.heard.append(received.message)
                answer = self._answer(received.message)
                if answer is not None:
                    self._router.send(received.sender, answer)

    def _answer(self, message: Any) -> Any:
        if self.rejects:
            return Rejected(reason="no")
        if isinstance(message, Hello):
            self.told.begin()
            return Welcome(run_epoch=self.epoch)
        if isinstance(message, Outcomes | StepDone):
            self.told.hear(message.number)
        if isinstance(message, Heartbeat):
            self.num_answers += 1
            return Progress(
                run_epoch=self.epoch,
                revoked=self.revoked,
                lag_bounds=self.lag_bounds,
                num_slots=self.num_slots,
                is_finished=self.is_finished,
                num_heard=self.told.num_heard,
                num_reports=message.num_reports,
                num_saved=self.told.num_saved,
                closed_below=self.told.closed_below,
            )
        return None

    def _is_lost(self, message: Any) -> bool:
        is_lost = isinstance(message, Outcomes | StepDone) and self.num_to_lose > 0
        self.num_to_lose -= is_lost
        return is_lost

    def pump_beats(self, num: int) -> None:
        """Answer so many heartbeats from now on, and wait until the learner has the answers."""
        num += self.num_answers
        self.pump_until(lambda: self.num_applied >= num)

    def _told(self, name: str) -> list[Any]:
        reports = [message for message in self.heard if isinstance(message, Outcomes)]
        return [item for report in reports for item in getattr(report, name)]

    @property
    def seen(self) -> list[str]:
        return [seen.episode_id for seen in self._told("seen")]

    @property
    def outcomes(self) -> dict[str, tuple[str, str]]:
        return {o.episode_id: (o.outcome.value, o.cause) for o in self._told("outcomes")}

    @property
    def groups(self) -> dict[str, bool]:
        return {group.group_id: group.is_ready for group in self._told("groups")}

    @property
    def num_duplicates(self) -> int:
        return sum(m.num_duplicates for m in self.heard if isinstance(m, Outcomes))


class GatedJournal(JournalWriter):
    """A disk that syncs while the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()
        self.is_syncing = threading.Event()  # set when it was asked for, from then on

    def sync(self) -> None:
        self.is_syncing.set()
        assert self.gate.wait(60.0)
        super().sync()


class Setup:
    """An intake with its neighbours."""

    def __init__(
        self,
        root: Path,
        *,
        silence_s: float = 30.0,
        lease_key: bytes | None = None,
        score: ScoreGroup | None = None,
        compare: RewardGroup | None = None,
        has_room: Callable[[], bool] = lambda: True,
        trains_early: bool = False,
    ) -> None:
        self.run_dir = RunDir(root=root)
        keys = create_keys(root / "keys")
        self.scheduler = Scheduler(self.run_dir, keys)
        self.scheduler.start("epoch-1")
        self.journal = GatedJournal(self.run_dir.journal)
        teacher = TeacherSection(path="teacher" if score else "")
        algorithm = self.algorithm = AlgorithmSection(teacher=teacher)
        groups = GroupsSection(size=3, per_step=1, min_size=2)
        table = GroupAssembly(
            groups,
            algorithm,
            has_signal=lambda m: group_has_signal(m, algorithm),
            is_taught=teacher.is_on,
            is_compared=compare is not None,
            is_by_turn=trains_early,
            trains_early=trains_early,
        )
        index = JournalIndex(end=self.journal.position)
        reports = ReportLog()
        self.admission = Admission(index, group_size=3, vocab_size=VOCAB_SIZE, lease_key=lease_key)
        self.buffer = TrajectoryBuffer(
            table, index, reports, version=HELLO.version, score=score, compare=compare
        )
        self.client = ReportClient(
            self.run_dir, keys, reports, hello=HELLO, silence_s=silence_s, on_progress=self._apply
        )
        self.router = Router(keys, host=HOST, port=0)
        self.intake = Intake(
            self.router,
            self.journal,
            self.admission,
            self.buffer,
            self.client,
            heartbeat_s=0.02,
            has_room=has_room,
        )
        self._context = zmq.Context()
        address = f"tcp://{HOST}:{self.intake.port}"
        self._connect = partial(connect_dealer, keys=keys, address=address, timeout_s=60.0)
        self.actor = self._connect(self._context)

    @contextmanager
    def other_actor(self) -> Iterator[Any]:
        """Yield the socket of another one."""
        socket = self._connect(self._context)
        try:
            yield socket
        finally:
            socket.close(linger=0)

    def _apply(self, progress: Progress) -> None:
        self.buffer.apply(progress)
        self.scheduler.num_applied += 1

    def deliver(self, trajectory: Trajectory) -> Ack:
        self.actor.send_multipart(encode(trajectory))
        ack = decode(self.actor.recv_multipart())
        assert ack.episode_id == trajectory.episode_id
        return ack

    def journaled(self) -> list[str]:
        return [t.episode_id for _, t in read_journal(self.run_dir.journal)]

    def next_batch(self, version: int = 0, *, timeout_s: float = 60.0) -> tuple[Any, Any]:
        return self.buffer.next_batch(version, max_lag_steps=1, in_order=False, timeout_s=timeout_s)

    def close(self) -> None:
        self.journal.gate.set()
        if self.intake.is_alive():
            self.intake.stop()
        assert not self.intake.is_alive()
        if self.intake.ident is None:  # An intake that never ran does not close its sockets.
            self.router.close()
            self.client.close()
        self.scheduler.stop()
        self.journal.close()
        self.actor.close(linger=0)
        self._context.term()


def member(number: int, *, group_id: str = "g", version: int = 0) -> Trajectory:
    """Member 0 wins, the others lose."""
    trajectory = make_trajectory([1, 2], [0, 1], group_id=group_id, member=number, version=version)
    return replace(trajectory, reward=float(number == 0))
