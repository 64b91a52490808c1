"""Laws of starting in a run directory."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.config.eval import EvalSection, EvalSplit
from common.config.load import load_config, load_received, sections_as_yaml
from common.config.model import ModelSection
from common.config.run import RunSection
from common.config.run_config import RunConfig
from common.config.train import TrainSection
from common.errors import ConfigError
from common.formats.chat_template import today
from common.store.run_dir import RunDir
from common.store.run_start import dated, mark_finished, prepare, save_config
from scheduler.members.enrolment import SECRET, SECTIONS


def config(*, seed: int = 0, num_steps: int = 10) -> RunConfig:
    return RunConfig(
        run=RunSection(name="r", seed=seed),
        train=TrainSection(num_steps=num_steps),
        model=ModelSection(path="m"),
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(root=tmp_path / "r")
    save_config(config(), made.config)
    return made


def test_new_run_needs_no_preparation(tmp_path: Path) -> None:
    assert prepare(config(), RunDir(root=tmp_path / "new")) is None


def test_unfinished_run_resumes_in_place(run_dir: RunDir) -> None:
    assert prepare(config(num_steps=20), run_dir) is None
    assert run_dir.config.exists()


def test_unfinished_run_rejects_another_experiment(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: was 0, now 1"):
        prepare(config(seed=1), run_dir)
    assert run_dir.config.exists()


def test_unfinished_run_keeps_its_held_out_items(run_dir: RunDir) -> None:
    other = replace(config(), eval=EvalSection(split=EvalSplit.VALIDATION))
    with pytest.raises(ConfigError, match=r"eval\.split: was test, now validation"):
        prepare(other, run_dir)


def test_finished_run_is_kept_aside(run_dir: RunDir) -> None:
    mark_finished(run_dir, version=10, result="")
    kept = prepare(config(seed=1), run_dir)
    assert kept == run_dir.root.with_name("r.1")
    assert not run_dir.root.exists()
    save_config(replace(config()), run_dir.config)
    mark_finished(run_dir, version=10, result="")
    assert prepare(config(), run_dir) == run_dir.root.with_name("r.2")


def test_finished_run_resumes_for_more_steps(run_dir: RunDir) -> None:
    mark_finished(run_dir, version=10, result="")
    assert prepare(config(num_steps=20), run_dir) is None
    assert run_dir.config.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\0\xff", b"[]", b"5", b'{"version": "a"}'])
def test_damaged_finish_note_error_names_the_remedy(run_dir: RunDir, content: bytes) -> None:
    run_dir.finished.write_bytes(content)
    with pytest.raises(ConfigError, match=r"finished\.json: damaged.*remove the file"):
        prepare(config(), run_dir)


def dated_at(cfg: RunConfig, run_dir: RunDir, *, is_kept: bool = True) -> str:
    return dated(cfg, run_dir, is_kept=is_kept).model.date


def with_date(day: str, *, path: str = "m") -> RunConfig:
    return replace(config(), model=ModelSection(path=path, date=day))


def test_run_keeps_its_first_start_date(run_dir: RunDir) -> None:
    assert dated_at(with_date("2024-02-29"), run_dir) == "2024-02-29"
    assert run_dir.read_date() == "2024-02-29"
    assert dated_at(config(), run_dir) == "2024-02-29"
    assert dated_at(with_date("2025-01-01"), run_dir) == "2025-01-01", "for this once"
    assert run_dir.read_date() == "2024-02-29"


def test_new_run_has_the_date_of_today(tmp_path: Path) -> None:
    new = RunDir(root=tmp_path / "new")
    before = today()
    found = dated_at(config(), new)
    assert before <= found <= today()
    assert new.read_date() == found


def test_resumed_run_rejects_another_date(run_dir: RunDir) -> None:
    dated(with_date("2024-02-29"), run_dir, is_kept=True)
    assert prepare(config(), run_dir) is None
    assert prepare(with_date("2024-02-29"), run_dir) is None
    with pytest.raises(ConfigError, match=r"model\.date: was 2024-02-29, now 2025-01-01"):
        prepare(with_date("2025-01-01"), run_dir)


def test_checkpoint_is_served_with_the_run_date(run_dir: RunDir, tmp_path: Path) -> None:
    dated(with_date("2024-02-29"), run_dir, is_kept=True)
    other = RunDir(root=tmp_path / "other")
    path = str(run_dir.checkpoints / "step-3")
    assert dated_at(with_date("", path=path), other, is_kept=False) == "2024-02-29"
    assert not other.root.exists()


def test_date_travels_to_roles_with_the_configuration(run_dir: RunDir) -> None:
    cfg = dated(with_date("2024-02-29"), run_dir, is_kept=True)
    save_config(cfg, run_dir.config)
    assert load_config(str(run_dir.config), []).model.date == "2024-02-29"
    sent = sections_as_yaml(cfg, SECTIONS["actor"], without=SECRET)
    assert load_received(sent, []).model.date == "2024-02-29"


@pytest.mark.parametrize("day", ["2024-02-30", "today", "24-02-28", "20240228"])
def test_invalid_date_is_refused_by_its_key(day: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.date"):
        load_config(None, ["model.path=m", f"model.date={day}"])
