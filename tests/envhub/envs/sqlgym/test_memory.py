"""Laws of the memory that the sessions of a process share."""

import sqlite3
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from common.config.envs import EnvsSection
from envhub.env import EnvFailure, Style
from envhub.envs.sqlgym.env import make_spec
from envhub.envs.sqlgym.generated import image, questions
from envhub.envs.sqlgym.memory import MEMORY, SharedMemory
from envhub.envs.sqlgym.query import Database, StatementLimits, open_image, rows_of
from tests.configs import edited
from tests.envhub.envs.sqlgym.pets import answered, played

HELD_S = 120.0  # The longest wait of a test.
GREEDY = (
    "CREATE TEMP TABLE t AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT hex(zeroblob(90000)) FROM n"
)


def an_empty_one() -> Database:
    plain = sqlite3.connect(":memory:")
    plain.execute("CREATE TABLE unused (i)")
    content = plain.serialize()
    plain.close()
    return open_image(content)


@contextmanager
def filled_by_another(threads: ThreadPoolExecutor):
    """Yield what lets go of the memory that a statement of another session holds to the last."""
    is_full, may_end = threading.Event(), threading.Event()
    connection = an_empty_one()

    def fill() -> None:
        connection.execute("CREATE TEMP TABLE t (b)")
        for size in (100_000, 1_000, 10):
            try:
                while True:
                    connection.execute("INSERT INTO t VALUES (zeroblob(?))", (size,))
            except MemoryError:
                continue
        is_full.set()
        may_end.wait(HELD_S)
        connection.close()

    holding = threads.submit(MEMORY.used, fill)
    try:
        assert is_full.wait(60)
        yield may_end
    finally:
        may_end.set()
        holding.result(HELD_S)


def is_waiting(future: Future) -> bool:
    with pytest.raises(TimeoutError):
        future.result(0.3)
    return True


@pytest.mark.parametrize("is_known", [True, False])
def test_session_without_memory_waits_for_the_running_statement(spec, is_known):
    played(spec, "easy-test-0", Style.COMPACT)
    if not is_known:  # The worker plays its first item of a split.
        questions.cache_clear()
        image.cache_clear()
    with ThreadPoolExecutor(3) as threads, filled_by_another(threads) as may_end:
        opened = threads.submit(played, spec, "easy-test-0", Style.COMPACT)
        assert is_waiting(opened)
        may_end.set()
        assert opened.result(HELD_S) == 1.0


def test_statement_out_of_memory_reruns_alone():
    spec = make_spec(edited(EnvsSection(), {"sqlgym.query_timeout_s": 30.0}))
    played(spec, "easy-test-0", Style.COMPACT)
    with ThreadPoolExecutor(4) as threads, filled_by_another(threads) as may_end:
        greedy = threads.submit(answered, spec, "easy-test-0", GREEDY)
        modest = threads.submit(answered, spec, "easy-test-0", "SELECT 1")
        assert is_waiting(greedy)
        assert is_waiting(modest)
        may_end.set()
        assert greedy.result(HELD_S).observation == "Error: out of memory"
        assert modest.result(HELD_S).observation == "[(1,)]"


def test_memory_wait_times_out_once_by_name():
    memory, is_used, may_end = SharedMemory(wait_s=0.2), threading.Event(), threading.Event()

    def lacking() -> None:
        raise MemoryError

    with ThreadPoolExecutor(1) as threads:
        holding = threads.submit(memory.used, lambda: is_used.set() or may_end.wait(HELD_S))
        assert is_used.wait(20)
        with pytest.raises(EnvFailure, match="occupied the memory"):
            memory.used(lacking)
        assert memory.used(lambda: 7) == 7
        may_end.set()
        holding.result(HELD_S)
    with pytest.raises(MemoryError):
        memory.used(lacking)
    assert memory.used(lambda: 7) == 7


def test_last_statement_discards_its_tables():
    connection, limits = an_empty_one(), StatementLimits(timeout_s=1.0, max_rows=1)
    assert rows_of(connection, "SELECT 1", limits) == [(1,)]
    assert rows_of(connection, "CREATE TEMP TABLE t AS SELECT 1", limits, is_last=True) == []
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT * FROM t")
