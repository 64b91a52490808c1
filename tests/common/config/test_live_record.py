"""Laws of the record of live changes, and of the next start of the run."""

from pathlib import Path

import pytest

from common.config.live import ConfigChange, read_changes, record_change, with_changes
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from tests.configs import edited

CFG = edited(RunConfig(), {"model.path": "x", "learner.lr": 1e-4, "envhub.style": "compact"})
NOW = 1_700_000_000.0


def change(number: int, key: str, old: str, new: str) -> ConfigChange:
    return ConfigChange(
        number=number, step=7, time_s=NOW, request=f"r{number}", old={key: old}, new={key: new}
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(root=tmp_path)
    save_config(CFG, run_dir.config)
    record_change(run_dir, CFG, change(1, "learner.lr", "0.0001", "5e-05"))
    return run_dir


def test_config_has_the_values_in_force_and_the_record_all_changes(run_dir: RunDir) -> None:
    second = change(2, "learner.lr", "5e-05", "2e-05")
    record_change(run_dir, CFG, second)
    found = load_config(str(run_dir.config), [])
    assert found == edited(CFG, {"learner.lr": 2e-5})
    assert run_dir.config.stat().st_mode & 0o777 == 0o600
    assert read_changes(run_dir.config_changes) == [
        change(1, "learner.lr", "0.0001", "5e-05"),
        second,
    ]


def test_same_command_resumes_with_the_changed_value(run_dir: RunDir) -> None:
    assert with_changes(CFG, run_dir, now_s=NOW).learner.lr == 5e-5
    assert len(read_changes(run_dir.config_changes)) == 1


def test_other_value_at_a_resume_is_used_and_recorded(run_dir: RunDir) -> None:
    chosen = edited(CFG, {"learner.lr": 3e-5})
    assert with_changes(chosen, run_dir, now_s=NOW).learner.lr == 3e-5
    start = read_changes(run_dir.config_changes)[-1]
    assert (start.number, start.step, start.request) == (2, -1, "")
    assert (start.old, start.new) == ({"learner.lr": "5e-05"}, {"learner.lr": "3e-05"})
    assert with_changes(CFG, run_dir, now_s=NOW).learner.lr == 3e-5  # The first command again.
    assert with_changes(chosen, run_dir, now_s=NOW) == chosen
    assert len(read_changes(run_dir.config_changes)) == 2


def test_run_without_changes_starts_with_the_command(tmp_path: Path) -> None:
    assert with_changes(CFG, RunDir(root=tmp_path), now_s=NOW) is CFG


def test_other_settings_at_a_resume_are_recorded(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    save_config(CFG, run_dir.config)
    other = edited(CFG, {"algorithm.clip_high": 0.4, "eval.num_items": 7, "log.live": False})
    assert with_changes(other, run_dir, now_s=NOW) == other
    (change,) = read_changes(run_dir.config_changes)
    assert (change.number, change.step) == (1, -1)
    assert change.new == {"algorithm.clip_high": "0.4", "eval.num_items": "7"}
    assert change.old.keys() == change.new.keys()
    save_config(other, run_dir.config)
    assert with_changes(other, run_dir, now_s=NOW) == other
    assert with_changes(CFG, run_dir, now_s=NOW) == CFG  # Only live keys keep their last value.
    assert read_changes(run_dir.config_changes)[-1].old == change.new


def test_record_of_other_settings_has_no_credentials(tmp_path: Path) -> None:
    run_dir = RunDir(root=tmp_path)
    save_config(CFG, run_dir.config)
    url = "http://name:secret@host:8/v1"
    with_changes(edited(CFG, {"envs.searchqa.retriever_url": url}), run_dir, now_s=NOW)
    (change,) = read_changes(run_dir.config_changes)
    assert change.new == {"envs.searchqa.retriever_url": "http://hidden@host:8/v1"}


def test_line_that_a_crash_cut_off_does_not_count(run_dir: RunDir) -> None:
    path = run_dir.config_changes
    path.write_bytes(path.read_bytes() + b'{"number": 2, "st')
    assert [each.number for each in read_changes(path)] == [1]
    record_change(run_dir, CFG, change(2, "learner.lr", "5e-05", "2e-05"))
    assert [each.number for each in read_changes(path)] == [1, 2]


def test_damaged_line_is_named(run_dir: RunDir) -> None:
    path = run_dir.config_changes
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(ConfigError, match="line 1 is damaged"):
        read_changes(path)
