"""Laws of Python values as overrides: the command line reads the same value from them."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from common.config.load import load_config
from common.errors import ConfigError
from common.repository import ROOT
from docs.examples import sort
from envhub.env import Style
from learner.ingest.group_rewards import load_group_rewards
from longstride import train
from tests.tools.api import rewards
from tools.api.references import overrides_of


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learner.lr", 3e-4),
        ("learner.lr", 1),
        ("run.name", "mine"),
        ("run.seed", 7),
        ("log.live", False),
        ("horizon.stages", [2, 4]),
        ("horizon.stages", (2, 4)),
        ("data.system", 'He said "yes": a=b, {c}'),
        ("data.system", '"quoted"'),
        ("tasks", [{"env": "textcraft", "subset": "depth1", "weight": 0.5}]),
    ],
)
def test_value_arrives_unchanged(key: str, value: Any) -> None:
    names = {"data.system": "envs.dataset.system"}
    loaded: Any = load_config("smoke", overrides_of({key: value}))
    for name in names.get(key, key).split("."):
        loaded = getattr(loaded, name)
    if key == "tasks":
        assert (loaded[0].env, loaded[0].subset, loaded[0].weight) == ("textcraft", "depth1", 0.5)
    else:
        assert loaded == (list(value) if isinstance(value, tuple) else value)


def test_path_and_enum_are_texts() -> None:
    words = overrides_of({"model.path": Path("/a/b"), "envhub.style": Style.COMPACT})
    assert words == ["model.path=/a/b", "envhub.style=compact"]


def test_function_travels_as_the_path_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_reward_file.py").write_text("def f(): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__("own_reward_file")
    path = (tmp_path / "own_reward_file.py").resolve()
    assert overrides_of({"reward": module.f}) == [f"reward={path}:f"]
    words = overrides_of({"reward": {"a": module.f}})
    assert yaml.safe_load(words[0].partition("=")[2]) == {"a": f"{path}:f"}


def test_function_of_a_package_travels_by_its_name() -> None:
    assert overrides_of({"reward": rewards.grade}) == ["reward=tests.tools.api.rewards:grade"]


@pytest.mark.slow
def test_object_with_a_name_in_a_file_travels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "import functools\nfrom trl.rewards import get_soft_overlong_punishment as punishment\n"
        "overlong = punishment(20, 10)\ndef scaled(group, by): ...\n"
        "half = functools.partial(scaled, by=0.5)\nright = lambda group: [1.0] * len(group)\n"
    )
    (tmp_path / "own_objects.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = __import__("own_objects")
    path = (tmp_path / "own_objects.py").resolve()
    for name in ("overlong", "half", "right"):
        words = overrides_of({"groups.reward": getattr(module, name)})
        assert words == [f"groups.reward={path}:{name}"]
        assert load_group_rewards(load_config("smoke", words).groups) is not None


def test_class_of_an_environment_travels_as_its_make_spec() -> None:
    tasks = [{"env": sort.Sort, "subset": "four"}, {"env": "textcraft", "subset": "depth1"}]
    for name in (sort.Sort, sort.make_spec):
        words = overrides_of({"tasks": [{**tasks[0], "env": name}, tasks[1]]})
        loaded = load_config("smoke", words)
        assert loaded.envhub.envs == ["docs.examples.sort:make_spec", "textcraft"]
        assert [task.env for task in loaded.tasks] == ["sort", "textcraft"]


def test_hub_with_environments_of_its_own_refuses_objects() -> None:
    with pytest.raises(ConfigError, match=r"leave envhub\.envs out"):
        overrides_of({"tasks": [{"env": sort.Sort, "subset": "four"}], "envhub.envs": ["babyai"]})


class Foreign:
    """An environment whose module has no `make_spec`."""

    def reset(self, item_id: str, seed: int) -> str:
        raise NotImplementedError

    def step(self, action: str) -> object:
        raise NotImplementedError


def nested() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda: 1, "A lambda"),
        (nested(), "nested function"),
        (functools.partial(nested), "a partial"),
        (rewards.Judge().grade, "a method"),
        (Foreign, "has no function make_spec"),
        (object(), "has no form in the configuration"),
        ([object()], r"reward\[0\]"),
    ],
)
def test_what_no_role_can_import_is_refused(value: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        overrides_of({"reward": value})


@pytest.mark.parametrize("word", ["--dry-run", "learner.lr", "-h=1"])
def test_word_without_a_value_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="key=value"):
        overrides_of([word])


@pytest.mark.slow
def test_function_of_the_script_itself_is_refused_with_the_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import longstride\ndef mine(completion): return 1.0\n"
        "longstride.train('smoke', {'reward': mine})\n",
        encoding="utf-8",
    )
    for words in ([str(script)], ["-c", script.read_text(encoding="utf-8")]):
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            capture_output=True,
            encoding="utf-8",
        )
        last = done.stderr.strip().splitlines()[-1]
        assert "reward=mine: a role cannot import it from __main__" in last
        assert "%%writefile my_code.py" in last
        assert "give my_code.mine" in last
        assert done.returncode == 1


def test_wrong_key_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"nearest is learner\.lr"):
        train("smoke", {"learner.lrr": 1e-3})


@pytest.mark.slow
def test_module_of_the_user_that_hides_a_package_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text("", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", "from longstride import train"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
    )
    last = done.stderr.strip().splitlines()[-1]
    assert f"ImportError: {path}: Longstride has a package of the same name, 'tools'" in last
