"""Laws of the processes in which functions of the user run."""

import asyncio
import datetime
import decimal
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.functions.calls import (
    MAX_WAIT_S,
    NUM_WARM,
    Caller,
    Ungraded,
    UserFunction,
    load_function,
)
from common.functions.process import pack, unpack
from common.repository import ROOT
from envhub.env import EnvFailure
from envhub.envs.dataset.rewards import RewardTerm
from tests.envhub.envs.dataset.made import make, played, run

FUNCTIONS = """
import asyncio
import os
import re
import time


def right(completion):
    return completion == "7"


def backtracks(completion):
    return bool(re.fullmatch(r"(a+)+b", completion))


async def waits(completion):
    if completion == "block":
        time.sleep(60)
    await asyncio.sleep(0.1)
    return 1.0


def sleeps(completion):
    time.sleep(60)


def dies(completion):
    os._exit(3)


def allocates(completion):
    block = bytearray(1 << 29)
    for i in range(0, len(block), 4096):
        block[i] = 1
    time.sleep(60)


def counts(completion, state):
    state["seen"] = {*state.get("seen", set()), completion}
    state.pop("first", None)
    return len(state["seen"])


def keeps_a_file(completion, state):
    state["file"] = open(os.devnull)


def kinds(record):
    return {name: type(value).__name__ for name, value in record.items()}
"""
LOCKED = "a" * 40  # The pattern of `backtracks` needs hours for it.


def loaded(folder: Path, name: str) -> UserFunction:
    """Return a function of FUNCTIONS."""
    (folder / "own.py").write_text(FUNCTIONS, encoding="utf-8")
    return load_function("reward", f"{folder}/own.py:{name}")


def test_call_that_holds_the_lock_stops_no_other_call(tmp_path: Path) -> None:
    function = loaded(tmp_path, "backtracks")
    caller = Caller([function])

    async def answers() -> tuple[list[Any], float]:
        await caller.prepare()
        locked = [
            asyncio.create_task(caller.call(function, {"completion": LOCKED}, timeout_s=2.0))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        began_s = time.monotonic()
        values = [await caller.call(function, {"completion": "ab"}, timeout_s=60) for _ in range(9)]
        took_s = time.monotonic() - began_s
        failures = await asyncio.gather(*locked, return_exceptions=True)
        return [*(each.value for each in values), *failures], took_s

    try:
        (*values, first, second), _ = run(answers())
    finally:
        caller.close()
    assert values == [True] * 9
    assert isinstance(first, Ungraded)
    assert isinstance(second, Ungraded)
    assert str(first) == "no answer within 2 s, its time limit"


@pytest.mark.slow
def test_asynchronous_call_that_blocks_is_the_only_one_to_fail(tmp_path: Path) -> None:
    function = loaded(tmp_path, "waits")
    caller = Caller([function])

    async def answers() -> list[Any]:
        texts = ["a", "block", "b", "c"]
        calls = [caller.call(function, {"completion": text}, timeout_s=15.0) for text in texts]
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        first, blocked, *others = run(answers())
    finally:
        caller.close()
    assert [first.value, *(each.value for each in others)] == [1.0, 1.0, 1.0]
    assert isinstance(blocked, Ungraded)


@pytest.mark.parametrize(
    ("name", "words"),
    [("dies", "it closed its connection"), ("allocates", "its process held more than 0.2 GiB")],
)
def test_function_that_ends_its_process_is_named(tmp_path: Path, name: str, words: str) -> None:
    functions = [loaded(tmp_path, name), loaded(tmp_path, "right")]
    caller = Caller(functions, memory_bytes=1 << 28)

    async def answers() -> Any:
        with pytest.raises(Ungraded, match=words):
            await caller.call(functions[0], {"completion": "7"}, timeout_s=30.0)
        return (await caller.call(functions[1], {"completion": "7"}, timeout_s=30.0)).value

    try:
        assert run(answers()) is True
    finally:
        caller.close()


def test_state_of_an_episode_follows_it_through_processes(tmp_path: Path) -> None:
    functions = [loaded(tmp_path, "counts"), loaded(tmp_path, "keeps_a_file")]
    caller = Caller(functions)
    state: dict[str, Any] = {"first": True}

    async def answers() -> list[Any]:
        offered = [{"completion": text, "state": state} for text in ("a", "b", "a")]
        values = [(await caller.call(functions[0], o, timeout_s=60)).value for o in offered]
        with pytest.raises(EnvFailure, match=r"state\['file'\]: TextIOWrapper cannot be sent"):
            await caller.call(functions[1], offered[0], timeout_s=60)
        return values

    try:
        assert run(answers()) == [1, 2, 2]
    finally:
        caller.close()
    assert state == {"seen": {"a", "b"}}


def test_value_of_a_record_keeps_its_type() -> None:
    record = {
        "day": datetime.date(2026, 1, 2),
        "time": datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC),
        "span": datetime.timedelta(seconds=1.5),
        "price": decimal.Decimal("1.10"),
        "bytes": b"\x00\xff",
        "pairs": [("a", 1)],
        "large": 10**30,
        "names": {1: "x", "__kind__": "y"},
        "text": "\ud800",
        "none": None,
        "infinite": float("-inf"),
    }
    assert unpack(pack(record)) == record
    assert {k: type(v) for k, v in unpack(pack(record)).items()} == {
        k: type(v) for k, v in record.items()
    }


def test_value_that_is_not_finite_crosses_strict_json() -> None:
    sent = json.dumps(pack({"prices": [1.5, float("nan"), np.float32("inf")]}), allow_nan=False)
    prices = unpack(json.loads(sent))["prices"]
    assert str(prices) == "[1.5, nan, inf]"


@pytest.mark.parametrize("package", ["common", "actor", "envhub", "tests", "tools"])
def test_package_of_the_user_is_hidden_by_no_name_of_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "grade.py").write_text(
        "def f(completion):\n    return 1.0\n", encoding="utf-8"
    )
    (tmp_path / "own.py").write_text(f"from {package}.grade import f\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert played(make(tmp_path, reward=f"{package}.grade:f"), "7").reward == 1.0
    assert played(make(tmp_path, reward="own.py:f"), "7").reward == 1.0


def test_module_of_the_user_is_hidden_by_no_file_of_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.py").write_text("def f(completion):\n    return 1.0\n", encoding="utf-8")
    (tmp_path / "graders.py").write_text("def f(completion):\n    return 1.0\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert played(make(tmp_path, reward="run:f"), "7").reward == 1.0
    assert played(make(tmp_path, reward="graders:f"), "7").reward == 1.0


def test_function_of_the_user_may_use_the_product(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    code = "from envhub.envs.dataset.graders import exact_number as f\n"
    file.write_text(code, encoding="utf-8")
    assert played(make(tmp_path, reward=f"{file}:f"), "it is 7").reward == 1.0


def test_time_limit_of_a_function_is_worth_its_score(tmp_path: Path) -> None:
    loaded(tmp_path, "backtracks")
    entry = {"function": f"{tmp_path}/own.py:backtracks", "timeout_s": 0.5, "timeout_score": 0.25}
    result = played(make(tmp_path, reward={"match": entry}), LOCKED)
    assert result.reward == 0.25
    assert (result.metrics or {})["reward_match_timeout"] == 1.0
    quick = played(make(tmp_path, reward={"match": entry}), "ab")
    assert (quick.reward, (quick.metrics or {})["reward_match_timeout"]) == (1.0, 0.0)


def test_time_out_without_an_answer_fails_a_shipped_reward(tmp_path: Path) -> None:
    term = RewardTerm(
        name="match",
        user=replace(loaded(tmp_path, "backtracks"), is_shipped=True),
        weight=1.0,
        least=0.0,
        most=1.0,
        timeout_s=0.5,
        retries=0,
        timeout_score=0.0,
    )
    offered = {"messages": [], "num_asked": 0, "completion": LOCKED}
    assert run(term.value(Caller([term.user]), offered, {}, "record 1"))[0] == 0.0
    slow = replace(term, user=replace(loaded(tmp_path, "sleeps"), is_shipped=True))
    with pytest.raises(EnvFailure, match=r"record 1: no answer within.*an empty answer fails, too"):
        run(slow.value(Caller([slow.user]), offered, {}, "record 1"))


def test_file_of_a_package_uses_relative_imports(tmp_path: Path) -> None:
    for folder in ("common", "common/parts"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "common/scores.py").write_text("HALF = 0.5\n", encoding="utf-8")
    code = "from ..scores import HALF\n\n\ndef half(completion):\n    return HALF\n"
    (tmp_path / "common/parts/grade.py").write_text(code, encoding="utf-8")
    reference = f"{tmp_path}/common/parts/grade.py:half"
    assert played(make(tmp_path, reward=reference), "7").reward == 0.5


def test_error_of_a_function_has_its_place(tmp_path: Path) -> None:
    code = "def f(record):\n    return record['unit']\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    function = load_function("reward", f"{tmp_path}/own.py:f")
    caller = Caller([function])
    try:
        with pytest.raises(EnvFailure, match=r"^KeyError: 'unit' \(\w+\.py, line \d+\)$") as caught:
            run(caller.call(function, {"record": {}}, timeout_s=60.0))
    finally:
        caller.close()
    assert f'{tmp_path}/own.py", line 2, in f' in str(caught.value.__cause__)


def test_process_of_a_cancelled_call_gets_no_further_call(tmp_path: Path) -> None:
    function = loaded(tmp_path, "backtracks")
    caller = Caller([function])

    async def answers() -> Any:
        await caller.prepare()
        locked = asyncio.create_task(caller.call(function, {"completion": LOCKED}, timeout_s=60.0))
        await asyncio.sleep(0)
        locked.cancel()
        await asyncio.wait([locked])
        return (await caller.call(function, {"completion": "ab"}, timeout_s=20.0)).value

    try:
        assert run(answers()) is True
    finally:
        caller.close()


SLOW_LIBRARY = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent
(HERE / f"loaded-{os.getpid()}").touch()
if (HERE / "is-broken").exists():
    os._exit(4)
time.sleep(1.5)


def right(completion):
    return completion == "7"
"""


@pytest.mark.slow
def test_calls_that_wait_for_a_slow_library_start_no_crowd_of_processes(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LIBRARY, encoding="utf-8")
    function = load_function("reward", f"{tmp_path / 'slow.py'}:right")
    num_before = len(list(tmp_path.glob("loaded-*")))
    caller = Caller([function])

    async def call() -> bool:
        return (await caller.call(function, {"completion": "7"}, timeout_s=60)).value

    async def call_all() -> list[bool]:
        return await asyncio.gather(*(call() for _ in range(40)))

    try:
        assert asyncio.run(call_all()) == [True] * 40
    finally:
        caller.close()
    assert len(list(tmp_path.glob("loaded-*"))) - num_before <= NUM_WARM


SLOW_START = """
import time
from pathlib import Path

START = Path(__file__).with_name("start")
if START.exists():
    time.sleep(WAIT_S + 1)


def sleeps(seconds):
    time.sleep(seconds)
    return 1.0
"""


@pytest.mark.slow
def test_wait_for_a_process_that_starts_is_no_wait_for_busy_ones(tmp_path: Path) -> None:
    code = SLOW_START.replace("WAIT_S", f"{MAX_WAIT_S}")
    (tmp_path / "slow.py").write_text(code, encoding="utf-8")
    function = load_function("reward", f"{tmp_path / 'slow.py'}:sleeps")
    caller = Caller([function])

    async def call(seconds: float) -> float:
        return (await caller.call(function, {"seconds": seconds}, timeout_s=60)).value

    async def call_all() -> list[float]:
        await caller.prepare()
        (tmp_path / "start").touch()
        # The first call is longer than the start of the processes that the others await.
        calls = [call(MAX_WAIT_S + 4)]
        calls += [call(1.0) for _ in range(NUM_WARM + 1)]
        return await asyncio.gather(*calls)

    try:
        assert asyncio.run(call_all()) == [1.0] * (NUM_WARM + 2)
    finally:
        caller.close()


def test_process_that_cannot_start_is_a_failure_and_no_score(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_LIBRARY.replace("1.5", "0"), encoding="utf-8")
    function = load_function("reward", f"{tmp_path / 'slow.py'}:right")
    (tmp_path / "is-broken").touch()
    caller = Caller([function])
    try:
        with pytest.raises(EnvFailure, match="process cannot start") as caught:
            asyncio.run(caller.call(function, {"completion": "7"}, timeout_s=60))
    finally:
        caller.close()
    assert not isinstance(caught.value, Ungraded)  # Such a failure would be worth a score.
