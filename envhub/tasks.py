"""Building of an environment's `EnvSpec` and loading of its tasks."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envhub.conversations import begun
from envhub.env import Env, EnvSpec, Style, SubsetSpec, TaskSpec
from envhub.tables import read_instructions


def spec_beside(
    code: str, subsets: Mapping[str, SubsetSpec], make: Callable[[Style], Env], **fields: Any
) -> EnvSpec:
    """Return the `EnvSpec` built from the tasks and instructions beside a module.

    Its name is the name of their folder; `fields` are further fields of `EnvSpec`.
    """
    name = Path(code).parent.name
    defaults: dict[str, Any] = {"name": name, "subsets": subsets, "make": make}
    defaults |= begun(name, read_instructions(code)) | {"tasks": load_tasks(code)}
    return EnvSpec(**defaults | fields)


def load_tasks(code: str | Path) -> dict[str, TaskSpec]:
    """Return the tasks of the `tasks.json` beside a module, by name.

    The file holds {"<task>": {"scenario": str, "subset": str, "train": [item ids], "test": [...],
    "note": str (optional)}}.
    """
    tasks = json.loads(Path(code).with_name("tasks.json").read_text(encoding="utf-8"))
    return {
        name: TaskSpec(**{**task, "train": tuple(task["train"]), "test": tuple(task["test"])})
        for name, task in tasks.items()
    }


def first_items(scenario: str, subset: str, *, num_train: int, num_test: int) -> TaskSpec:
    """Return a task that consists of the first items of a subset."""
    return TaskSpec(
        scenario=scenario,
        subset=subset,
        train=tuple(f"{subset}-train-{index}" for index in range(num_train)),
        test=tuple(f"{subset}-test-{index}" for index in range(num_test)),
    )
