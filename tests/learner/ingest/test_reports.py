"""Laws of the messages between intake and scheduler."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from common.errors import LongstrideError
from common.wire.messages import EpisodeKind, Goodbye, StepDone
from tests.learner.ingest.intake_rig import HELLO, Setup, member

SAID = replace(HELLO, node=socket.gethostname(), config=0)  # it adds where it is


def test_scheduler_receives_arrivals_and_complete_groups(running: Setup) -> None:
    for number in range(3):
        assert running.deliver(member(number)).is_accepted
    running.scheduler.pump_until(lambda: running.scheduler.groups == {"g": True})
    assert sorted(running.scheduler.seen) == ["g/0", "g/1", "g/2"]
    groups, stale = running.next_batch()
    assert [t.episode_id for t in groups[0].members] == ["g/0", "g/1", "g/2"]
    assert stale == []


@pytest.mark.parametrize("is_at_new_address", [True, False])
def test_restarted_scheduler_receives_all_reports_again(
    running: Setup, is_at_new_address: bool
) -> None:
    scheduler = running.scheduler
    running.buffer.step_done(1, is_last=False, max_ahead_steps=1, signals={"entropy": 0.5})
    for number in range(3):
        running.deliver(member(number))
    running.deliver(replace(member(0, group_id="eval-0"), kind=EpisodeKind.EVAL))
    told = {"g/0", "g/1", "g/2", "eval-0/0"}
    scheduler.pump_until(lambda: set(scheduler.seen) == told)
    scheduler.start("epoch-2", is_at_new_address=is_at_new_address)
    scheduler.pump_until(lambda: set(scheduler.seen) == told and scheduler.groups == {"g": True})
    assert SAID in scheduler.heard
    done = StepDone(version=1, is_last=False, max_ahead_steps=1, signals={"entropy": 0.5})
    steps = [message for message in scheduler.heard if isinstance(message, StepDone)]
    assert [replace(message, number=0) for message in steps] == [done]
    assert len(scheduler.seen) == 4


def test_scheduler_receives_each_report_once(running: Setup) -> None:
    scheduler = running.scheduler
    for number in range(2):
        running.deliver(member(number))
        scheduler.pump_until(lambda: len(scheduler.seen) > 0)
    scheduler.pump_until(lambda: len(scheduler.seen) == 2)
    scheduler.pump_beats(3)
    assert scheduler.seen == ["g/0", "g/1"]


def test_reports_saved_by_a_scheduler_are_not_resent(running: Setup) -> None:
    scheduler = running.scheduler
    running.buffer.step_done(1, is_last=False, max_ahead_steps=1, signals={})
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


def test_lost_message_is_resent_at_the_next_heartbeat(running: Setup) -> None:
    """The silence after which a scheduler is gone, here 30 s, plays no role."""
    scheduler = running.scheduler
    scheduler.pump_beats(1)
    scheduler.num_to_lose = 1
    for number in range(3):
        running.deliver(member(number))
        scheduler.pump_beats(1)
    scheduler.pump_until(lambda: set(scheduler.seen) == {"g/0", "g/1", "g/2"})
    assert scheduler.heard.count(SAID) == 2
    scheduler.pump_beats(40)
    assert scheduler.heard.count(SAID) == 2


def test_scheduler_state_loss_raises_an_error(running: Setup) -> None:
    running.scheduler.told.save(closed_below=4)
    running.scheduler.pump_beats(2)
    running.scheduler.told.save(closed_below=2)
    running.scheduler.pump_until(lambda: not running.intake.is_alive())
    with pytest.raises(
        LongstrideError, match=r"scheduler.json was lost.*number 2, but.*below number 4 are"
    ):
        running.next_batch()


def test_metrics_hold_schedulers_number_of_slots(running: Setup) -> None:
    assert "actor/concurrency" not in running.buffer.drain_stats()
    running.scheduler.num_slots = 48

    def told() -> bool:
        return running.buffer.drain_stats().get("actor/concurrency") == 48.0

    running.scheduler.pump_until(told)


def test_thread_failure_is_raised_in_the_main_thread(running: Setup) -> None:
    running.scheduler.rejects = True
    running.scheduler.pump_until(lambda: not running.intake.is_alive())
    with pytest.raises(LongstrideError, match="The scheduler refused a message of the learner: no"):
        running.next_batch()


def test_the_end_of_the_run_is_heard(running: Setup) -> None:
    running.scheduler.pump_until(lambda: len(running.scheduler.heard) > 1)
    assert not running.buffer.wait_finished(timeout_s=0.01)
    running.scheduler.is_finished = True
    ended = threading.Thread(target=lambda: running.buffer.wait_finished(timeout_s=60.0))
    ended.start()
    running.scheduler.pump_until(lambda: not ended.is_alive())
    assert running.buffer.wait_finished(timeout_s=0.0)


def test_stopping_learner_sends_reports_and_goodbye(running: Setup) -> None:
    running.scheduler.pump_beats(1)
    running.buffer.step_done(1, is_last=True, max_ahead_steps=1, signals={})
    running.intake.stop()
    running.scheduler.pump_until(lambda: isinstance(running.scheduler.heard[-1], Goodbye))
    name, incarnation = HELLO.name, HELLO.incarnation
    goodbye = Goodbye(role="learner", name=name, incarnation=incarnation)
    assert running.scheduler.heard[-1] == goodbye
    assert any(isinstance(message, StepDone) for message in running.scheduler.heard)


def test_failed_learner_sends_no_goodbye(running: Setup) -> None:
    running.scheduler.rejects = True
    running.scheduler.pump_until(lambda: not running.intake.is_alive())
    running.scheduler.rejects = False
    running.intake.join(60.0)
    ends = time.monotonic() + 0.2
    running.scheduler.pump_until(lambda: time.monotonic() > ends)
    assert not any(isinstance(message, Goodbye) for message in running.scheduler.heard)
