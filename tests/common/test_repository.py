"""Laws of the program's name in texts."""

from pathlib import Path

import pytest

from common import repository
from common.errors import ConfigError
from common.repository import NAME, STARTED_AS, with_program_name

TEXTS = {
    "`python run.py help learner` lists": "`longstride help learner` lists",
    "usage: run.py show RUN": "usage: longstride show RUN",
    "then .venv/bin/python run.py, or": "then longstride, or",
    "run.py": "longstride",
    "end it with run.py. Then": "end it with longstride. Then",
    "/home/me/run.py has no": "/home/me/run.py has no",
    "my_run.py and run.pyc and prun.py": "my_run.py and run.pyc and prun.py",
}


def test_console_script_names_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STARTED_AS, NAME)
    assert {text: with_program_name(text) for text in TEXTS} == TEXTS
    assert str(ConfigError("see `run.py help`")) == "see `longstride help`"


def test_script_of_a_checkout_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STARTED_AS, raising=False)
    assert [with_program_name(text) for text in TEXTS] == [*TEXTS]


def test_installed_package_names_extras_instead_of_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "IS_CHECKOUT", False)
    text = with_program_name("needs playwright: `make setup` (the extra `web`)")
    assert text == "needs playwright: `pip install 'longstride[web]'`"
    text = with_program_name("run `make setup`, which installs")
    assert text == "run `pip install 'longstride[cpu]'` (with a GPU: `[gpu]`), which installs"
    text = with_program_name("in a new environment with `make clean setup`")
    assert text == "in a new environment with `pip install 'longstride[cpu]'` (with a GPU: `[gpu]`)"


def test_command_notes_the_console_script_for_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for argv, expected in (("/opt/bin/longstride", NAME), ("run.py", None)):
        monkeypatch.setattr("sys.argv", [argv])
        environ: dict[str, str] = {}
        repository.note_working_directory(environ)
        assert environ.get(STARTED_AS) == expected
