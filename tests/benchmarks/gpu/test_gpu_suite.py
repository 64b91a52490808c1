"""Laws of the suite `gpu`: its order, limits and results, and every check, small, on the CPU."""

import importlib.util
import io
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.command import bench
from benchmarks.gpu import worker
from benchmarks.gpu.checks import count_calls, random_shape
from benchmarks.gpu.plan import CHECKS, GpuCheck, choose, why_left_out
from benchmarks.gpu.suite import CheckProgress, CheckRun, ResultLines, SuiteRequest, run_suite
from benchmarks.learner.batch import BatchShape
from benchmarks.learner.checks.bench import ON_GPU, SMALL, DeviceBench
from benchmarks.suite import Suite
from common.errors import ConfigError
from common.host.machine import has_cuda
from common.repository import ROOT
from tests.marks import long_for
from tools.cli.bench import COMMAND
from tools.cli.command_line import parse

ENGINE = ("engine", "engine-lora")
BY_PROCESS = {"weights": 2, "adapters-sent": 2, "gloo": 2, "engine": 7, "engine-lora": 7}
BY_NAME = {check.name: check for check in CHECKS}


def make_suite() -> Suite:
    return Suite(out=io.StringIO())


def written(suite: Suite) -> str:
    assert isinstance(suite.out, io.StringIO)
    return suite.out.getvalue()


def check_small(suite: Suite, name: str) -> None:
    device = DeviceBench(suite=suite, sizes=SMALL, device=torch.device("cpu"), peer_device="cpu")
    BY_NAME[name].load()(device)


@pytest.mark.parametrize(
    "name",
    long_for(
        [name for name in BY_NAME if name not in (*BY_PROCESS, "compiled")],
        ["chunks", "step", "memory"],
    ),
)
def test_gpu_check_runs_small_on_the_cpu(name: str) -> None:
    suite = make_suite()
    check_small(suite, name)
    assert suite.rows or suite.notes
    # Times of such small networks have no bound.
    times = ("step over bare", "time over the share")
    assert [each for each in suite.failed if not any(time in each for time in times)] == []


@pytest.mark.slow
@pytest.mark.long
def test_compiled_check_runs_small_on_the_cpu() -> None:
    suite = make_suite()
    check_small(suite, "compiled")
    assert [row.name for row in suite.rows] == ["bare step: compiled"]


@pytest.mark.slow
@pytest.mark.parametrize("name", long_for(BY_PROCESS, ("adapters-sent", "gloo", *ENGINE)))
def test_multiprocess_gpu_check_runs_on_cpu(name: str) -> None:
    suite = make_suite()
    if name in ENGINE and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    check_small(suite, name)
    assert suite.failed == []
    assert len(suite.rows) == BY_PROCESS[name]


def test_all_targets_are_verdicts_on_a_gpu() -> None:
    cases = {case.name: case.min_rate_frac for case in ON_GPU.packed}
    assert cases == {"Qwen3-4B": 0.4, "7B, LoRA": 0.4, "Qwen3-0.6B": 0.25}
    assert ON_GPU.growth_steps == 200


def test_every_check_has_time_and_first_ones_fit() -> None:
    assert all(0 < check.usual_s < check.limit_s for check in CHECKS)
    assert len(BY_NAME) == len(CHECKS)
    assert sum(check.usual_s for check in CHECKS) <= 15 * 60
    assert sum(check.usual_s for check in CHECKS[:8]) <= 7 * 60


def test_only_selects_checks_in_the_suite_order() -> None:
    assert [check.name for check in choose("step, packed-4b")] == ["packed-4b", "step"]
    assert choose(None) == CHECKS
    with pytest.raises(ConfigError, match=r"--only=stp: one of packed-4b, flash, "):
        choose("stp")


def test_gpu_suite_without_cuda_raises_error() -> None:
    if has_cuda():
        pytest.skip("this machine has CUDA")
    with pytest.raises(ConfigError, match="no CUDA device here"):
        run_suite(make_suite(), SuiteRequest())


def check_of(name: str, function: str, *, usual_s: float = 1, **more: Any) -> GpuCheck:
    where = f"tests.benchmarks.gpu.test_gpu_suite:{function}"
    return GpuCheck(name=name, function=where, usual_s=usual_s, limit_s=2 * usual_s, **more)


def measure_one(device: DeviceBench) -> None:
    device.suite.at_least("speed", math.nan, "tokens/s", 1)


def fail_to_measure(device: DeviceBench) -> None:
    raise RuntimeError("CUDA error")


def run_here(checks: list[GpuCheck], *, ends_at: float = math.inf) -> list[dict[str, Any]]:
    """Run checks in this process at 0 s of a clock that each check advances by 10 s."""
    events: list[dict[str, Any]] = []
    times = iter(range(0, 1000, 10))
    worker.run_checks(
        checks,
        lambda suite: worker.make_bench(suite, sizes="small"),
        ends_at=ends_at,
        send=lambda kind, values: events.append({"kind": kind, **values}),
        clock=lambda: float(next(times)),
    )
    return events


def test_missing_package_leaves_a_check_out_by_name() -> None:
    lacking = check_of("engine", "measure_one", needs=("no_such_package",))
    (event,) = run_here([lacking])
    assert event == {
        "kind": "left_out",
        "check": "engine",
        "reason": "left out: no_such_package is not installed",
    }


def test_check_beyond_the_budget_is_left_out_and_later_ones_run() -> None:
    long = check_of("long", "measure_one", usual_s=60)
    events = run_here([long, check_of("short", "measure_one", usual_s=5)], ends_at=30.0)
    assert events[0]["reason"] == "left out: it takes about 60 s, and 30 s are left"
    assert [event["check"] for event in events if event["kind"] == "end"] == ["short"]
    assert why_left_out(long, left_s=60.0) == ""


def test_error_of_a_check_is_reported_and_next_one_runs() -> None:
    events = run_here([check_of("a", "fail_to_measure"), check_of("b", "measure_one")])
    kinds = [event["kind"] for event in events]
    assert kinds == ["start", "fail", "end", "start", "row", "end"]
    assert events[1]["reason"] == "RuntimeError: CUDA error"


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress_at(
    clock: Clock, lines: Path | None = None, *, ends_at: float = math.inf
) -> tuple[CheckProgress, Suite]:
    suite = make_suite()
    checks = [check_of("a", "measure_one", usual_s=10), check_of("b", "measure_one")]
    progress = CheckProgress(checks, suite, ResultLines(lines), ends_at=ends_at, clock=clock)
    progress.handle({"kind": "ready", "device": "1 x H100"})
    return progress, suite


def test_check_is_ended_after_its_own_limit() -> None:
    clock = Clock()
    progress, suite = progress_at(clock)
    progress.handle({"kind": "start", "check": "a"})
    clock.now = 20.0
    assert progress.overdue() == ""
    clock.now = 20.1
    progress.abandon(progress.overdue())
    assert suite.failed == ["a"]
    assert "a: ended after its time limit of 20 s" in written(suite)
    assert [check.name for check in progress.remaining] == ["b"]
    progress.restart()
    assert progress.overdue() == ""


def test_check_is_ended_with_the_budget() -> None:
    clock = Clock()
    progress, _ = progress_at(clock, ends_at=5.0)
    progress.handle({"kind": "start", "check": "a"})
    clock.now = 5.1
    assert progress.overdue() == "ended, because the time of --minutes is over"


def test_process_that_never_begins_ends_the_suite() -> None:
    clock = Clock()
    suite = make_suite()
    progress = CheckProgress([check_of("a", "x")], suite, ResultLines(None), clock=clock)
    clock.now = 181.0
    progress.abandon(progress.overdue())
    assert suite.failed == ["the suite"]
    assert progress.remaining == []


def test_results_are_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "gpu.jsonl"
    progress, _ = progress_at(Clock(), path)
    progress.handle({"kind": "start", "check": "a"})
    row = {"name": "speed", "value": math.nan, "unit": "tokens/s", "kept": False, "bound": "x"}
    progress.handle({"kind": "row", **row})
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [line["kind"] for line in lines] == ["ready", "start", "row"]
    assert lines[2] | {"value": 0} == {"kind": "row", "check": "a", **row, "value": 0}
    assert lines[2]["value"] is None


def die(device: DeviceBench) -> None:
    device.suite.figure("before the end", 1.0, "")
    os._exit(9)


def hang(device: DeviceBench) -> None:
    threading.Event().wait()


def run_small(*flags: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    argv = ["bench", "--suite", "gpu-small", "--json", str(folder / "own.json"), *flags]
    code = bench(parse(argv))
    text = (folder / "own.jsonl").read_text(encoding="utf-8")
    return code, [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
@pytest.mark.slow
def test_suite_runs_chosen_checks_in_its_process(tmp_path: Path) -> None:
    code, lines = run_small("--only", "canary,chunks", folder=tmp_path)
    assert code == 0
    assert [line["check"] for line in lines if line["kind"] == "end"] == ["canary", "chunks"]
    assert json.loads((tmp_path / "own.json").read_text(encoding="utf-8"))["failed"] == []


@pytest.mark.slow
@pytest.mark.long
def test_suite_names_what_its_minutes_leave_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = run_small("--only", "chunks,packed-4b", "--minutes", "0.01", folder=tmp_path)
    assert code == 0
    assert [line["check"] for line in lines if line["kind"] == "left_out"] == [
        "packed-4b",
        "chunks",
    ]
    assert "note  not measured: packed-4b, chunks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.long
def test_checks_after_a_crash_run_in_a_new_process(tmp_path: Path) -> None:
    suite = make_suite()
    path = tmp_path / "own.jsonl"
    run = CheckRun(suite, SuiteRequest(lines=path, sizes="small"))
    run.run([check_of("dies", "die", usual_s=30), BY_NAME["canary"]])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert next(line["name"] for line in lines if line["kind"] == "row") == "before the end"
    (failed,) = (line for line in lines if line["kind"] == "fail")
    assert failed["check"] == "dies"
    assert "exit code 9" in failed["reason"]
    assert [line["check"] for line in lines if line["kind"] == "end"] == ["canary"]
    assert suite.failed == ["dies"]


@pytest.mark.slow
@pytest.mark.long
def test_hanging_check_is_ended_and_next_one_runs() -> None:
    suite = make_suite()
    hangs = check_of("hangs", "hang", usual_s=1)
    CheckRun(suite, SuiteRequest(sizes="small")).run([hangs, BY_NAME["canary"]])
    assert suite.failed == ["hangs"]
    assert "hangs: ended after its time limit of 2 s" in written(suite)
    assert any(row.name.startswith("canary") for row in suite.rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--only", "step"], r"--only=step: only --suite=.*gpu\|gpu-small.* accepts it"),
        (["--minutes", "3"], r"--minutes=3: only --suite=gpu\|gpu-small accepts it"),
    ],
)
def test_other_suites_refuse_the_flags(flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench(parse(["bench", "--suite", "learner", *flags]))


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_budget_must_be_a_positive_time(minutes: str) -> None:
    with pytest.raises(ConfigError, match=r"--minutes=.*: must be in"):
        COMMAND.run(parse(["bench", "--suite", "gpu", f"--minutes={minutes}"]))


def test_operator_calls_are_counted() -> None:
    ones = torch.ones(2, 2)

    def run() -> None:
        for _ in range(3):
            torch.mm(ones, ones)

    assert count_calls(run, ("aten::mm", "aten::nothing")) == {"aten::mm": 3, "aten::nothing": 0}


def test_growth_is_measured_with_many_lengths() -> None:
    shape = BatchShape(
        num_groups=4, group_size=4, max_turns=15, observation_tokens=100, action_tokens=100
    )
    rng = np.random.default_rng(0)
    turns = {random_shape(shape, rng) for _ in range(50)}
    assert len(turns) == 50
    assert {each.num_groups for each in turns} == {1}


def test_documentation_lists_every_check_in_order() -> None:
    page = (ROOT / "docs" / "GPU.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert rows[: len(CHECKS)] == [check.name for check in CHECKS]
