"""Laws of the intake: a real intake between a dealer (the actor) and a router (the scheduler)."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from common.config import GroupsSection
from common.config_learning import AlgorithmSection
from common.errors import LongstrideError
from common.journal import JOURNAL_START, JournalWriter, read_journal
from common.messages import (
    Ack,
    EndReason,
    EpisodeKind,
    EpisodeOutcome,
    Heartbeat,
    Hello,
    LagBound,
    Outcome,
    Outcomes,
    Progress,
    Rejected,
    StepDone,
    Trajectory,
    Welcome,
)
from common.run_dir import RunDir
from common.security import RunKeys, create_keys
from common.sockets import Router, connect_dealer
from common.wire import decode, encode
from learner.groups import GroupTable
from learner.intake import Intake
from learner.samples import group_has_signal
from learner.scheduler.told import Told
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
        self.told = Told()
        self.num_to_lose = 0  # numbered messages that never arrive

    def start(self, epoch: str, *, is_at_new_address: bool = True) -> None:
        """Begin a new epoch that knows nothing."""
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
        deadline = time.monotonic() + 5.0
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
            return Welcome(run_epoch=self.epoch, version=0, is_lockstep=False)
        if isinstance(message, Outcomes | StepDone):
            self.told.hear(message.number)
        if isinstance(message, Heartbeat):
            return Progress(
                run_epoch=self.epoch,
                version=0,
                revoked=self.revoked,
                lag_bounds=self.lag_bounds,
                num_slots=self.num_slots,
                is_finished=self.is_finished,
                num_heard=self.told.num_heard,
                num_saved=self.told.num_saved,
                closed_below=self.told.closed_below,
            )
        return None

    def _is_lost(self, message: Any) -> bool:
        is_lost = isinstance(message, Outcomes | StepDone) and self.num_to_lose > 0
        self.num_to_lose -= is_lost
        return is_lost

    def pump_beats(self, num: int) -> None:
        """Answer so many heartbeats from now on."""
        num += sum(isinstance(message, Heartbeat) for message in self.heard)
        self.pump_until(lambda: sum(isinstance(m, Heartbeat) for m in self.heard) >= num)

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
    """A disk whose sync takes until the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.gate.set()

    def sync(self) -> None:
        assert self.gate.wait(5.0)
        super().sync()


class Setup:
    """An intake with its neighbours."""

    def __init__(self, root: Path, *, silence_s: float = 30.0) -> None:
        self.run_dir = RunDir(root=root)
        keys = create_keys(root / "keys")
        self.scheduler = Scheduler(self.run_dir, keys)
        self.scheduler.start("epoch-1")
        self.journal = GatedJournal(self.run_dir.journal)
        algorithm = AlgorithmSection()
        groups = GroupsSection(size=3, per_step=1, min_size=2)
        self.intake = Intake(
            self.run_dir,
            keys,
            Router(keys, host=HOST, port=0),
            self.journal,
            GroupTable(groups, algorithm, has_signal=lambda m: group_has_signal(m, algorithm)),
            hello=HELLO,
            heartbeat_s=0.02,
            group_size=3,
            silence_s=silence_s,
            vocab_size=VOCAB_SIZE,
        )
        self._context = zmq.Context()
        address = f"tcp://{HOST}:{self.intake.port}"
        self.actor = connect_dealer(self._context, keys, address=address, timeout_s=5.0)

    def deliver(self, trajectory: Trajectory) -> Ack:
        self.actor.send_multipart(encode(trajectory))
        ack = decode(self.actor.recv_multipart())
        assert ack.episode_id == trajectory.episode_id
        return ack

    def journaled(self) -> list[str]:
        return [t.episode_id for _, t in read_journal(self.run_dir.journal)]

    def next_batch(self, version: int = 0, *, timeout_s: float = 5.0) -> tuple[Any, Any]:
        return self.intake.next_batch(version, max_lag_steps=1, in_order=False, timeout_s=timeout_s)

    def close(self) -> None:
        self.journal.gate.set()
        if self.intake.is_alive():
            self.intake.stop()
        assert not self.intake.is_alive()
        self.scheduler.stop()
        self.journal.close()
        self.actor.close(linger=0)
        self._context.term()


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    """An intake that is not started yet."""
    setup = Setup(tmp_path)
    yield setup
    setup.close()


@pytest.fixture
def running(setup: Setup) -> Setup:
    setup.intake.start()
    return setup


def member(number: int, *, group_id: str = "g", version: int = 0) -> Trajectory:
    """Member 0 wins, the others lose."""
    trajectory = make_trajectory([1, 2], [0, 1], group_id=group_id, member=number, version=version)
    return replace(trajectory, reward=float(number == 0))


def test_a_trajectory_is_acknowledged_only_when_it_is_on_disk(running: Setup) -> None:
    running.journal.gate.clear()
    running.actor.send_multipart(encode(member(0)))
    assert not running.actor.poll(200), "acknowledged before the sync"
    running.journal.gate.set()
    ack = decode(running.actor.recv_multipart())
    assert ack == Ack(episode_id="g/0", is_accepted=True, reason="")
    assert running.journaled() == ["g/0"]
    (record,) = [t for _, t in read_journal(running.run_dir.journal)]
    assert record.token_ids.tolist() == [1, 2]


def test_the_scheduler_is_told_of_what_was_seen_and_of_a_complete_group(running: Setup) -> None:
    for number in range(3):
        assert running.deliver(member(number)).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert sorted(running.scheduler.seen) == ["g/0", "g/1", "g/2"]
    groups, stale = running.next_batch()
    assert [t.episode_id for t in groups[0].members] == ["g/0", "g/1", "g/2"]
    assert stale == []


def test_a_duplicate_is_acknowledged_counted_and_not_written_again(running: Setup) -> None:
    for _ in range(3):
        assert running.deliver(member(0)).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.num_duplicates == 2)
    assert running.journaled() == ["g/0"]
    assert running.scheduler.seen == ["g/0"]
    assert running.intake.drain_stats()["inbox/duplicates"] == 2


def test_a_refused_trajectory_is_answered_with_its_reason_and_never_arrives(
    running: Setup,
) -> None:
    bad = replace(member(2), logprobs=np.array([0, np.nan], dtype=np.float32))
    ack = running.deliver(bad)
    assert not ack.is_accepted
    assert ack.reason == "a sampled token has no finite logprob"
    assert running.journaled() == []
    for number in range(2):
        running.deliver(member(number))
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert running.scheduler.outcomes == {"g/2": ("failed", "refused")}
    assert running.intake.drain_stats()["inbox/refused"] == 1


def test_a_token_that_the_policy_does_not_have_never_reaches_the_journal(running: Setup) -> None:
    bad = replace(member(0), token_ids=np.array([1, VOCAB_SIZE], dtype=np.int32))
    ack = running.deliver(bad)
    assert ack.reason == "token id 100 of a vocabulary of 100"
    assert running.journaled() == []


@pytest.mark.parametrize("is_at_new_address", [True, False])
def test_a_scheduler_that_comes_back_is_told_everything_again(
    running: Setup, is_at_new_address: bool
) -> None:
    scheduler = running.scheduler
    running.intake.step_done(1, is_last=False, max_ahead_steps=1, signals={"entropy": 0.5})
    for number in range(3):
        running.deliver(member(number))
    running.deliver(replace(member(0, group_id="eval-0"), kind=EpisodeKind.EVAL))
    told = {"g/0", "g/1", "g/2", "eval-0/0"}
    scheduler.pump_until(lambda: set(scheduler.seen) == told)
    scheduler.start("epoch-2", is_at_new_address=is_at_new_address)
    scheduler.pump_until(lambda: set(scheduler.seen) == told and scheduler.groups == {"g": True})
    assert HELLO in scheduler.heard
    done = StepDone(version=1, is_last=False, max_ahead_steps=1, signals={"entropy": 0.5})
    steps = [message for message in scheduler.heard if isinstance(message, StepDone)]
    assert [replace(message, number=0) for message in steps] == [done]
    assert len(scheduler.seen) == 4


def test_nothing_is_told_twice_to_the_same_scheduler(running: Setup) -> None:
    scheduler = running.scheduler
    for number in range(2):
        running.deliver(member(number))
        scheduler.pump_until(lambda: len(scheduler.seen) > 0)
    scheduler.pump_until(lambda: len(scheduler.seen) == 2)
    scheduler.pump_beats(3)
    assert scheduler.seen == ["g/0", "g/1"]


def test_what_a_scheduler_has_saved_is_not_told_to_the_one_that_follows(running: Setup) -> None:
    scheduler = running.scheduler
    running.intake.step_done(1, is_last=False, max_ahead_steps=1, signals={})
    running.deliver(member(0))
    scheduler.pump_until(lambda: scheduler.seen == ["g/0"])
    scheduler.told.save(closed_below=0)
    scheduler.pump_beats(2)
    running.deliver(member(1))
    scheduler.pump_until(lambda: scheduler.seen == ["g/0", "g/1"])
    scheduler.start("epoch-2")
    scheduler.pump_until(lambda: len(scheduler.seen) > 0)
    scheduler.pump_beats(2)
    assert scheduler.seen == ["g/1"]
    assert not any(isinstance(message, StepDone) for message in scheduler.heard)


def test_message_that_was_lost_on_the_way_is_told_again(tmp_path: Path) -> None:
    setup = Setup(tmp_path, silence_s=0.5)
    try:
        setup.intake.start()
        setup.scheduler.pump_beats(1)
        setup.scheduler.num_to_lose = 1
        for number in range(3):
            setup.deliver(member(number))
            setup.scheduler.pump_beats(1)
        setup.scheduler.pump_until(lambda: set(setup.scheduler.seen) == {"g/0", "g/1", "g/2"})
        assert setup.scheduler.heard.count(HELLO) == 2
        setup.scheduler.pump_beats(40)  # longer than the silence: all is well now
        assert setup.scheduler.heard.count(HELLO) == 2
    finally:
        setup.close()


def test_late_episode_of_a_group_that_is_settled_for_good_is_a_duplicate(running: Setup) -> None:
    running.deliver(member(0, group_id="g0000003"))
    running.scheduler.told.save(closed_below=4)
    running.scheduler.pump_beats(2)
    assert running.deliver(member(1, group_id="g0000003")).is_accepted
    assert running.deliver(member(1, group_id="g0000004")).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.num_duplicates == 1)
    assert running.journaled() == ["g0000003/0", "g0000004/1"]


def test_scheduler_that_lost_its_memory_is_an_error_and_not_a_silent_wait(running: Setup) -> None:
    running.scheduler.told.save(closed_below=4)
    running.scheduler.pump_beats(2)
    running.scheduler.told.save(closed_below=2)
    running.scheduler.pump_until(lambda: not running.intake.is_alive())
    with pytest.raises(LongstrideError, match=r"number 2 on.*below 4 were settled.*scheduler.json"):
        running.next_batch()


def test_members_that_the_scheduler_gave_up_complete_a_group(running: Setup) -> None:
    for number in (0, 2):
        running.deliver(member(number))
    running.scheduler.revoked = ["g/1"]
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    groups, _ = running.next_batch()
    assert [t.member for t in groups[0].members] == [0, 2]
    assert running.deliver(member(1)).is_accepted
    running.scheduler.pump_until(lambda: "g/1" in running.scheduler.outcomes)
    assert running.scheduler.outcomes["g/1"] == ("failed", "late")
    assert running.intake.drain_stats()["groups/open"] == 0


def test_an_evaluation_is_written_and_told_and_in_no_group(running: Setup) -> None:
    for number in range(3):
        running.deliver(replace(member(number), kind=EpisodeKind.EVAL))
    running.scheduler.pump_until(lambda: len(running.scheduler.seen) == 3)
    assert len(running.journaled()) == 3
    metrics = running.intake.drain_stats()
    assert metrics["groups/ready"] == metrics["groups/open"] == metrics["episodes/arrived"] == 0


def test_slots_of_the_actors_are_a_metric_once_the_scheduler_has_said_how_many(
    running: Setup,
) -> None:
    assert "actor/concurrency" not in running.intake.drain_stats()
    running.scheduler.num_slots = 48

    def told() -> bool:
        return running.intake.drain_stats().get("actor/concurrency") == 48.0

    running.scheduler.pump_until(told)


def test_something_else_than_a_trajectory_is_rejected(running: Setup) -> None:
    running.actor.send_multipart(encode(HELLO))
    answer = decode(running.actor.recv_multipart())
    assert answer == Rejected(reason="Hello is no trajectory")
    assert running.deliver(member(0)).is_accepted


def test_a_batch_that_does_not_come_is_an_error_that_says_what_there_is(running: Setup) -> None:
    running.deliver(member(0))
    running.scheduler.pump_until(lambda: running.scheduler.seen == ["g/0"])
    with pytest.raises(TimeoutError, match="0 groups ready, 1 waiting"):
        running.next_batch(timeout_s=0.01)


def test_what_grew_stale_before_a_timeout_is_told_and_comes_with_the_next_batch(
    running: Setup,
) -> None:
    scheduler = running.scheduler
    for number in range(3):
        running.deliver(member(number, group_id="old"))
    scheduler.pump_until(lambda: scheduler.groups == {"old": True})
    with pytest.raises(TimeoutError):
        running.next_batch(5, timeout_s=0.01)
    scheduler.pump_until(lambda: len(scheduler.outcomes) == 3)
    assert scheduler.outcomes["old/0"] == ("stale", "lag")
    running.intake.step_done(5, is_last=False, max_ahead_steps=1, signals={})
    for number in range(3):
        running.deliver(member(number, group_id="new", version=5))
    groups, stale = running.next_batch(5)
    assert groups[0].group_id == "new"
    assert [o.episode_id for o in stale] == ["old/0", "old/1", "old/2"]


def test_a_failure_of_the_thread_is_raised_in_the_main_thread(running: Setup) -> None:
    running.scheduler.rejects = True
    running.scheduler.pump_until(lambda: len(running.scheduler.heard) > 0)
    with pytest.raises(LongstrideError, match="the scheduler refused a message: no"):
        running.next_batch()


def test_the_end_of_the_run_is_heard(running: Setup) -> None:
    running.scheduler.pump_until(lambda: len(running.scheduler.heard) > 1)
    assert not running.intake.wait_finished(timeout_s=0.01)
    running.scheduler.is_finished = True
    ended = threading.Thread(target=lambda: running.intake.wait_finished(timeout_s=5.0))
    ended.start()
    running.scheduler.pump_until(lambda: not ended.is_alive())
    assert running.intake.wait_finished(timeout_s=0.0) or running.intake.is_finished


def test_adopted_episodes_are_known_and_go_where_they_belong(setup: Setup) -> None:
    scheduler = setup.scheduler
    failed = replace(member(1, group_id="done"), end_reason=EndReason.ENV_ERROR)
    trained = EpisodeOutcome(episode_id="done/0", outcome=Outcome.TRAINED, cause="")
    setup.intake.adopt_outcomes([trained])
    setup.intake.adopt(failed, JOURNAL_START, step=None)
    setup.intake.adopt(member(0, group_id="done"), JOURNAL_START, step=1)
    setup.intake.adopt(member(2, group_id="done"), JOURNAL_START, step=1)
    for number in range(2):
        setup.intake.adopt(member(number, group_id="open"), JOURNAL_START, step=None)
    setup.intake.start()
    assert setup.deliver(member(0, group_id="open")).is_accepted
    setup.deliver(member(2, group_id="open"))
    scheduler.pump_until(lambda: scheduler.groups == {"done": True, "open": True})
    assert scheduler.outcomes == {"done/0": ("trained", ""), "done/1": ("failed", "env_error")}
    assert scheduler.num_duplicates == 1
    assert setup.journaled() == ["open/2"]
    groups, _ = setup.next_batch()
    assert [group.group_id for group in groups] == ["open"]
