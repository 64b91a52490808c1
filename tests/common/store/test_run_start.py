"""Laws of starting in a run directory."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.config.run_config import ModelSection, RunConfig, RunSection, TrainSection
from common.errors import ConfigError
from common.store.run_dir import RunDir
from common.store.run_start import mark_finished, prepare, save_config


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


def test_unfinished_run_goes_on_in_its_place(run_dir: RunDir) -> None:
    assert prepare(config(num_steps=20), run_dir) is None
    assert run_dir.config.exists()


def test_unfinished_run_is_not_mixed_with_another_experiment(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"run\.seed: was 0, now 1"):
        prepare(config(seed=1), run_dir)
    assert run_dir.config.exists()


def test_finished_run_is_kept_aside(run_dir: RunDir) -> None:
    mark_finished(run_dir, version=10, result="")
    kept = prepare(config(seed=1), run_dir)
    assert kept == run_dir.root.with_name("r.1")
    assert not run_dir.root.exists()
    save_config(replace(config()), run_dir.config)
    mark_finished(run_dir, version=10, result="")
    assert prepare(config(), run_dir) == run_dir.root.with_name("r.2")


def test_finished_run_goes_on_when_more_steps_are_asked_for(run_dir: RunDir) -> None:
    mark_finished(run_dir, version=10, result="")
    assert prepare(config(num_steps=20), run_dir) is None
    assert run_dir.config.exists()


@pytest.mark.parametrize("content", [b"", b"{", b"\0\xff", b"[]", b"5", b'{"version": "a"}'])
def test_damaged_note_of_the_end_is_named_with_what_to_do(run_dir: RunDir, content: bytes) -> None:
    run_dir.finished.write_bytes(content)
    with pytest.raises(ConfigError, match=r"finished\.json: damaged.*remove it"):
        prepare(config(), run_dir)
