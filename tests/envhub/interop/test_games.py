"""Laws of games by name: gymnasium's with the package of ours, TextArena's with one of its own."""

import json
import random
import shlex
import string
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from common.errors import ConfigError
from envhub.catalogue.registry import Registry
from envhub.env import EnvFailure, Style, SubsetSpec
from envhub.envs import bfcl
from envhub.interop.games import DRAWING, SeededEnv, make_spec, new_text
from envhub.interop.texts import ActionResult, RewardRule
from envhub.interop.yaml_environments import PACKAGES, optional_package
from tests.venvs import python_with

TEXTARENA = """
import json, sys
from envhub.catalogue.registry import Registry
from envhub.env import Style
registry = Registry(["textarena:GuessTheNumber-v0?num_test=5"])
spec = registry.spec("GuessTheNumber-v0")
env = spec.make(Style.COMPACT)
firsts = [env.reset(item, 0) for item in ("all-test-3", "all-test-3")]
told = [env.step("Action: I think")]
low, high = 1, 20
while not told[-1].done:
    guess = (low + high) // 2
    told.append(env.step(f"Thought: half.\\nAction: [{guess}]"))
    if "lower" in told[-1].observation.rsplit("target", 1)[-1]:
        high = guess - 1
    else:
        low = guess + 1
env.close()
print(json.dumps([firsts, spec.subsets["all"].num_test,
                  [[each.reward, each.done, each.is_valid, each.is_success] for each in told]]))
"""

INVALID = """
import json, sys
from envhub.catalogue.registry import Registry
from envhub.env import Style
told = []
for options in ("", "?min_reward=-1"):
    spec = Registry([f"textarena:Secretary-v0{options}"]).spec("Secretary-v0")
    env = spec.make(Style.COMPACT)
    env.reset("all-train-0", 0)
    results = [env.step(move) for move in ("[" + "9" * 5_000 + "]", "no move", "no move")]
    told.append([spec.start_score, [[r.reward, r.done, r.is_valid] for r in results]])
    told[-1] += [results[-1].is_success, results[-1].is_truncated]
print(json.dumps(told))
"""


class Doors(gymnasium.Env[str, str]):
    """Find the door of the seed; each try costs a tenth."""

    action_space = gymnasium.spaces.Text(8, charset="abcdefgh")
    observation_space = gymnasium.spaces.Text(64, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Choose a door."""
        super().reset(seed=seed)
        self.door = "abcdefgh"[int(self.np_random.integers(8))]
        return "Which of a to h?", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Open one."""
        is_right = action == self.door
        return "no", 1.0 if is_right else -0.1, is_right, False, {"success": is_right}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    gymnasium.register("Doors-v0", entry_point=lambda **_: Doors())
    gymnasium.register(
        "Cliff-v0", entry_point="gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv"
    )


def test_gymnasium_environment_pays_the_sum_and_is_deterministic() -> None:
    spec = make_spec("gymnasium:Doors-v0?min_reward=-1&max_reward=1&num_train=7")
    assert (spec.name, spec.subsets["all"].num_train) == ("Doors-v0", 7)
    env: Any = spec.make(Style.COMPACT)
    runs = []
    for _ in range(2):
        assert env.reset("all-train-3", 0) == "Which of a to h?"
        results = []
        while not results or not results[-1].done:
            results.append(env.step(f"Action: {'abcdefgh'[len(results)]}"))
        runs.append([result.reward for result in results])
    assert runs[0] == runs[1]
    paid = 1.0 - 0.1 * (len(runs[0]) - 1)
    assert runs[0][-1] == pytest.approx((paid + 1) / 2)
    assert results[-1].is_success
    refused = env.step("Action: nosuchdoor")
    assert not refused.is_valid


def test_gymnasium_action_is_a_number_and_range_is_checked() -> None:
    env: Any = make_spec("gymnasium:Cliff-v0?min_reward=-1000&max_reward=0").make(Style.COMPACT)
    env.reset("all-train-0", 0)
    assert not env.step("up").is_valid
    assert not env.step("4").is_valid
    assert env.step("Action: 0").is_valid
    env = make_spec("gymnasium:Doors-v0?max_reward=0.2").make(Style.COMPACT)
    env.reset("all-train-3", 0)
    with pytest.raises(EnvFailure, match=r"outside of its range from 0 to 0\.2"):
        try_all(env)


def try_all(env: Any) -> None:
    for door in "abcdefgh":
        env.step(door)


def test_missing_package_is_named_as_in_the_extras(repository: Path) -> None:
    extras = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    known = {name: extras["optional-dependencies"][name] for name in PACKAGES}
    assert {name: shlex.split(text) for name, text in PACKAGES.items()} == known


def test_package_that_fails_at_its_import_has_its_own_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_installed.py").write_text("import absent_dependency\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    why = r"cannot be imported \(No module named 'absent_dependency'\); .*`pip install textworld=="
    with pytest.raises(ConfigError, match=why):
        optional_package("half_installed", "textworld")


def test_missing_package_without_an_extra_is_named() -> None:
    why = "absent: the Python package is missing; install it with `pip install --no-deps bfcl-eval"
    with pytest.raises(ConfigError, match=why):
        optional_package("absent", bfcl.EXTRA)


@pytest.mark.parametrize(
    ("reference", "why"),
    [
        ("gymnasium:Nosuch-v0", "Nosuch"),
        ("gymnasium:Doors-v0?turns=3", "turns=3: unknown or invalid; the options are num_train"),
        ("gymnasium:Doors-v0?max_turns=many", "max_turns=many"),
        ("gymnasium:Doors-v0?max_turns=0", "all others >= 1"),
        ("gymnasium:tests.envhub.interop.little_games:Wired-v0", "a Graph has no text form"),
        (
            "textarena:Sudoku-v0",
            r"textarena: the Python package is missing.*pip install textarena==",
        ),
    ],
)
def test_impossible_game_is_refused_by_name(reference: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Registry([reference])


@pytest.mark.long
@pytest.mark.slow
def test_invalid_last_move_pays_lower_bound(repository: Path) -> None:
    python = python_with("textarena==0.7.4", sees_ours=True)
    done = subprocess.run(
        [python, "-c", INVALID], cwd=repository, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    usual, below = json.loads(done.stdout.splitlines()[-1])
    # The library pays -1 for the second invalid move in a row; the long number never reaches it.
    moves = [[0.0, False, False], [0.0, False, False], [0.0, True, False]]
    assert usual == [0.0, moves, False, False]
    moves = [[0.5, False, False], [0.5, False, False], [0.0, True, False]]
    assert below == [0.5, moves, False, False]


@pytest.mark.long
@pytest.mark.slow
def test_textarena_game_runs_with_own_package(repository: Path) -> None:
    python = python_with("textarena==0.7.4", sees_ours=True)
    done = subprocess.run(
        [python, "-c", TEXTARENA],
        cwd=repository,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (first, again), num_test, told = json.loads(done.stdout.splitlines()[-1])
    assert first == again
    assert "Guess The Number" in first
    assert num_test == 5
    assert told[0][2] is False  # no number in brackets
    assert all(reward == 0 and not is_done for reward, is_done, _, _ in told[:-1])
    assert told[-1] == [1.0, True, True, True]


SEVERAL_PLAYERS = """
import random

import textarena

from common.errors import ConfigError
from envhub.catalogue.registry import Registry

textarena.make("TicTacToe-v0")  # Its import draws from the process-wide generator.
before = random.getstate()
for name, why in (("QuantumTicTacToe", "has 2 players"), ("TicTacToe", "begin with one player")):
    try:
        Registry([f"textarena:{name}-v0"])
    except ConfigError as error:
        assert why in str(error), error
    else:
        raise AssertionError(name)
assert random.getstate() == before
"""


@pytest.mark.long
@pytest.mark.slow
def test_textarena_game_of_several_players_is_refused(repository: Path) -> None:
    python = python_with("textarena==0.7.4", sees_ours=True)
    command = [python, "-c", SEVERAL_PLAYERS]
    done = subprocess.run(
        command, cwd=repository, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


NEW_TEXTS = """
import json
import random

from envhub.catalogue.registry import Registry
from envhub.env import Style

spec = Registry(["textarena:FrozenLake-v0"]).spec("FrozenLake-v0")
env = spec.make(Style.COMPACT)
before = random.getstate()
first = env.reset("all-train-0", 0)
texts = [env.step(move).observation for move in ("[down]", "no", "[up]")]
assert random.getstate() == before, "an episode changes the process-wide generator"
print(json.dumps([first, texts]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_textarena_observation_is_what_the_last_one_lacks(repository: Path) -> None:
    python = python_with("textarena==0.7.4", sees_ours=True)
    argv = [python, "-c", NEW_TEXTS]
    done = subprocess.run(argv, cwd=repository, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    first, texts = json.loads(done.stdout.splitlines()[-1])
    assert "Welcome to Frozen Lake!" in first
    assert not any("Welcome" in text or "[Player]" in text for text in texts)
    assert [text.split("]")[0] for text in texts] == ["\n[GAME"] * 3
    assert texts[0].count("Current Board") == texts[2].count("Current Board") == 1


@pytest.mark.parametrize(
    ("before", "shown", "own", "new"),
    [
        ("rules", "rules\n[A] up\n[GAME] moved", "\n[A] up", "\n[GAME] moved"),
        ("rules", "rules and a board", "", " and a board"),
        ("board 1", "board 2", "", "board 2"),
        ("board", "board", "", "board"),  # An observation is never empty.
        ("rules", "rules\n[A] up", "\n[A] up", "rules\n[A] up"),
    ],
)
def test_new_text_of_a_transcript(before: str, shown: str, own: str, new: str) -> None:
    assert new_text(before, shown, own) == new


class Dice(gymnasium.Env[str, str]):
    """Throw a die of the process-wide generators."""

    action_space = gymnasium.spaces.Text(8, charset="abcdefgh")
    observation_space = gymnasium.spaces.Text(64, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Throw."""
        return self.thrown(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Throw."""
        return self.thrown(), 0.0, False, False, {}

    def thrown(self) -> str:
        return f"{random.random()} {np.random.random()}"


def test_process_wide_draws_of_an_episode_do_not_depend_on_other_episodes() -> None:
    gymnasium.register("Dice-v0", entry_point=lambda **_: Dice())
    spec = make_spec("gymnasium:Dice-v0")
    assert spec.is_repeatable
    env: Any = spec.make(Style.COMPACT)
    other: Any = spec.make(Style.COMPACT)

    def played(*, is_alone: bool) -> list[str]:
        texts = [env.reset("all-train-3", 0)]
        for _ in range(3):
            if not is_alone:
                other.reset("all-train-4", 0)
                other.step("a")
            texts.append(env.step("a").observation)
        return texts

    assert played(is_alone=True) == played(is_alone=False)


class Shuffled(Dice):
    """Draw when it is constructed, as some games do."""

    def __init__(self) -> None:
        random.random()
        np.random.random()


def test_constructor_of_a_game_changes_no_draws_of_other_episodes() -> None:
    gymnasium.register("Shuffled-v0", entry_point=lambda **_: Shuffled())
    spec = make_spec("gymnasium:Shuffled-v0")
    before = random.getstate()
    numpy_before: Any = np.random.get_state()
    spec.make(Style.COMPACT).reset("all-train-0", 0)
    numpy_after: Any = np.random.get_state()
    assert random.getstate() == before
    assert all(map(np.array_equal, numpy_before, numpy_after))


class Coin:
    """A game of the process-wide random generators, whose samples draw, too."""

    form = ""

    def samples(self) -> list[str]:
        assert DRAWING.locked()  # No other episode draws meanwhile.
        return [f"{random.random()} {np.random.random()}"]

    def check(self) -> None: ...

    def begin(self, seed: int) -> str:
        return f"{random.random()}"

    def act(self, text: str) -> ActionResult:
        return ActionResult(
            text=f"{random.random()} {np.random.random()}", reward=None, is_done=False
        )

    def close(self) -> None: ...


def test_samples_change_no_draws() -> None:
    env = SeededEnv(Coin, SubsetSpec(num_train=5, num_test=1, max_turns=5), RewardRule())
    before = random.getstate()

    def played(num_looks: int) -> list[str]:
        texts = [env.reset("all-train-3", 0)]
        for _ in range(3):
            for _ in range(num_looks):
                env.valid_actions()
            texts.append(env.step("a").observation)
        return texts

    assert played(0) == played(2)
    assert random.getstate() == before


SAMPLES = """
import json
import random

from envhub.catalogue.registry import Registry
from envhub.env import Style

spec = Registry(["textarena:FrozenLake-v0?num_validation=3"]).spec("FrozenLake-v0")


def played(looks):
    env = spec.make(Style.COMPACT)
    texts = [env.reset("all-validation-2", 0)]
    offered = env.valid_actions()
    for move in offered[:1] * 3:
        for _ in range(looks):
            env.valid_actions()
        texts.append(env.step(move).observation)
    return offered, texts


before = random.getstate()
once = played(0)
random.setstate(before)
assert once == played(2), "a look at the moves changes the game"
refused = []
for move in ["[up]", "[down]", "[left]", "[right]"]:
    env = spec.make(Style.COMPACT)
    env.reset("all-validation-2", 0)
    refused += [] if env.step(move).is_valid else [move]
print(json.dumps([once[0], refused, spec.subsets["all"].num_validation]))
"""


@pytest.mark.long
@pytest.mark.slow
def test_textarena_moves_for_random_play_are_those_the_game_accepts(repository: Path) -> None:
    python = python_with("textarena==0.7.4", sees_ours=True)
    argv = [python, "-c", SAMPLES]
    done = subprocess.run(argv, cwd=repository, capture_output=True, encoding="utf-8", timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    offered, refused, num_validation = json.loads(done.stdout.splitlines()[-1])
    assert refused == ["[up]", "[left]"]  # The player starts in the corner at the top left.
    assert {"[down]", "[right]"} <= {*offered}
    assert not {*refused} & {*offered}
    assert num_validation == 3
