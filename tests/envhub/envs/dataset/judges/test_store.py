"""Laws of the kept answers and totals of a judge."""

import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from envhub.envs.dataset.judges.judge import Answer, JudgeStore


def test_totals_of_two_processes_share_one_limit(tmp_path: Path) -> None:
    first, second = (JudgeStore(tmp_path / "j.sqlite") for _ in range(2))
    assert [first.add("calls", most=3), second.add("calls", most=3)] == [True, True]
    assert [first.add("calls", most=3), second.add("calls", most=3)] == [True, False]
    assert first.add("calls", -1)
    assert second.add("calls", most=3)
    assert (first.total("calls"), first.total("other")) == (3, 0)
    first.close()
    second.close()


def test_newest_answers_are_kept() -> None:
    store = JudgeStore(None)
    for number in range(5):
        store.keep(f"k{number}", Answer(text=f"t{number}", prompt_tokens=number))
    store.keep("k0", Answer(text="again"))
    store.prune(2)
    found = {f"k{n}" for n in range(5) if store.find(f"k{n}") is not None}
    assert found == {"k0", "k4"}
    assert store.find("k4") == Answer(text="t4", prompt_tokens=4)
    store.close()


def test_store_waits_for_a_process_that_makes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("begin immediate")
        timer = threading.Timer(0.2, other.execute, ["commit"])
        timer.start()
        store = JudgeStore(path)
        timer.join()
        assert store.add("calls")
        store.close()
