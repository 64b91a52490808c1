"""A small folder in BIRD's format, and how one statement is played."""

from pathlib import Path

from common.config.envs import EnvsSection
from envhub.env import EnvSpec, StepResult, Style
from envhub.envs.sqlgym.env import make_spec
from tests.configs import edited
from tests.envhub.envs.playing import expert_results, new_episode

PETS = {
    "db_id": "pets",
    "table_names_original": ["owner", "pet"],
    "table_names": ["owner", "pet"],
    "column_names_original": [
        [-1, "*"],
        [0, "id"],
        [0, "nm"],
        [1, "id"],
        [1, "owner_id"],
        [1, "n"],
    ],
    "column_names": [[-1, "*"], [0, "id"], [0, "name"], [1, "id"], [1, "owner id"], [1, "name"]],
    "column_types": ["text", "integer", "text", "integer", "integer", "text"],
    "primary_keys": [1, [3]],
    "foreign_keys": [[4, 1]],
}
CREATE_PETS = """
CREATE TABLE owner (id INTEGER PRIMARY KEY, nm TEXT);
CREATE TABLE pet (id INTEGER PRIMARY KEY, owner_id INTEGER REFERENCES owner (id), n TEXT);
INSERT INTO owner VALUES (1, 'Ann'), (2, 'Bob');
INSERT INTO pet VALUES (1, 1, 'Rex'), (2, 1, 'Tom'), (3, 2, 'Rex');
"""
ASKED = {
    "db_id": "pets",
    "question": "What are Ann's pets called?",
    "evidence": "Ann is an owner",
    "SQL": "SELECT n FROM pet JOIN owner ON owner.id = owner_id WHERE nm = 'Ann'",
}
BROKEN = {"db_id": "pets", "question": "?", "evidence": "", "SQL": "SELECT absent FROM pet"}
ASTRAY = {"db_id": "lost", "question": "?", "evidence": "", "SQL": "SELECT 1"}


def bird_spec(folder: Path) -> EnvSpec:
    return make_spec(edited(EnvsSection(), {"sqlgym.bird_dir": str(folder)}))


def answered(spec: EnvSpec, item_id: str, action: str, style: Style = Style.COMPACT) -> StepResult:
    """Return the result of one action, which always ends the episode."""
    env = new_episode(spec, style)
    env.reset(item_id, 0)
    try:
        return env.step(action)
    finally:
        env.close()


def played(spec: EnvSpec, item_id: str, style: Style) -> float:
    env = new_episode(spec, style)
    env.reset(item_id, 0)
    (result,) = expert_results(env)
    env.close()
    assert result.done
    assert result.is_valid
    return result.reward
