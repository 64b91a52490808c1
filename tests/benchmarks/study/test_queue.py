"""Laws of a study's queue: finished runs are kept and equal runs are made once."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from benchmarks.study.command import _starts, tell
from benchmarks.study.outcome import SeedResult, begin, load_outcome
from benchmarks.study.plan import Arm, Does, Run, Study, lag_arms, names, read_study
from benchmarks.study.queue import Queue, Stopped
from benchmarks.table import BenchTable
from common.config.evaluation import StudySection
from common.errors import ConfigError, LongstrideError
from tests.benchmarks.study.builders import make_outcome

LAGS = {
    "lags": [0, 2],
    "rates": {"1x": []},
    "corrections": {"none": ["algorithm.correction=none"], "decoupled": ["learner.lr=1"]},
    "own_at_zero": ["decoupled"],
}


class Recorder:
    """Makes runs of no length; the runs in `fails` fail."""

    def __init__(self, *, fails: str = "", has_acted: bool = True) -> None:
        self.made: list[str] = []
        self._fails, self._has_acted = fails, has_acted

    def __call__(self, run: Run, _: Path) -> tuple[SeedResult, bool]:
        self.made.append(run.name)
        if run.name == self._fails:
            raise LongstrideError(f"{run.name} broke")
        return make_outcome(run.arm.name, run.seed), self._has_acted


def make_queue(folder: Path, recorder: Recorder, study: Study | None = None) -> Queue:
    arms = tuple(Arm(name=name, overrides=(f"learner.lr={name}",)) for name in ("1", "2", "3"))
    study = study or Study(name="s", arms=arms, seeds=(0, 1))
    queue = Queue(study=study, folder=folder, section=StudySection(workers=1))
    queue.perform = dict.fromkeys(Does, recorder)
    return queue


def test_stopped_study_resumes_its_unfinished_runs(tmp_path: Path) -> None:
    first = Recorder()
    queue = make_queue(tmp_path, first)
    queue.section = replace(queue.section, only=["1", "2-seed1"])
    queue.work()
    assert first.made == ["1-seed0", "1-seed1", "2-seed1"]
    second = Recorder()
    make_queue(tmp_path, second).work()
    assert sorted(second.made) == ["2-seed0", "3-seed0", "3-seed1"]
    assert make_queue(tmp_path, second).todo() == []


def test_failed_run_is_named_and_other_runs_continue(tmp_path: Path) -> None:
    recorder = Recorder(fails="1-seed0")
    queue = make_queue(tmp_path, recorder)
    queue.work()
    assert queue.failed == {"1-seed0": "1-seed0 broke"}
    assert len(recorder.made) == 6
    assert [run.name for run in make_queue(tmp_path, recorder).todo()] == ["1-seed0"]


def test_unmeasured_processor_seconds_are_not_shown_as_zero(tmp_path: Path) -> None:
    def measured(run: Run, _: Path) -> tuple[SeedResult, bool]:
        return replace(make_outcome(run.arm.name, run.seed), cpu_s=61.4 * run.seed), True

    queue = make_queue(tmp_path, Recorder())
    queue.perform = dict.fromkeys(Does, measured)
    queue.section = replace(queue.section, only=["1-seed0", "1-seed1"])
    queue.work()
    table = BenchTable(out=io.StringIO())
    tell(queue, table)
    assert [row.note for row in table.rows] == ["seed 0, CPU not measured", "seed 1, 61 CPU s"]


def test_arms_with_equal_overrides_are_one_run(tmp_path: Path) -> None:
    arms = tuple(Arm(name=name, overrides=("learner.lr=1",)) for name in ("a", "b"))
    recorder = Recorder()
    queue = make_queue(tmp_path, recorder, Study(name="s", arms=arms, seeds=(0,)))
    queue.work()
    assert recorder.made == ["a-seed0"]
    found = [queue.outcome_of(run) for run in queue.study.runs()]
    assert [each and each.arm for each in found] == ["a", "b"]


def test_uncontrolled_run_is_skipped_if_its_controller_never_acted(tmp_path: Path) -> None:
    for has_acted in (False, True):
        recorder = Recorder(has_acted=has_acted)
        study = Study(name="s", arms=tuple(lag_arms(LAGS)), seeds=(0,))
        queue = make_queue(tmp_path / str(has_acted), recorder, study)
        queue.work()
        assert ("1x-lag2-none-off-seed0" in recorder.made) is has_acted
        outcome, _ = load_outcome(queue.path_of("1x-lag2-none-off-seed0"))
        assert bool(outcome.same_as) is not has_acted
        assert queue.todo() == []


def test_single_update_corrections_share_one_run_at_lag_zero() -> None:
    study = Study(name="s", arms=tuple(lag_arms(LAGS)), seeds=(0,))
    at_zero = {new for name, new in study.firsts().items() if "lag0" in name}
    assert at_zero == {"1x-lag0-none-on-seed0", "1x-lag0-decoupled-on-seed0"}


def test_staleness_table_is_written_for_arms_not_single_runs(tmp_path: Path) -> None:
    arms = ["1x-lag0-default-on", "1x-lag4-default-on", "1x-lag4-none-on"]
    for only, has_table in ((["1x-lag0-none-on-seed0"], False), (arms, True)):
        queue = make_queue(tmp_path, Recorder(), read_study("staleness"))
        queue.section = replace(queue.section, only=only)
        queue.work()
        tell(queue, BenchTable(out=(stream := io.StringIO())))
        assert ("What the default loses" in stream.getvalue()) is has_table
        assert (tmp_path / "table.md").exists() is has_table
    assert "of some arms alone" in stream.getvalue()
    losses = (
        (tmp_path / "table.md").read_text(encoding="utf-8").partition("What the default loses")[2]
    )
    assert "| 1x | 4 | on |" in losses
    assert (tmp_path / "lag-1x-on.svg").exists()


def test_results_of_other_settings_are_refused(tmp_path: Path) -> None:
    make_queue(tmp_path, Recorder()).work()
    queue = make_queue(tmp_path, Recorder())
    queue.study = replace(queue.study, overrides=("train.num_steps=7",))
    with pytest.raises(ConfigError, match=r"train.num_steps=7.*study.folder"):
        queue.work()


def test_unknown_run_and_broken_result_are_named(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, Recorder())
    queue.section = replace(queue.section, only=["4"])
    with pytest.raises(ConfigError, match=r"study.only=4"):
        queue.work()
    (tmp_path / "1-seed0.json").write_text(json.dumps({"outcome": {}}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"1-seed0.json"):
        make_queue(tmp_path, Recorder()).work()


def test_larger_study_scales_step_counts_only() -> None:
    study = read_study("horizon", StudySection(size=5, num_seeds=2))
    run = next(run for run in study.runs() if run.arm.name == "gated")
    assert len(study.seeds) == 2
    assert {"train.num_steps=100", "eval.every_steps=25"} <= {*run.overrides}
    assert "groups.per_step=4" in run.overrides


def test_users_override_outranks_the_studys() -> None:
    given = ["train.num_steps=7", "algorithm.advantage=grpo", "study.workers=3"]
    runs = {run.arm.name: run.overrides for run in read_study("algorithms", given=given).runs()}
    assert "train.num_steps=7" in runs["ppo"]
    assert "algorithm.advantage=ppo" in runs["ppo"]
    assert not any(each.startswith("study.") for each in runs["ppo"])
    with pytest.raises(ConfigError, match=r"run.seed=3"):
        read_study("algorithms", given=["run.seed=3"])


@dataclass(slots=True)
class Commanded(Queue):
    """A queue whose commands make a policy at once."""

    made: list[list[str]] = field(default_factory=list[list[str]])

    def run_command(self, name: str, argv: Sequence[str], **_: object) -> None:
        self.made.append([name, *argv])
        (self.folder / name / "policy").mkdir(parents=True)
        (self.folder / name / "policy" / "config.json").touch()


def test_common_start_policy_is_made_once_unless_given(tmp_path: Path) -> None:
    start = ("sft", "sft.num_epochs=1")
    study = Study(name="s", arms=(Arm(name="a"),), seeds=(0,), start=start)
    queue = Commanded(study=study, folder=tmp_path, section=StudySection())
    policy = f"model.path={tmp_path}/start/policy"
    assert [_starts(queue), _starts(queue)] == [{"a": [policy]}, {"a": [policy]}]
    assert [each[:2] for each in queue.made] == [["start", "sft"]]
    assert {f"run.dir={tmp_path}", "run.name=start", "sft.num_epochs=1"} <= {*queue.made[0]}
    given = replace(study, given=("model.path=/own",))
    assert _starts(Commanded(study=given, folder=tmp_path, section=StudySection())) == {"a": []}


def test_arms_with_own_start_policies_differ_and_start_once(tmp_path: Path) -> None:
    study = read_study("limits")
    queue = Commanded(study=study, folder=tmp_path, section=StudySection(only=["start-deep"]))
    begins = _starts(queue)
    assert begins["default"] == []
    assert begins["start-deep"] == [f"model.path={tmp_path}/start-deep/policy"]
    assert [each[0] for each in queue.made] == ["start-deep"], "other policies are not needed"
    assert "sft.num_demonstrations=6000" in queue.made[0], "the settings of all start policies"
    assert "model.path=configs/policies/tiny" in queue.made[0], "the policy of the whole study"
    _starts(queue)
    assert len(queue.made) == 1
    assert len(set(study.firsts().values())) == len(study.runs())


def test_stopped_study_stops_its_current_run(tmp_path: Path) -> None:
    queue = make_queue(tmp_path, Recorder())
    queue.stop.set()
    with pytest.raises(Stopped):
        queue.run_command("help", ["help"])


@pytest.mark.parametrize("name", names())
def test_shipped_study_takes_at_most_two_hours_on_two_cores(name: str) -> None:
    study = read_study(name)
    num = len(set(study.firsts().values()))
    assert 0 < study.cpu_s * num <= 2 * 2 * 3600


def test_run_resumes_only_with_original_settings(tmp_path: Path) -> None:
    made = tmp_path / "1-seed0"
    made.mkdir()
    (made / "report.json").write_text("{}", encoding="utf-8")
    queue = make_queue(tmp_path, Recorder())
    assert "1-seed0" in [run.name for run in queue.todo()], "nobody knows how it was made"
    begin(made, ["learner.lr=1", "run.seed=0"])
    begin(made, ["run.seed=0", "learner.lr=1"])
    with pytest.raises(ConfigError, match=r"1-seed0 was begun with other settings"):
        begin(made, ["learner.lr=2", "run.seed=0"])
