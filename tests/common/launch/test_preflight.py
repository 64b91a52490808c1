"""Laws of the checks before a start."""

import socket
from pathlib import Path

import pytest

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.launch.lock import hold_run
from common.launch.preflight import check, examine, format_checks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return folder


def configure(model: Path, repository: Path, *overrides: str) -> RunConfig:
    where = [f"model.path={model}", f"run.dir={model.parent / 'runs'}"]
    return load_config("smoke", [*where, *overrides], root=repository)


def test_complete_setting_passes(model: Path, repository: Path) -> None:
    check(configure(model, repository), repository)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer files"),
        ("model.safetensors", "*.safetensors"),
    ],
)
def test_model_that_lacks_a_file_is_refused(
    name: str, words: str, model: Path, repository: Path
) -> None:
    (model / name).unlink()
    with pytest.raises(ConfigError, match=r"model\.path=") as caught:
        check(configure(model, repository), repository)
    assert f"lacks {words};" in str(caught.value)


def test_taken_port_is_refused_by_its_key(model: Path, repository: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^envhub.port={port}: cannot bind"):
            check(configure(model, repository, f"envhub.port={port}"), repository)
        check(
            configure(model, repository, f"envhub.port={port}", "envhub.url=http://x"), repository
        )


def test_one_port_for_two_roles_is_refused(model: Path, repository: Path) -> None:
    cfg = configure(model, repository, "scheduler.port=45123", "learner.port=45123")
    with pytest.raises(ConfigError, match=r"learner.port=45123: scheduler.port has the same"):
        check(cfg, repository)


def test_used_directory_is_refused_when_resume_is_never(model: Path, repository: Path) -> None:
    cfg = configure(model, repository, "run.resume=never", "run.name=a")
    check(cfg, repository)
    (model.parent / "runs" / "a" / "journal").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.resume=never"):
        check(cfg, repository)
    check(configure(model, repository, "run.name=a"), repository)


def test_run_without_tasks_is_refused(model: Path, repository: Path) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        check(configure(model, repository, "tasks=[]"), repository)


def test_missing_program_is_named(model: Path, repository: Path) -> None:
    with pytest.raises(ConfigError, match="sciworld needs Java"):
        check(configure(model, repository), repository, missing=["sciworld needs Java: install it"])


def test_doctor_says_what_to_fix(repository: Path) -> None:
    checks = examine(repository, config="textcraft-qwen7b", missing=["x needs y: install y"])
    text = format_checks(checks)
    assert "-> x needs y: install y" in text
    assert "-> model.path is not set" in text
    assert "ok   python" in text


def test_run_directory_has_one_launcher(tmp_path: Path) -> None:
    with (
        hold_run(tmp_path, name="a"),
        pytest.raises(ConfigError, match=r"run\.name=a: this run is going on"),
        hold_run(tmp_path, name="a"),
    ):
        pass
    with hold_run(tmp_path, name="a"):
        pass
