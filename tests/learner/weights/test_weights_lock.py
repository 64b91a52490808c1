"""Laws of the gate: transfers read a version, and no update changes it under them."""

import threading
import time
from functools import partial

from learner.weights.weights_lock import WeightsLock, WeightsReadLock

LONG_S = 20.0


def closing(gate: WeightsLock) -> threading.Thread:
    thread = threading.Thread(target=gate.close, daemon=True)
    thread.start()
    deadline = time.monotonic() + LONG_S
    while not gate.writer_waiting and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread


def test_gate_admits_readers_only_for_a_stable_version() -> None:
    gate = WeightsLock(timeout_s=LONG_S)
    assert not gate.enter()
    gate.open()
    assert gate.enter()
    gate.leave()
    gate.close()
    assert not gate.enter()


def test_update_waits_for_readers_and_blocks_new_ones() -> None:
    gate = WeightsLock(timeout_s=LONG_S)
    gate.open()
    assert gate.enter()
    assert gate.enter()
    thread = closing(gate)
    assert not gate.enter(), "the trainer waits"
    gate.leave()
    thread.join(0.05)
    assert thread.is_alive()
    assert not gate.readers_must_abort
    gate.leave()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert gate.drain_waited_s() >= 0.05
    assert gate.drain_waited_s() == 0.0


def test_slow_readers_are_aborted_by_timeout_or_stop() -> None:
    for timeout_s, is_stopping in ((0.01, False), (LONG_S, True)):
        gate = WeightsLock(timeout_s=timeout_s, is_stopping=partial(bool, is_stopping))
        gate.open()
        reading = WeightsReadLock(gate, is_live=True, is_held=False, is_optional=False)
        assert reading.begin()
        thread = closing(gate)
        deadline = time.monotonic() + LONG_S
        while not reading.must_end and time.monotonic() < deadline:
            time.sleep(0.001)
        assert reading.must_end
        reading.end()
        reading.end()  # Repeated calls are allowed.
        thread.join(LONG_S)
        assert not thread.is_alive()
        assert not reading.begin()
        assert reading.is_lost


def test_late_reader_yields_and_a_copy_needs_no_gate() -> None:
    gate = WeightsLock(timeout_s=LONG_S)
    gate.open()
    late = WeightsReadLock(gate, is_live=True, is_held=False, is_optional=True)
    assert late.begin()
    assert not late.must_not_wait
    thread = closing(gate)
    assert late.must_not_wait
    assert not late.must_end, "a transfer that has begun may end"
    late.end()
    thread.join(LONG_S)
    copy = WeightsReadLock(gate, is_live=False, is_held=False, is_optional=True)
    assert copy.begin()
