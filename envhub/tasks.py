"""The task lists of environments: which items of which subset make up a task."""

import json
from pathlib import Path

from envhub.env import TaskSpec


def load_tasks(code: str | Path) -> dict[str, TaskSpec]:
    """Return the tasks of the `tasks.json` beside a module, by name.

    It holds {"<task>": {"scenario": str, "subset": str, "train": [item ids], "test": [...],
    "note": str (optional)}}.
    """
    tasks = json.loads(Path(code).with_name("tasks.json").read_text(encoding="utf-8"))
    return {
        name: TaskSpec(**{**task, "train": tuple(task["train"]), "test": tuple(task["test"])})
        for name, task in tasks.items()
    }


def first_items(scenario: str, subset: str, *, num_train: int, num_test: int) -> TaskSpec:
    """Return a task of the first items of a subset."""
    return TaskSpec(
        scenario=scenario,
        subset=subset,
        train=tuple(f"{subset}-train-{index}" for index in range(num_train)),
        test=tuple(f"{subset}-test-{index}" for index in range(num_test)),
    )
