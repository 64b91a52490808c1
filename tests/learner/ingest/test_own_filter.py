"""Laws of the user's own filter of groups."""

from dataclasses import replace
from pathlib import Path

import pytest

from common.config.algorithm import AlgorithmSection
from common.config.groups import GroupsSection
from common.errors import ConfigError
from learner.algorithms.user_functions import user_filter
from learner.ingest.buffer import GroupAssembly
from learner.objective.advantages import group_has_signal
from tests.in_process import carry_out
from tests.learner.builders import make_trajectory

OWN = """
def has_winner(members, cfg):
    "Train groups with a winner."
    return any(member.reward == 1.0 for member in members)

def numpy_flag(members, cfg):
    import numpy
    return numpy.array([member.reward for member in members]).max() > 0

def number(members, cfg): return 1
def nothing(members, cfg): pass
def one_argument(members): return True
def broken(members, cfg): return members[0].score
calls = []
def alternating(members, cfg):
    calls.append(1)
    return len(calls) % 3 > 0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """The path of a file with the user's functions."""
    path = tmp_path / "own_filters.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


def outcomes_of(reference: str, rewards: tuple[float, ...]) -> list[tuple[str, str]]:
    """Return the outcomes and causes of a complete group, [] if it is to be trained."""
    cfg = GroupsSection(size=2, min_size=2, filter=reference)
    algorithm = AlgorithmSection()
    table = GroupAssembly(
        cfg,
        algorithm,
        has_signal=lambda members: group_has_signal(members, algorithm),
        keeps=user_filter(cfg),
    )
    decided: list[tuple[str, str]] = []
    for number, reward in enumerate(rewards):
        member = make_trajectory([1, 2], [0, 1], group_id="a", member=number, version=0)
        outcomes, _ = table.add(replace(member, reward=reward))
        decided += [(each.outcome.value, each.cause) for each in outcomes]
    return decided


def test_function_decides_which_groups_train(own: str) -> None:
    for name in ("has_winner", "numpy_flag"):
        assert outcomes_of(f"{own}:{name}", (1.0, 0.0)) == []
    left_out = [("filtered", "groups_filter")] * 2
    assert outcomes_of(f"{own}:has_winner", (0.5, 0.0)) == left_out
    assert outcomes_of("", (0.5, 0.0)) == []


def test_group_without_signal_keeps_its_cause(own: str) -> None:
    assert outcomes_of(f"{own}:has_winner", (0.0, 0.0)) == [("filtered", "zero_variance")] * 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("number", "returned int; expected True for a group to train"),
        ("nothing", "returned NoneType"),
        ("one_argument", r"is called with \(members, cfg\)"),
        ("alternating", "two calls with equal arguments returned True and False"),
        ("broken", "AttributeError.*own_filters.py, line"),
        ("missing", "has no function 'missing'; it has has_winner"),
    ],
)
def test_check_names_key_function_and_fault(own: str, name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        user_filter(GroupsSection(filter=f"{own}:{name}"))
    assert f"groups.filter={own}:{name}" in str(raised.value)


@pytest.mark.slow
def test_dry_run_prints_and_checks_the_function(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", "smoke", f"groups.filter={own}:has_winner", "--dry-run"]
    done = carry_out(words, capsys)
    assert done.returncode == 0, done.stderr
    line = f"# objective: groups.filter={own}:has_winner: Train groups with a winner. (sha256 "
    assert line in done.stdout
    words = ["--config", "smoke", f"groups.filter={own}:number", "--dry-run"]
    refused = carry_out(words, capsys)
    assert refused.returncode == 2
    assert "returned int" in refused.stderr
