"""Reading of a run from Python: its episodes, metrics and checkpoints."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.messages import EpisodeKind, Outcome
from learner.journal.index import EVALUATED, IN_FLIGHT
from learner.journal.metrics import MetricsLine, read_metrics
from learner.recovery.reward_log import GroupReward, read_group_rewards
from tools.dashboard.reading.rows import find
from tools.dashboard.reading.run_source import RunSource
from tools.dashboard.reading.sources import find_run

READ_S = 1.0
CHECKPOINT = "step-"
# Kind of a segment -> role of its message. Other kinds, such as summaries, are the policy's own.
ROLES = {"prompt": "user", "observation": "user"}
NOT_TRAINED = -1
OUTCOMES = (*(each.value for each in Outcome), EVALUATED, IN_FLIGHT)


class Records(list[Any]):
    """A list of records; `frame()` returns them as a data frame."""

    def frame(self) -> Any:
        """Return a data frame of pandas, with one row for each record.

        Raises: ConfigError: pandas is not installed.
        """
        try:
            import pandas  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ConfigError(
                "frame() needs pandas. Install it with: pip install pandas (the extra `data`)"
            ) from error
        return pandas.DataFrame([_as_row(each) for each in self])


def _as_row(record: Any) -> dict[str, Any]:
    """Return a record as a map; fields that begin with an underscore are left out."""
    if isinstance(record, dict):
        return record
    names = [each.name for each in dataclasses.fields(record) if not each.name.startswith("_")]
    return {name: getattr(record, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint of a run."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode of a run's journal."""

    id: str
    group: str
    member: int
    kind: str  # "train" or "eval".
    policy: str  # "model", or a scripted policy such as "expert".
    env: str
    subset: str
    item: str
    reward: float  # The environment's.
    # The reward that training uses in a run with groups.reward; None: the group has none.
    group_reward: float | None
    solved: bool
    turns: int
    tokens: int  # All tokens of the episode.
    sampled: int  # Tokens that the policy sampled.
    horizon: int
    end: str  # Reason of its end, such as "done" or "horizon".
    outcome: str  # "trained", "filtered", "stale", "failed", "evaluated" or "in_flight".
    cause: str
    version: int  # Version of the weights at which its group opened.
    step: int | None  # Step that trained on it; None: no step did.
    wall_s: float
    _source: RunSource = field(repr=False, compare=False)

    def messages(self) -> list[dict[str, str]]:
        """Return the conversation as messages with `role` and `content`, read from the journal.

        Raises: WireError: the record is damaged.
        """
        segments = self._source.episode(self.id)["segments"]
        return [
            {"role": ROLES.get(part["kind"], "assistant"), "content": "".join(part["texts"])}
            for part in segments
        ]


class Run:
    """A run that was trained, or that still trains.

    Example:
        solved = Run("runs/x").episodes(step=12, solved=True)
        print(solved[0].messages())
    """

    def __init__(self, run: str | Path) -> None:
        """Find a run by its name below `runs/`, or by its folder.

        Raises: ConfigError: there is no such run; lists the runs that exist.
        """
        self.path = find_run(str(run), runs=ROOT / "runs")
        self._dir = RunDir(root=self.path)
        self._source = RunSource(self.path, name=self.path.name)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as nested maps; {} before it is written."""
        return self._source.config()

    @property
    def is_finished(self) -> bool:
        """Whether the run has trained its last step."""
        return self._dir.finished.exists()

    @property
    def metrics(self) -> Records:
        """The metrics of each step, as a map from names to numbers; null for one not finite."""
        lines: list[MetricsLine] = read_metrics(self._dir.metrics)
        return Records(lines)

    @property
    def checkpoints(self) -> Records:
        """The complete checkpoints (`Checkpoint`), the oldest first."""
        folders = [each.parent for each in self._dir.checkpoints.glob(f"{CHECKPOINT}*/COMPLETE")]
        return Records(
            Checkpoint(step=int(folder.name.removeprefix(CHECKPOINT)), path=folder)
            for folder in sorted(folders)
        )

    def episodes(
        self,
        *,
        step: int | None = None,
        solved: bool | None = None,
        kind: str = "",
        env: str = "",
        subset: str = "",
        item: str = "",
        group: str = "",
        outcome: str = "",
        min_reward: float | None = None,
        max_reward: float | None = None,
    ) -> Records:
        """Return the episodes (`Episode`) that match all filters, the oldest first.

        Args:
            step: the step that trained on the episode.
            kind: "train" or "eval".
            outcome: one of `OUTCOMES`.

        Raises: ConfigError: there is no such kind or outcome.
        """
        _check_choice("kind", kind, [each.value for each in EpisodeKind])
        _check_choice("outcome", outcome, OUTCOMES)
        while self._source.refresh(budget_s=READ_S):
            pass
        wanted = {
            **{"sort": "oldest", "kind": kind, "env": env, "subset": subset, "item": item},
            **{"group": group, "outcome": outcome},
            "success": "" if solved is None else str(int(solved)),
            "min_reward": "" if min_reward is None else str(min_reward),
            "max_reward": "" if max_reward is None else str(max_reward),
        }
        rows = self._source.rows
        numbers: Sequence[int] = find(rows, wanted).tolist()
        if step is not None:
            trained_at = rows.column("trained_at")
            numbers = [number for number in numbers if trained_at[number] == step]
        rewards = read_group_rewards(self._dir.group_rewards)
        return Records(self._episode(rows.get(number), rewards) for number in numbers)

    @property
    def problems(self) -> list[str]:
        """Messages about files and records that could not be read."""
        return self._source.problems()

    def _episode(self, row: dict[str, Any], rewards: Mapping[str, GroupReward]) -> Episode:
        """Return an episode from its row of the index, with the reward of its group."""
        trained_at = row["trained_at"]
        of_group = rewards.get(row["group"])
        names = {each.name for each in dataclasses.fields(Episode)} & row.keys()
        return Episode(
            **{name: row[name] for name in names},
            group_reward=None if of_group is None else of_group.rewards.get(row["member"]),
            solved=bool(row["success"]),
            step=None if trained_at == NOT_TRAINED else trained_at,
            _source=self._source,
        )


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError if a filter has a value that no episode can have; "" matches all."""
    if value and value not in choices:
        raise ConfigError(f"{name}={value}: expects one of {', '.join(choices)}")
