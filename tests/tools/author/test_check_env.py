"""Laws of `check-env`: the example is sound, and each fault of an environment is named."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.repository import ROOT
from envhub.env import Style
from tools.author.check_env import findings
from tools.author.checks import Finding, Grade
from tools.author.episodes import Driver, spec_of

EXAMPLE = ROOT / "docs" / "examples" / "sort.py"
OWN_SUCCESS = "is_success=done,  # Success does not depend on the reward."
PAID = "reward=float(done),"


def found(path: Path, *, num: int = 6) -> list[Finding]:
    """Return the findings of `check-env` for the environment in a file."""
    name = f"{path}:make_spec"
    with Driver(spec_of(name, []), Style.COMPACT) as driver:
        return list(findings(driver, name, num, []))


def changed(tmp_path: Path, *changes: tuple[str, str]) -> Path:
    """Return a copy of the example in which texts are replaced."""
    text = EXAMPLE.read_text(encoding="utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / "changed.py"
    path.write_text(text, encoding="utf-8")
    return path


def said(all_found: list[Finding], grade: Grade) -> Iterator[str]:
    return (f"{each.name}: {each.text}" for each in all_found if each.grade is grade)


def test_example_passes_and_reports_reward_and_success_rules():
    all_found = found(EXAMPLE)
    assert {each.grade for each in all_found} == {Grade.OK}
    told = {each.name: each.text for each in all_found}
    text = "an episode's return is the reward of its last step; the highest reward seen is 1"
    assert told["reward"] == text
    assert told["success"] == "reported by the environment, independent of the reward"
    assert told["expert"] == "solves 6 of 6"


def test_missing_package_of_an_environment_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lacking.py"
    path.write_text(
        "from common.errors import ConfigError\n\n\n"
        "def make_spec(name):\n"
        "    raise ConfigError('game: the Python package is missing')\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match=r"^game: the Python package is missing$"):
        spec_of(f"{path}:make_spec", [])
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([("list(PUZZLES[", "random.sample(range(10), 4) or list(PUZZLES[")], "determinism: four"),
        (
            [
                (
                    "list(PUZZLES[",
                    "random.Random(hash(item_id)).sample(range(10), 4) or list(PUZZLES[",
                )
            ],
            "in another process (does it use hash()",
        ),
        ([(PAID, "reward=1.5 * done,")], "reward: four-train-0: 1.5 is not in [0, 1]"),
        (
            [(PAID, "reward=0.9 * done,"), (OWN_SUCCESS, "")],
            "the highest here is 0.9, so no episode counts",
        ),
        ([("word = action_text(action)", "word = str(int(action))")], "raises an error: "),
        ([("for number in self.left]", "for number in range(10)]")], ", step refuses it"),
        ([('"sorted"', '"done <|im_end|>"')], "texts: four-train-0: a text has a control token"),
        ([('"sorted"', '"\\ud800"')], "a text has an unpaired surrogate"),
        ([('"sorted"', '""')], "a text is empty"),
        ([(PAID, 'reward=float("nan"),')], "reward: four-train-0: nan is not in [0, 1]"),
        (
            [("    def render(self)", "    def draw(self)"), (".render()", ".draw()")],
            "no method ren",
        ),
        ([('name="sort",', 'name="sort", start_score=1.5,')], "start_score=1.5 is not in [0, 1]"),
        ([("max_turns=8", "max_turns=0")], "subset four: max_turns below 1"),
        (
            [("item = parse_item(item_id, SUBSETS)", "raise OSError('no file')")],
            "raises: sort: OSError: no file (changed.py, line 23) (reset of four-train-0)",
        ),
        (
            [("word = action_text(action)", "word = [action_text(action)][len(self.left) == 3]")],
            "IndexError: list index out of range (changed.py, line 28) (step of four-train-0, ",
        ),
        (
            [("        return StepResult(", "        return ()\n        return StepResult(")],
            "protocol: step returns tuple; it must return StepResult",
        ),
        (
            [("self.left", "Sort.left")],
            "at once: four-train-0 differs when 8 episodes run in turns",
        ),
    ],
)
def test_fault_of_an_environment_is_named(tmp_path, changes: list[tuple[str, str]], words: str):
    if "refuses it" in words:  # It lists all digits but accepts remaining ones only.
        changes = [
            *changes,
            ("is_valid = word in", "is_valid = word in map(str, self.left) and word in"),
        ]
    failures = list(said(found(changed(tmp_path, *changes)), Grade.FAIL))
    assert any(words in failure for failure in failures), failures


@pytest.mark.slow
def test_environment_that_is_not_thread_safe_is_named(tmp_path: Path):
    """All episodes of a process use one scratch variable during a step."""
    shared = (
        "        Sort.scratch = id(self)\n        time.sleep(0.02)\n"
        "        if Sort.scratch != id(self):\n            self.left.append(0)\n"
    )
    word = "        word = action_text(action)"
    changes = ((word, f"{shared}{word}"), ("import itertools", "import itertools\nimport time"))
    failures = list(said(found(changed(tmp_path, *changes)), Grade.FAIL))
    assert any("run in parallel threads" in failure for failure in failures), failures
    alone = ('name="sort",', 'name="sort", sessions_per_worker=1,')
    assert list(said(found(changed(tmp_path, *changes, alone)), Grade.FAIL)) == []


def test_other_process_finds_the_packages_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "library_of_user.py").write_text("", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    imported = ("import itertools", "import itertools\nimport library_of_user")
    assert list(said(found(changed(tmp_path, imported)), Grade.FAIL)) == []


def test_check_notes_rewards_that_only_the_last_step_keeps(tmp_path):
    path = changed(tmp_path, (PAID, "reward=0.25 * (is_valid and not done),"))
    notes = list(said(found(path), Grade.NOTE))
    assert any("reward=Reward.SUM in the EnvSpec" in note for note in notes)


def test_check_notes_items_shared_across_splits(tmp_path):
    path = changed(tmp_path, ("(4000 if item", "(0 if item"))
    notes = list(said(found(path), Grade.NOTE))
    assert any("four-train-0 and four-test-0 are equal, and one" in note for note in notes)


def test_check_suggests_warm_start_without_signal(tmp_path):
    path = changed(tmp_path, ("self.left.remove(int(word))", "pass"))
    notes = list(said(found(path), Grade.NOTE))
    assert any("warm-start with `sft`" in note for note in notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("'high'", "sort, four-train-0: reward='high' is str; it must be a number (int or float)"),
        ("None", "sort, four-train-0: reward=None is NoneType; it must be a number"),
        ("[1.0]", "sort, four-train-0: reward=[1.0] is list; it must be a number"),
    ],
)
def test_reward_of_another_type_names_environment_and_value(
    tmp_path: Path, reward: str, words: str
) -> None:
    failed = list(said(found(changed(tmp_path, (PAID, f"reward={reward},"))), Grade.FAIL))
    assert failed
    assert all(line.startswith("reward: ") for line in failed)
    assert words in failed[0]


def test_reward_of_another_type_is_named_without_is_success(tmp_path: Path) -> None:
    path = changed(tmp_path, (PAID, "reward='high',"), (OWN_SUCCESS, ""))
    (failed,) = said(found(path), Grade.FAIL)
    assert "sort: TypeError: reward='high' is not a number" in failed


def test_reward_that_is_no_number_equals_itself_when_repeated(tmp_path: Path) -> None:
    failed = {
        each.name
        for each in found(changed(tmp_path, (PAID, 'reward=float("nan"),')))
        if each.grade is Grade.FAIL
    }
    assert failed == {"reward"}
