"""The command `envs`: the table of tasks and environments."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from common.config.env import RemoteOptions
from common.config.envs import EnvsSection
from common.errors import ConfigError
from common.repository import CODE
from common.text import counted
from envhub.catalogue.registry import LOADERS, Registry, UnknownEnv, missing_requirements
from envhub.env import EnvSpec, SubsetSpec, TaskSpec
from envhub.tasks import load_tasks
from tools.checks.environments import load_alone, with_remote

ENVS = CODE / "envhub" / "envs"
MAX_OTHERS = 8  # Subsets without a task that the short list shows one by one.
HEADINGS = (
    "SCENARIO",
    "TASK",
    "ENV",
    "SUBSET",
    "TRAIN",
    "VALIDATION",
    "TEST",
    "TURNS",
    "RUNS HERE",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingRow:
    """One task, a subset without a task, or an environment that cannot run here."""

    env: str
    scenario: str = ""
    task: str = ""
    subset: str = ""
    num_train: int = 0
    num_validation: int = 0
    num_test: int = 0
    max_turns: int = 0  # 0: unknown.
    missing: str = ""  # Missing requirements; "" when the environment can run.

    def cells(self) -> tuple[str, ...]:
        """Return the row as text; unknown values are empty."""
        sizes = (self.num_train, self.num_validation, self.num_test)
        numbers = [f"{number:,}" if self.subset else "" for number in sizes]
        turns = str(self.max_turns or "")
        state = f"no: {self.missing}" if self.missing else "yes"
        return (self.scenario, self.task, self.env, self.subset, *numbers, turns, state)


def list_environments(overrides: Sequence[str]) -> int:
    """Print the tasks of the named environments, or of all environments; return the exit code."""
    cfg = load_alone(overrides)
    names = cfg.envhub.envs or with_remote([*LOADERS], cfg)
    try:
        rows = list_rows(names, cfg.envs, cfg.env, is_short=not cfg.envhub.envs)
    except UnknownEnv as error:
        raise ConfigError(str(error)) from error
    print(format_rows(rows))
    return 0


def list_rows(
    env_names: Sequence[str], options: EnvsSection, remote: RemoteOptions, *, is_short: bool
) -> list[ListingRow]:
    """Return the tasks of the environments, by scenario, then the subsets without a task.

    With `is_short`, many subsets without a task share one row per environment.
    """
    rows: list[ListingRow] = []
    for name in env_names:
        missing = "; ".join(missing_requirements([name], options, remote))
        if missing:
            rows += _missing_rows(name, missing)
            continue
        registry = Registry([name], options, remote)
        for spec_name in registry.names if ":" in name else [name]:
            spec = registry.spec(spec_name)
            rows += _task_rows(spec.name, spec.tasks, spec.subsets, note=spec.note)
            rows += _other_rows(spec, is_short=is_short)
    return sorted(rows, key=lambda row: (not row.scenario, row.scenario, row.env))


def _task_rows(
    env: str,
    tasks: Mapping[str, TaskSpec],
    subsets: Mapping[str, SubsetSpec],
    missing: str = "",
    note: str = "",
) -> list[ListingRow]:
    """Return a row for each task of an environment."""
    return [
        ListingRow(
            scenario=task.scenario,
            task=f"{name} ({task.note or note})" if task.note or note else name,
            env=env,
            subset=task.subset,
            num_train=len(task.train),
            num_test=len(task.test),
            max_turns=subsets[task.subset].max_turns if task.subset in subsets else 0,
            missing=missing,
        )
        for name, task in tasks.items()
    ]


def _other_rows(spec: EnvSpec, *, is_short: bool) -> list[ListingRow]:
    """Return rows for the subsets that no task has."""
    in_task = {task.subset for task in spec.tasks.values()}
    others = {name: subset for name, subset in spec.subsets.items() if name not in in_task}
    if is_short and len(others) > MAX_OTHERS:
        return [
            ListingRow(
                env=spec.name, task=f"({counted(len(others), 'more subset')}: env={spec.name})"
            )
        ]
    return [
        ListingRow(env=spec.name, subset=name, **asdict(subset)) for name, subset in others.items()
    ]


def _missing_rows(name: str, missing: str) -> list[ListingRow]:
    """Return the tasks of an environment that cannot run here."""
    path = ENVS / name / "tasks.json"
    tasks = load_tasks(path) if path.is_file() else {}
    return _task_rows(name, tasks, {}, missing) or [ListingRow(env=name, missing=missing)]


def format_rows(rows: Sequence[ListingRow]) -> str:
    """Return the rows as a table of text."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS) - 1)]
    texts: list[str] = []
    for line in lines:
        cells = [
            f"{cell:>{width}}" if 4 <= i <= 7 else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ]
        texts.append("  ".join([*cells, line[-1]]).rstrip())
    return "\n".join(texts)
