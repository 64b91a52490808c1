"""Laws of a study's plan and of the execution of its runs."""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.real_run import child
from benchmarks.study.command import StudyWork, report
from benchmarks.study.outcome import begin
from benchmarks.study.plan import Study, merged, names, read_study
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import ConfigError
from common.host.child_process import ChildProcess
from tools.cli.bench import StudySection

REPORT = {"before": None, "after": {"success": 0.5}}
LINE = {"step": 1, "time_s": 1.0, "train/num_sampled_tokens": 9.0}
# A run of no length. The run 2-seed0 fails.
PROGRAM = """
import json, sys
from pathlib import Path
folder = Path(sys.argv[1])
if folder.name == "2-seed0":
    sys.exit("it broke")
folder.mkdir()
(folder / "metrics.jsonl").write_text(sys.argv[2])
(folder / "report.json").write_text(sys.argv[3])
"""


@contextmanager
def program(
    name: str, overrides: list[str], *, folder: Path, config: str
) -> Iterator[ChildProcess]:
    line = json.dumps(LINE | {"offpolicy/lag_mean": 0.0, "offpolicy/ess_frac": 1.0})
    argv = ["-c", PROGRAM, str(folder / name), line, json.dumps(REPORT)]
    with child(name, argv, log=folder / f"{name}.log") as process:
        yield process


@pytest.fixture
def work(tmp_path: Path) -> StudyWork:
    """Return a study of three arms and one seed whose runs take no time."""
    study = Study(
        name="s",
        base="1",
        arms={name: (f"learner.lr={name}",) for name in ("1", "2", "3")},
        seeds=(0,),
        overrides=("train.num_steps=1",),
        cpu_s=36.0,
        may_lose={},
    )
    section = StudySection(workers=2)
    return StudyWork(study=study, folder=tmp_path, section=section, launch=program)


@pytest.mark.slow
def test_failed_run_is_named_and_other_runs_continue(work: StudyWork) -> None:
    work.run_all()
    assert list(work.failed) == ["2-seed0"]
    assert "it broke" in work.failed["2-seed0"]
    assert [run.name for run in work.todo()] == ["2-seed0"]
    suite = Suite(out=io.StringIO())
    report(work, suite)
    assert [row.name for row in suite.rows] == [
        "1, seed 0: success after",
        "3, seed 0: success after",
    ]
    assert suite.failed == ["2-seed0"]
    assert (work.folder / "table.md").exists()


def test_plan_counts_remaining_runs_and_cost(work: StudyWork) -> None:
    assert "3 runs; 0 done, 3 to do, about 0.0 CPU hours" in work.plan_text()
    work.section = replace(work.section, only=["1", "3-seed0"])
    assert [run.name for run in work.todo()] == ["1-seed0", "3-seed0"]


def test_unknown_run_is_named(work: StudyWork) -> None:
    work.section = replace(work.section, only=["4"])
    with pytest.raises(ConfigError, match=r"study.only=4"):
        work.todo()


def test_results_of_other_settings_are_refused(work: StudyWork) -> None:
    made = work.folder / "1-seed0"
    begin(made, ["run.seed=0", "train.num_steps=7", "learner.lr=1"])
    made.mkdir()
    (made / "report.json").write_text(json.dumps(REPORT), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other settings.*study.folder"):
        work.todo()


def test_larger_study_scales_step_counts_only() -> None:
    study = read_study("horizon", StudySection(size=5, num_seeds=2))
    run = next(run for run in study.runs() if run.arm == "gated")
    assert len(study.seeds) == 2
    assert {"train.num_steps=100", "eval.every_steps=25"} <= {*run.overrides}
    assert "groups.per_step=4" in run.overrides


def test_users_override_outranks_the_studys() -> None:
    given = ["train.num_steps=7", "algorithm.advantage=grpo", "study.workers=3"]
    runs = {run.arm: run.overrides for run in read_study("algorithms", given=given).runs()}
    assert "train.num_steps=7" in runs["ppo"]
    assert "algorithm.advantage=ppo" in runs["ppo"]
    assert not any(each.startswith("study.") for each in runs["ppo"])
    with pytest.raises(ConfigError, match=r"run.seed=3"):
        read_study("algorithms", given=["run.seed=3"])


def test_arm_override_replaces_the_studys() -> None:
    assert merged(("a.b=1", "c=2"), ("a.b=[3,4]",)) == ["a.b=[3,4]", "c=2"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "is_named"), [("horizon", True), ("horizon-long", False)])
def test_start_names_the_policy_that_it_trains(name: str, is_named: bool) -> None:
    words = read_study(name).start_words()
    assert words[0] == "sft"
    assert ("model.path=configs/policies/tiny" in words) == is_named


@pytest.mark.parametrize("name", names())
def test_every_arm_has_a_valid_configuration(name: str) -> None:
    study = read_study(name)
    assert {study.base, *study.may_lose} <= study.arms.keys()
    for run in study.runs()[: len(study.arms)]:
        load_config("quickstart", run.overrides)
    load_config("quickstart", study.start[1:])


@pytest.mark.parametrize("name", names())
def test_study_takes_at_most_three_hours_on_two_cores(name: str) -> None:
    study = read_study(name)
    assert 0 < study.cpu_s * len(study.runs()) <= 3 * 2 * 3600
