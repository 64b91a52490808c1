"""Laws of errors that a restart does not mend: the run ends at once, in one line."""

import signal
from pathlib import Path

import pytest

from tests.tools.launch.test_launch import STAY, launch, role
from tools.launch.base import RoleSpec
from tools.launch.permanent_errors import PermanentError, permanent_error

TRACE = ["Traceback (most recent call last):", '  File "x.py", line 3, in step']


@pytest.mark.parametrize(
    ("lines", "code", "text", "is_certain"),
    [
        (["TypeError: f() got an unexpected keyword argument 'a'"], 1, None, True),
        (["RuntimeError: Unrecognized key 'a' in CUDA allocator config"], 1, None, True),
        (["RuntimeError: shapes differ: 3 and 4"], 1, None, False),
        (["common.errors.EngineError: engine died"], 1, "EngineError: engine died", False),
        (["KeyError: 'a'", "a library says goodbye"], 1, "KeyError: 'a'", False),
        (["AssertionError"], 1, None, False),
        (["error: EngineError: no room"], 70, "EngineError: no room", False),
    ],
)
def test_permanent_error_is_read_from_the_log(
    lines: list[str], code: int, text: str | None, is_certain: bool
) -> None:
    error = permanent_error([*TRACE, *lines], code)
    assert error is not None
    assert (error.text, error.is_certain) == (text or lines[0], is_certain)


def test_too_many_failures_end_the_run_whatever_their_errors() -> None:
    text = "EpisodesFailed: 16 of the last 16 episodes failed. The most frequent error: timed out"
    error = permanent_error([*TRACE, f"common.errors.{text}"], 1)
    assert error == PermanentError(text, is_certain=True, ends_run=True)


def test_native_crash_is_named_by_its_message() -> None:
    lines = [
        "terminate called after throwing an instance of 'c10::Error'",
        "  what():  Unrecognized key 'x' in CUDA allocator config",
        "Extension modules: numpy, torch (total: 2)",
    ]
    error = permanent_error(lines, -signal.SIGABRT)
    assert error is not None
    assert error.text == f"killed by SIGABRT: {lines[0]}"
    assert error.is_certain


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", 1),
        ("RuntimeError: CUDA out of memory", 1),
        ("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:1')", 1),
        ("RuntimeError: NCCL error: remote process has exited", 1),
        ("common.errors.PeerMissing: no learner within 3s", 1),
        ("ConnectionRefusedError: [Errno 111] Connection refused", 1),
        ("TimeoutError", 1),
        ("TypeError: a", -signal.SIGKILL),
        ("TypeError: a", -signal.SIGTERM),
        ("RuntimeError: CUDA out of memory", -signal.SIGABRT),
        ("TypeError: a", 3),
        ("a library ends", 1),
    ],
)
def test_end_by_machine_or_peer_is_not_permanent(line: str, code: int) -> None:
    assert permanent_error([*TRACE, line], code) is None


DIED = "common.errors.EngineError: engine died: EngineCore"


def test_error_of_a_child_process_is_the_named_cause() -> None:
    quoted = [f"  (EngineCore pid=7) line {i}" for i in range(14)]
    quoted.append("  (EngineCore pid=7) RuntimeError: no kernel for this head size")
    lines = [*TRACE, f"{DIED} exit code 1; its last lines:", *quoted, "a library ends"]
    error = permanent_error(lines, 1)
    assert error is not None
    cause = "RuntimeError: no kernel for this head size"
    assert error.text == f"EngineError: engine died: EngineCore exit code 1; the cause is {cause}"
    assert not error.is_certain


@pytest.mark.parametrize(
    "lines",
    [
        [f"{DIED} killed by SIGKILL"],
        [f"{DIED} exit code 1; its last lines:", "  OutOfMemoryError: CUDA out of memory", "  end"],
    ],
)
def test_killed_child_or_full_memory_is_not_permanent(lines: list[str]) -> None:
    assert permanent_error([*TRACE, *lines], 1) is None


class Results:
    """A watch of a run that has results, or has none."""

    def __init__(self, *, has_worked: bool) -> None:
        self._has_worked = has_worked

    def poll(self, processes: object) -> None: ...
    def progress(self, role: str) -> object: ...

    def has_worked(self, role: str) -> bool:
        return self._has_worked

    def is_over(self) -> bool:
        return False


FAILS = "import sys; open(sys.argv[1], 'a').write('x'); raise eval(sys.argv[2])"


def failing(tmp_path: Path, error: str) -> RoleSpec:
    return role(tmp_path, "learner", FAILS, tmp_path / "starts", error, max_restarts=3)


def num_starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text(encoding="utf-8"))


def test_wrong_version_ends_the_run_at_its_first_error(tmp_path: Path) -> None:
    spec = failing(tmp_path, "TypeError('f() takes 1 argument')")
    ending = launch([role(tmp_path, "hub", STAY), spec], watch=Results(has_worked=False))
    assert num_starts(tmp_path) == 1
    assert ending.exit_code == 1
    assert ending.reason == (
        "learner cannot work: TypeError: f() takes 1 argument. A restart does not mend this error."
        f" Log: {spec.log_path}"
    )


def test_second_identical_error_without_result_ends_the_run(tmp_path: Path) -> None:
    spec = failing(tmp_path, "RuntimeError(f'bad batch {len(open(sys.argv[1]).read())}')")
    ending = launch([spec], watch=Results(has_worked=False))
    assert num_starts(tmp_path) == 2
    assert ending.reason.startswith(
        "learner cannot work: RuntimeError: bad batch 2. It ended twice"
    )
    assert ending.reason.count("\n") == 0


@pytest.mark.parametrize("error", ["TypeError('a')", "RuntimeError('a')"])
def test_role_with_results_is_restarted_after_any_error(tmp_path: Path, error: str) -> None:
    ending = launch([failing(tmp_path, error)], watch=Results(has_worked=True))
    assert num_starts(tmp_path) == 4
    assert "learner failed after 3 restarts: exit code 1" in ending.reason


@pytest.mark.parametrize(
    "error", ["RuntimeError('CUDA out of memory')", "OSError('Address already in use')"]
)
def test_taken_memory_or_port_is_tried_again(tmp_path: Path, error: str) -> None:
    ending = launch([failing(tmp_path, error)], watch=Results(has_worked=False))
    assert num_starts(tmp_path) == 4
    assert "learner failed after 3 restarts: exit code 1" in ending.reason


def test_different_errors_are_counted_as_restarts(tmp_path: Path) -> None:
    spec = failing(tmp_path, "RuntimeError('a' * len(open(sys.argv[1]).read()))")
    launch([spec], watch=Results(has_worked=False))
    assert num_starts(tmp_path) == 4


def test_too_many_failures_are_not_restarted_into(tmp_path: Path) -> None:
    error = "__import__('common.errors').errors.EpisodesFailed('16 failed: no answer')"
    spec = failing(tmp_path, error)
    ending = launch([spec], watch=Results(has_worked=True))
    assert (num_starts(tmp_path), ending.exit_code) == (1, 1)
    assert ending.reason.startswith("learner ends the run: EpisodesFailed: 16 failed: no answer.")
