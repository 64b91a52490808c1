"""Laws of the command line, on the real one in a subprocess."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

TIMEOUT_S = 60


def run_cli(repository: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(repository / "run.py"), *argv],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def children_cpu_s() -> float:
    """Return what all processes that were waited for have used."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["learner.lr=abc"], "learner.lr=abc: expects a number"),
        (["learnr.lr=1e-4"], "nearest is learner.lr"),
        (["--config", "nosuch"], "--config nosuch: no such config"),
        (["--config", "textcraft-qwen7b"], "model.path is not set"),
        (["trian"], "trian: neither a command nor key=value; the nearest is train"),
        (["train", "oops"], "oops: an override is key=value"),
        (["--confg", "smoke"], "--confg"),
        (["--config", "smoke", "model.path=/nosuch"], "model.path=/nosuch: no such directory"),
        (
            ["--config", "smoke", "tasks=[{env: babyia, subset: GoToLocal}]"],
            "tasks[0].env='babyia'",
        ),
        (["--config", "smoke", "tasks=[{env: babyai, subset: GoTu}]"], "tasks[0].subset='GoTu'"),
        (["--config", "smoke", "tasks=[]"], "tasks=[]: a run needs at least one"),
        (["--config", "smoke", "tasks[0].weight=0"], "tasks=0.0: the weights must not sum to zero"),
        (["--config", "smoke", "horizon.stages=[5, 5]"], "horizon.stages=[5, 5]"),
        (["eval", "--config", "smoke", "tasks=[]"], "tasks=[]: an evaluation needs at least one"),
        (["eval", "--config", "smoke", "eval.num_items=0"], "eval.num_items=0: leaves no held-out"),
        (["actor", "train.mode=fast"], "train.mode=fast"),
        (["status", "run.name=never-started"], "run.name=never-started"),
    ],
)
def test_wrong_command_line_ends_at_once_with_one_line(
    argv: list[str], words: str, repository: Path
) -> None:
    before_s = children_cpu_s()
    done = run_cli(repository, *argv)  # ends within TIMEOUT_S
    assert children_cpu_s() - before_s < 2.0  # unlike wall time, the same on a loaded machine
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert done.stdout == ""


def test_python_without_the_packages_is_told_what_to_do(repository: Path) -> None:
    bare = [sys.executable, "-S", str(repository / "run.py"), "--help"]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert " is not installed for " in done.stderr
    assert "make setup" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_dry_run_prints_the_resolved_config_with_its_objective_and_starts_nothing(
    repository: Path, tmp_path: Path
) -> None:
    done = run_cli(
        repository, "--dry-run", "--config", "smoke", f"run.dir={tmp_path}", "learner.lr=0.5"
    )
    assert done.returncode == 0
    assert "  lr: 0.5\n" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("# objective: maximise mean_")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("more", "num"), [([], -1), (["eval.num_items=5"], 5)])
def test_evaluation_of_the_task_lists_is_whole_unless_the_user_says_how_many(
    more: list[str], num: int, repository: Path
) -> None:
    argv = ["eval", "--dry-run", "--config", "smoke", "eval.items=tasks", *more]
    done = run_cli(repository, *argv)
    assert done.returncode == 0
    assert f"  num_items: {num}\n" in done.stdout


def test_help_names_commands_configs_and_an_override(repository: Path) -> None:
    done = run_cli(repository, "--help")
    assert done.returncode == 0
    for word in ("train", "actor", "doctor", "quickstart", "learner.lr=3e-4"):
        assert word in done.stdout


def test_role_joins_the_run_with_that_runs_config(repository: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(
        f"run: {{name: mine, dir: '{tmp_path}'}}\nmodel: {{path: p}}\ntrain: {{num_steps: 77}}\n"
    )
    where = [f"run.dir={tmp_path}", "run.name=mine"]
    done = run_cli(repository, "actor", "--dry-run", *where, "actor.name=extra")
    assert "num_steps: 77\n" in done.stdout
    assert "name: extra\n" in done.stdout
