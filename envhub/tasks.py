"""The task lists that environments ship: which items of which subset make up a task."""

import json
from pathlib import Path

from envhub.env import TaskSpec


def load_tasks(path: Path) -> dict[str, TaskSpec]:
    """Return the tasks of a `tasks.json`, by name.

    Args:
        path: {"<task>": {"scenario": str, "subset": str, "train": [item ids], "test": [...],
            "note": str (optional)}}
    """
    tasks = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: TaskSpec(**{**task, "train": tuple(task["train"]), "test": tuple(task["test"])})
        for name, task in tasks.items()
    }
