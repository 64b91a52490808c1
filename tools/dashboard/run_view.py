"""The current state of a run from its files, for displays. Missing files are tolerated."""

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, TypeAdapter, ValidationError

from common.config.horizon import HorizonKind, HorizonSection
from common.config.train import TrainSection
from common.store.run_dir import RunDir
from common.wire.access.identities import RANKS
from learner.journal.metrics import MetricsLine, tail_metrics
from learner.teacher.scores import TEACHER
from tools.launch.base import LaunchState

WINDOW_STEPS = 20
MAX_WARNINGS = 4  # Maximum number of warnings shown, the newest ones.
SILENT_S = 5.0  # Age of a stale status: the scheduler writes its status once a second.
PHASES = {
    "starting": "starting",
    "eval_before": "evaluation before training",
    "train": "training",
    "eval_after": "evaluation after training",
    "done": "done",
}
CHECKPOINT = "train/checkpoint_s"
LEDGER_KEYS = ("trained", "filtered", "stale", "failed", "in_flight")
_LOG_TAIL_BYTES = 16384
_WARNING = re.compile(  # Errors of all loggers, and warnings of Longstride's own loggers only.
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* ([EC] |W \S+ (actor|common|envhub|learner)\b)"
)
T = TypeVar("T")


class RoleView(BaseModel):
    """One role, as of its last heartbeat to the scheduler."""

    name: str = "learner"
    version: int | None = None
    running: int = 0  # Number of running episodes.
    tokens_per_s: float | None = None
    waiting_for: str = ""  # "" when busy.
    last_seen_s: float | None = None
    rss_bytes: int | None = None


class FailureView(BaseModel):
    """Failed episodes of one kind."""

    cause: str
    error: str  # Error of the first one.
    num: int


class Status(BaseModel):
    """The displayed part of the scheduler's status.json. None: unknown."""

    phase: str = "starting"
    version: int | None = None
    horizon: float | None = None
    stage: int | None = None  # The stage, counted from 0.
    unit: str = "turns"
    distance: float | None = None  # None: no distance curriculum.
    distance_stage: int | None = None
    num_done: int = Field(default=0, validation_alias=AliasPath("progress", "num_done"))
    num_total: int = Field(default=0, validation_alias=AliasPath("progress", "num_total"))
    num_open: int | None = Field(default=None, validation_alias=AliasPath("groups", "open"))
    num_ready: int | None = Field(default=None, validation_alias=AliasPath("groups", "ready"))
    notice: str = ""  # Reason why training makes no progress although all roles work.
    failures: list[FailureView] = []  # The most frequent kind is first.
    ledger: dict[str, Any] = {}
    success: dict[str, float] = {}  # Training success by subset.
    success_before: float | None = Field(default=None, validation_alias=AliasPath("eval", "before"))
    actors: list[RoleView] = []
    learner: RoleView = RoleView()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The displayed numbers of a run. None: unknown."""

    status: Status
    elapsed_s: float | None  # Seconds since the launcher started.
    # Role -> seconds since its process started, for roles without a heartbeat since then.
    starting: dict[str, float]
    # Starting role -> its usual startup time on this machine, in seconds.
    usual_s: dict[str, float]
    unplaced: dict[str, str]  # Role that fits on no node -> the resources it needs.
    stop_in_s: float | None  # Seconds until the stopping learner is killed.
    step: int
    num_steps: int
    eta_s: float | None
    phase_left_s: float | None  # Remaining seconds of an evaluation.
    checkpoint_s: float | None  # Duration of the last checkpoint.
    success: float | None  # Mean training success over the last WINDOW_STEPS.
    success_steps: list[float] = field(repr=False)
    group_reward: float | None  # Mean of `groups.reward` over the last WINDOW_STEPS.
    num_stages: int
    lag_mean: float | None
    lag_max: float | None
    silent_s: float | None  # Seconds since the scheduler's last status.
    warnings: list[str] = field(repr=False)  # The newest warning is last.

    @property
    def phase(self) -> str:
        """The phase in words, such as "evaluation before training"."""
        return PHASES.get(self.status.phase, self.status.phase)

    @property
    def roles(self) -> list[RoleView]:
        """The learner, then the actors."""
        return [self.status.learner, *self.status.actors]

    @property
    def is_silent(self) -> bool:
        """Whether the scheduler's status is stale although it is neither starting nor done."""
        is_late = self.silent_s is not None and self.silent_s > SILENT_S
        return is_late and self.status.phase != "done" and "scheduler" not in self.starting

    @property
    def actor_tokens_per_s(self) -> float | None:
        """Sum over the actors; None before the first report."""
        rates = [a.tokens_per_s for a in self.status.actors if a.tokens_per_s is not None]
        return sum(rates) if rates else None


def view_run(run_dir: RunDir, train: TrainSection, horizon: HorizonSection) -> RunView:
    """Read status.json, the tail of metrics.jsonl and the tails of the logs."""
    status = _read(_STATUS, run_dir.status) or Status()
    tail = tail_metrics(run_dir.metrics, num_steps=WINDOW_STEPS)
    numeric: list[MetricsLine] = [
        {k: v for k, v in line.items() if isinstance(v, int | float)} for line in tail
    ]
    lines = [line for line in numeric if "step" in line]
    last: MetricsLine = lines[-1] if lines else {}
    success = [value for line in lines if (value := line.get("reward/success")) is not None]
    rewards = [value for line in lines if (value := line.get("group_rewards/mean")) is not None]
    step = int((last.get("step") or 0) if status.version is None else status.version)
    launch = _read(_LAUNCH, run_dir.launch)
    stop_at = launch.stop_deadline if launch else None
    now = time.time()
    written_at = _modified_at(run_dir.status)
    return RunView(
        status=status,
        elapsed_s=now - launch.began_at if launch else None,
        starting=_starting(launch.started_at, status, run_dir) if launch else {},
        usual_s=launch.usual_s if launch else {},
        unplaced=launch.waiting if launch else {},
        stop_in_s=None if stop_at is None else max(0.0, stop_at - now),
        step=step,
        num_steps=train.num_steps,
        eta_s=_eta_s(lines, train.num_steps - step),
        phase_left_s=_phase_left_s(status, launch, now),
        checkpoint_s=next((s for line in reversed(lines) if (s := line.get(CHECKPOINT))), None),
        success=sum(success) / len(success) if success else None,
        success_steps=success,
        group_reward=sum(rewards) / len(rewards) if rewards else None,
        num_stages=1 if horizon.kind is HorizonKind.FIXED else len(horizon.stages),
        lag_mean=last.get("offpolicy/lag_mean"),
        lag_max=last.get("offpolicy/lag_max"),
        silent_s=None if written_at is None else max(0.0, now - written_at),
        warnings=_last_warnings(run_dir.logs),
    )


def _starting(started_at: dict[str, float], status: Status, run_dir: RunDir) -> dict[str, float]:
    """Return the roles without a heartbeat since their start -> seconds since then."""
    written_at = _modified_at(run_dir.status) or 0.0
    hub = run_dir.addresses / "envhub"
    # A hub on another node reports to the scheduler, which starts once it has a hub.
    heard_at = {"scheduler": written_at, "envhub": _modified_at(hub) or written_at}
    for name, role in [("learner", status.learner), *((a.name, a) for a in status.actors)]:
        if role.last_seen_s is not None:
            heard_at[name] = written_at - role.last_seen_s
    for name in started_at:
        if name.startswith(RANKS):  # A further node of the learner sends heartbeats to rank 0.
            heard_at[name] = heard_at.get("learner", 0.0)
        # It publishes its address when its engine is ready.
        if name.startswith("judge-") or name == TEACHER:
            heard_at[name] = _modified_at(run_dir.addresses / name) or 0.0
    now = time.time()
    return {
        name: now - started
        for name, started in started_at.items()
        if heard_at.get(name, 0.0) < started
    }


def _eta_s(lines: list[MetricsLine], num_left: int) -> float | None:
    """Return the time of the remaining steps at the pace of the last steps."""
    timed = [(line["step"] or 0, at) for line in lines if (at := line.get("time_s")) is not None]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0] or num_left < 0:
        return None
    return (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0]) * num_left


def _phase_left_s(status: Status, launch: LaunchState | None, now: float) -> float | None:
    """Return the remaining time of an evaluation at its pace so far."""
    if launch is None or launch.phase != status.phase or not status.num_total:
        return None
    done = status.num_done - launch.phase_done
    left = status.num_total - status.num_done
    return (now - launch.phase_began_at) * left / done if done > 0 else None


def _last_warnings(logs: Path) -> list[str]:
    """Return the newest warnings at the ends of all logs."""
    warnings: list[str] = []
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                texts = handle.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        warnings += [text for text in texts if _WARNING.match(text)]
    return sorted(warnings)[-MAX_WARNINGS:]


_STATUS, _LAUNCH = TypeAdapter(Status), TypeAdapter(LaunchState)


def _read(kind: TypeAdapter[T], path: Path) -> T | None:
    """Return the parsed file; None if it is missing or invalid."""
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def _modified_at(path: Path) -> float | None:
    """Return when a file changed last; None if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
