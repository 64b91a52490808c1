"""Laws of the weights lock: transfers read a version, and no update changes it under them."""

import threading
import time
from functools import partial

from learner.weights.lock import WeightsLock, WeightsReadLock

LONG_S = 20.0


def closing(weights_lock: WeightsLock) -> threading.Thread:
    thread = threading.Thread(target=weights_lock.close, daemon=True)
    thread.start()
    deadline = time.monotonic() + LONG_S
    while not weights_lock.writer_waiting and thread.is_alive() and time.monotonic() < deadline:
        time.sleep(0.001)
    return thread


def test_lock_admits_readers_only_for_a_stable_version() -> None:
    weights_lock = WeightsLock(timeout_s=LONG_S)
    assert not weights_lock.enter()
    weights_lock.open()
    assert weights_lock.enter()
    weights_lock.leave()
    weights_lock.close()
    assert not weights_lock.enter()


def test_update_waits_for_readers_and_blocks_new_ones() -> None:
    weights_lock = WeightsLock(timeout_s=LONG_S)
    weights_lock.open()
    assert weights_lock.enter()
    assert weights_lock.enter()
    thread = closing(weights_lock)
    assert not weights_lock.enter(), "the trainer waits"
    weights_lock.leave()
    thread.join(0.05)
    assert thread.is_alive()
    assert not weights_lock.readers_must_abort
    weights_lock.leave()
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert weights_lock.drain_waited_s() >= 0.05
    assert weights_lock.drain_waited_s() == 0.0


def test_slow_readers_are_aborted_by_timeout_or_stop() -> None:
    for timeout_s, is_stopping in ((0.01, False), (LONG_S, True)):
        weights_lock = WeightsLock(timeout_s=timeout_s, is_stopping=partial(bool, is_stopping))
        weights_lock.open()
        reading = WeightsReadLock(weights_lock, is_live=True, is_held=False, is_optional=False)
        assert reading.begin()
        thread = closing(weights_lock)
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


def test_late_reader_yields_and_a_copy_needs_no_lock() -> None:
    weights_lock = WeightsLock(timeout_s=LONG_S)
    weights_lock.open()
    late = WeightsReadLock(weights_lock, is_live=True, is_held=False, is_optional=True)
    assert late.begin()
    assert not late.must_not_wait
    thread = closing(weights_lock)
    assert late.must_not_wait
    assert not late.must_end, "a transfer that has begun may end"
    late.end()
    thread.join(LONG_S)
    copy = WeightsReadLock(weights_lock, is_live=False, is_held=False, is_optional=True)
    assert copy.begin()
