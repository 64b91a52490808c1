"""The generated databases, and a folder in BIRD's format."""

import json
import sqlite3
from pathlib import Path

import pytest

from common.config.envs import EnvsSection
from envhub.env import EnvSpec
from envhub.envs.sqlgym.env import make_spec
from envhub.envs.sqlgym.memory import MEMORY
from tests.configs import edited
from tests.envhub.envs.sqlgym.pets import ASKED, ASTRAY, BROKEN, CREATE_PETS, PETS


@pytest.fixture(scope="module")
def spec() -> EnvSpec:
    return make_spec(edited(EnvsSection(), {"sqlgym.query_timeout_s": 0.2}))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions wait for each other's memory however long a busy machine takes."""
    monkeypatch.setattr(MEMORY, "_wait_s", 120.0)


@pytest.fixture
def bird_dir(tmp_path: Path) -> Path:
    for name, asked in (("train", [ASKED, BROKEN, ASTRAY]), ("dev", [ASKED])):
        database = tmp_path / name / f"{name}_databases" / "pets" / "pets.sqlite"
        database.parent.mkdir(parents=True)
        connection = sqlite3.connect(database)
        connection.executescript(CREATE_PETS)
        connection.close()
        (tmp_path / name / f"{name}.json").write_text(json.dumps(asked), encoding="utf-8")
        (tmp_path / name / f"{name}_tables.json").write_text(json.dumps([PETS]), encoding="utf-8")
    return tmp_path
