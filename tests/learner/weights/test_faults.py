"""Laws of engines that hang, are slow or are cut off: other engines keep their pace."""

import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest

from common.wire.security import RunKeys
from learner.weights.publisher import Publisher
from learner.weights.receivers import EngineMember, Membership
from tests.bounds import at_most
from tests.learner.weights.test_publisher import (
    PATIENCE_S,
    Launch,
    Start,
    eventually,
    keys,
    make_weights,
    publisher,
    start_actor,
    start_process,
    timeout_s,
)
from tests.learner.weights.toy_actor import HOST, SLOW_S, Actor

__all__ = ["keys", "publisher", "start_actor", "start_process", "timeout_s"]  # fixtures

pytestmark = [pytest.mark.slow, pytest.mark.timed]  # each waits for missing heartbeats

QUICK_S = 2.5  # The limit without a wait: less than PATIENCE_S.


def publish(publisher: Publisher, version: int) -> float:
    """Publish like async training; return the seconds until training can continue."""
    started = time.monotonic()
    publisher.begin(make_weights(version))
    publisher.wait_done()
    return time.monotonic() - started


@pytest.mark.parametrize("habit", ["mute", "busy", "quiet", "silent"])
def test_hanging_engine_delays_one_version_by_heartbeats(
    publisher: Publisher, start_actor: Start, habit: str
) -> None:
    publisher.publish(make_weights(0))
    start_actor("bad", habit=habit)
    good = start_actor("good")
    assert publish(publisher, 1) < at_most(PATIENCE_S + QUICK_S)
    for version in (2, 3, 4):
        assert publish(publisher, version) < at_most(QUICK_S), "it is waited for once"
    assert good.loaded == [0, 1, 2, 3, 4]


def test_successively_hanging_engines_end_no_run(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    for number in (1, 2, 3):
        start_actor(f"bad-{number}", habit="busy", odd_from=number)
    good = start_actor("good")
    for version in (1, 2, 3):
        assert publish(publisher, version) < at_most(PATIENCE_S + QUICK_S)
    assert publish(publisher, 4) < at_most(QUICK_S)
    assert good.loaded == [0, 1, 2, 3, 4]


def test_slow_engine_delays_no_version_and_gets_the_newest(
    publisher: Publisher, start_actor: Start
) -> None:
    publisher.publish(make_weights(0))
    slow, good = start_actor("slow", habit="slow"), start_actor("good")
    assert publish(publisher, 1) < at_most(PATIENCE_S + QUICK_S)
    assert publish(publisher, 2) < at_most(QUICK_S)
    assert good.loaded == [0, 1, 2]
    assert slow.wait_for(1) == 1.0
    assert slow.wait_for(2) == 2.0


def test_lockstep_waits_for_a_slow_engine(publisher: Publisher, start_actor: Start) -> None:
    publisher.publish(make_weights(0))
    slow = start_actor("slow", habit="slow")
    started = time.monotonic()
    publisher.publish(make_weights(1))
    assert time.monotonic() - started > SLOW_S - QUICK_S
    assert slow.loaded == [0, 1]


@pytest.mark.parametrize("habit", ["reconnect", "lose"])
def test_messages_lost_with_connection_are_resent(
    publisher: Publisher, start_actor: Start, habit: str, caplog: pytest.LogCaptureFixture
) -> None:
    publisher.publish(make_weights(0))
    bad, good = start_actor("bad", habit=habit), start_actor("good")
    assert publish(publisher, 1) < at_most(PATIENCE_S)
    assert eventually(lambda: bad.loaded == [0, 1])
    assert good.loaded == [0, 1]
    if habit == "lose":
        assert not [r for r in caplog.records if r.levelname == "ERROR"]


class Cable:
    """A TCP proxy to a port with connections that can be reset or cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self.is_cut = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            ends = (near, socket.create_connection((HOST, self._to)))
            self._ends += ends
            for here, there in (ends, ends[::-1]):
                threading.Thread(target=self._carry, args=(here, there), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(65536):
                if not self.is_cut.is_set():
                    there.sendall(data)
        except OSError:
            return

    def reset(self) -> None:
        """Send RST on both sides of every connection."""
        ends, self._ends = self._ends, []
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.shutdown(socket.SHUT_RD)  # the thread that reads it would keep it open
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.reset()


@pytest.fixture
def cable(publisher: Publisher) -> Iterator[Cable]:
    cable = Cable(publisher.port)
    yield cable
    cable.close()


@pytest.fixture
def far(publisher: Publisher, cable: Cable, keys: RunKeys) -> Iterator[Actor]:
    """An engine at the other end of the cable, which has version 0."""
    publisher.publish(make_weights(0))
    far = Actor(keys, cable.port, "far")
    far.start()
    far.wait_for(0)
    yield far
    far.stop()


def test_engine_reconnects_after_a_reset(
    publisher: Publisher, start_actor: Start, far: Actor, cable: Cable
) -> None:
    good = start_actor("good")
    for version in (1, 2):
        cable.reset()
        assert publish(publisher, version) < at_most(QUICK_S)
        assert far.wait_for(version) == version
    assert good.loaded == [0, 1, 2]


def test_cut_off_engine_rejoins(
    publisher: Publisher, start_actor: Start, far: Actor, cable: Cable
) -> None:
    good = start_actor("good")
    cable.is_cut.set()
    assert publish(publisher, 1) < at_most(PATIENCE_S + QUICK_S)
    assert publish(publisher, 2) < at_most(QUICK_S)
    assert far.loaded == [0]
    cable.is_cut.clear()
    cable.reset()  # Half of the bytes in flight are lost, so this connection is unusable.
    assert far.wait_for(2) == 2.0
    assert good.loaded == [0, 1, 2]


def test_resumed_process_soon_has_newest_version(
    publisher: Publisher, start_actor: Start, start_process: Launch
) -> None:
    publisher.publish(make_weights(0))
    start_actor("good")
    process = start_process("bad", "")
    assert process.pid is not None
    publisher.publish(make_weights(1))  # It returns once both engines have reported the version.
    os.kill(process.pid, signal.SIGSTOP)
    assert publish(publisher, 2) < at_most(PATIENCE_S + QUICK_S)
    assert publisher.drain_metrics()["weights/members"] == 1
    os.kill(process.pid, signal.SIGCONT)
    assert eventually(lambda: publisher.drain_metrics()["weights/members"] == 2)
    assert publish(publisher, 3) < at_most(QUICK_S)
    assert publisher.drain_metrics()["weights/members"] == 2


def member(name: str) -> EngineMember:
    return EngineMember(sender=name.encode(), actor=name, incarnation=f"{name}-1", devices=("",))


def test_suspended_learner_removes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    members = Membership(silent_after_s=5.0)
    for name in ("a", "b"):
        members.hear(member(name), version=-1, current_version=0)
    now[0] += 60.0  # stopped
    members.forget_silent()
    assert [each.actor for each in members.present()] == ["a", "b"]
    for before, after in pairwise((0.0, 2.0, 4.0, 6.0)):
        now[0] += after - before
        members.hear(member("a"), version=0, current_version=0)
        members.forget_silent()
    assert [each.actor for each in members.present()] == ["a"]
    assert members.no_engine_s == 0.0
    members.remove(member("a"), reason="it left")
    now[0] += 7.0
    assert members.no_engine_s == 7.0
