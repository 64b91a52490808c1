"""Laws of `check-env` on saved states: the package's environments, and each fault of an author."""

from pathlib import Path

import pytest

from envhub.env import Style
from tests.tools.author.test_check_env import changed
from tools.author import checks
from tools.author.checks import Finding, Grade
from tools.author.episodes import Driver, spec_of

SAVE = "return self.left  # Optional"
NAMES = ("rooms", "recall", "maze", "nim", "wordle", "textcraft", "babyai", "searchqa")


def saving(name: str, *overrides: str, style: Style = Style.COMPACT, num: int = 12) -> Finding:
    """Return the finding on the saved states of an environment."""
    with Driver(spec_of(name, [*overrides]), style) as driver:
        plays = checks.play_all(driver, checks.items_of(driver.spec, num))
        return next(checks.check_saving(driver, plays))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        *((name, ()) for name in NAMES),
        ("textcraft", ("envs.textcraft.exchanged_frac=1",)),
        ("babyai", ("envs.babyai.agentgym_rules=true",)),
    ],
)
@pytest.mark.parametrize("style", [Style.COMPACT, Style.AGENTGYM])
def test_environments_of_the_package_continue_from_saved_states(name, overrides, style):
    finding = saving(name, *overrides, style=style)
    assert finding.grade is Grade.OK, finding.text
    assert int(finding.text.split()[0]) > 20


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((SAVE, "return sorted(self.left)[1:]  #"), "differs from turn "),
        ((SAVE, "self.left.reverse(); return [*self.left]  #"), "differs from turn "),
        ((SAVE, "return self.left.pop() and []  #"), "differs from turn "),
        ((SAVE, "return tuple(self.left)  #"), "data that JSON changes: use lists for tuples"),
        ((SAVE, "return 'x' * (2 << 20)  #"), "the state has 2097154 bytes"),
        (
            (SAVE, "raise OSError('no disk')  #"),
            "OSError: no disk (changed.py, line 42) (save of four-train-0",
        ),
        (("self.left = state", "self.left = state['left']"), "TypeError: list indices"),
        (("def load(", "def load_it("), "save() alone, without load()"),
        (("def save(", "def save_it("), "load() alone, without save()"),
    ],
)
def test_fault_of_saving_is_named(tmp_path: Path, change: tuple[str, str], words: str):
    finding = saving(f"{changed(tmp_path, change)}:make_spec")
    assert finding.grade is Grade.FAIL
    assert words in finding.text


def test_environment_without_save_gets_a_note(tmp_path: Path):
    path = changed(tmp_path, ("def save(", "def save_it("), ("def load(", "def load_it("))
    finding = saving(f"{path}:make_spec")
    assert (finding.grade, "repeats its actions" in finding.text) == (Grade.NOTE, True)
