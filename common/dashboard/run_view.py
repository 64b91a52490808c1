"""What the files of a run say at this moment, for displays. Tolerates whatever is missing."""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from common.config.curriculum import HorizonKind
from common.config.run_config import RunConfig
from common.store.metrics import MetricsLine, tail_metrics
from common.store.run_dir import RunDir

WINDOW_STEPS = 20
SILENT_S = 5.0  # the scheduler writes its status once a second
PHASES = {
    "starting": "starting",
    "eval_before": "evaluation before training",
    "train": "training",
    "eval_after": "evaluation after training",
    "done": "done",
}
LEDGER_KEYS = ("trained", "filtered", "stale", "failed", "in_flight")
_LOG_TAIL_BYTES = 16384
_WARNING = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S* [WEC] ")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """One role as the scheduler last heard of it."""

    name: str
    version: int | None
    num_running: int
    tokens_per_s: float | None
    waiting_for: str  # "" when busy
    last_seen_s: float | None
    rss_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run in the numbers that people watch. None means: not known (yet)."""

    phase: str  # in words, such as "evaluation before training"
    progress: tuple[int, int] | None  # episodes done and in all, of an evaluation
    elapsed_s: float | None  # since the launcher started
    starting: dict[str, float]  # role -> seconds since its process started; not heard of yet
    stop_in_s: float | None  # until a learner that is being stopped is killed
    step: int
    num_steps: int
    eta_s: float | None
    success: float | None  # of training episodes, mean of the last WINDOW_STEPS
    success_steps: list[float] = field(repr=False)
    success_before: float | None  # held-out evaluation before training
    success_by_subset: dict[str, float]
    horizon: float | None
    stage: int | None  # 0-based
    num_stages: int
    lag_mean: float | None
    lag_max: float | None
    num_open: int | None  # groups
    num_ready: int | None
    ledger: dict[str, int]
    actors: list[RoleView]
    learner: RoleView
    silent_s: float | None  # since the scheduler wrote its status
    warnings: list[str] = field(repr=False)  # newest last

    @property
    def waits(self) -> list[tuple[str, str]]:
        """Who waits, and for whom."""
        roles = [self.learner, *self.actors]
        return [(role.name, role.waiting_for) for role in roles if role.waiting_for]

    @property
    def is_silent(self) -> bool:
        """Whether the scheduler writes no status any more, and it is not starting either."""
        is_late = self.silent_s is not None and self.silent_s > SILENT_S
        return is_late and self.phase != PHASES["done"] and "scheduler" not in self.starting

    @property
    def actor_tokens_per_s(self) -> float | None:
        """Sum over the actors; None before any has reported."""
        rates = [actor.tokens_per_s for actor in self.actors if actor.tokens_per_s is not None]
        return sum(rates) if rates else None


def view_run(run_dir: RunDir, cfg: RunConfig, *, max_warnings: int = 4) -> RunView:
    """Read status.json, the tail of metrics.jsonl and the tails of the logs."""
    status = _read_object(run_dir.status)
    lines = tail_metrics(run_dir.metrics, num_steps=WINDOW_STEPS)
    last = lines[-1] if lines else {}
    groups = _object(status.get("groups"))
    success = [v for line in lines if (v := _number(line.get("reward/success"))) is not None]
    step = _first(_number(status.get("version")), _number(last.get("step"))) or 0
    is_fixed = cfg.horizon.kind is HorizonKind.FIXED
    launch = _read_object(run_dir.launch)
    began_at, stop_at = _number(launch.get("began_at")), _number(launch.get("stop_deadline"))
    phase = str(status.get("phase") or "starting")
    return RunView(
        phase=PHASES.get(phase, phase),
        progress=_progress(_object(status.get("progress"))),
        elapsed_s=None if began_at is None else time.time() - began_at,
        starting=_starting(_numbers(launch.get("started_at")), status, run_dir),
        stop_in_s=None if stop_at is None else max(0.0, stop_at - time.time()),
        step=int(step),
        num_steps=cfg.train.num_steps,
        eta_s=_eta_s(lines, cfg.train.num_steps - int(step)),
        success=sum(success) / len(success) if success else None,
        success_steps=success,
        success_before=_number(_object(status.get("eval")).get("before")),
        success_by_subset=_numbers(status.get("success")) or _subset_metrics(last),
        horizon=_first(_number(status.get("horizon")), _number(last.get("horizon/value"))),
        stage=_integer(_first(_number(status.get("stage")), _number(last.get("horizon/stage")))),
        num_stages=1 if is_fixed else len(cfg.horizon.stages),
        lag_mean=_number(last.get("offpolicy/lag_mean")),
        lag_max=_number(last.get("offpolicy/lag_max")),
        num_open=_integer(_first(groups.get("open"), status.get("num_open"))),
        num_ready=_integer(_first(groups.get("ready"), status.get("num_ready"))),
        ledger=_ledger(_object(status.get("ledger")) or _read_object(run_dir.ledger)),
        actors=_actors(status),
        learner=_role("learner", _object(status.get("learner")), last),
        silent_s=_age_s(run_dir.status),
        warnings=_last_warnings(run_dir.logs, max_warnings),
    )


def _progress(entry: dict[str, Any]) -> tuple[int, int] | None:
    num_done, num_total = _integer(entry.get("num_done")), _integer(entry.get("num_total"))
    return None if num_done is None or not num_total else (num_done, num_total)


def _starting(
    started_at: dict[str, float], status: dict[str, Any], run_dir: RunDir
) -> dict[str, float]:
    """Return the roles that run but have not been heard of since, and for how many seconds.

    Args:
        started_at: role -> Unix time.
    """
    written_at = _modified_at(run_dir.status) or 0.0
    heard_at = {"scheduler": written_at}
    heard_at["envhub"] = _modified_at(run_dir.addresses / "envhub") or 0.0
    members = [*_list(status.get("actors")), {**_object(status.get("learner")), "name": "learner"}]
    for member in map(_object, members):
        age_s = _number(member.get("last_seen_s"))
        if age_s is not None:
            heard_at[str(member.get("name"))] = written_at - age_s
    now = time.time()
    return {
        name: now - started
        for name, started in started_at.items()
        if heard_at.get(name, 0.0) < started
    }


def _actors(status: dict[str, Any]) -> list[RoleView]:
    entries = _list(status.get("actors"))
    return [_role(f"actor-{i}", _object(entry), {}) for i, entry in enumerate(entries)]


def _role(name: str, entry: dict[str, Any], metrics: MetricsLine) -> RoleView:
    running = entry.get("running")
    num_running = len(_list(running)) or _integer(running)
    own_name = str(entry.get("name") or name)
    return RoleView(
        name=own_name,
        version=_integer(entry.get("version")),
        num_running=num_running or 0,
        tokens_per_s=_first(
            _number(entry.get("tokens_per_s")),
            _number(metrics.get("train/tokens_per_s")),
        ),
        waiting_for=str(entry.get("waiting_for") or ""),
        last_seen_s=_number(entry.get("last_seen_s")),
        rss_bytes=_integer(
            _first(_number(entry.get("rss_bytes")), metrics.get(f"memory/{name}_rss_bytes"))
        ),
    )


def _eta_s(lines: list[MetricsLine], num_left: int) -> float | None:
    """Return the time that the remaining steps take at the pace of the last ones."""
    timed = [
        (step, time_s)
        for line in lines
        if (step := _number(line.get("step"))) is not None
        and (time_s := _number(line.get("time_s"))) is not None
    ]
    if len(timed) < 2 or timed[-1][0] <= timed[0][0] or num_left < 0:
        return None
    pace_s = (timed[-1][1] - timed[0][1]) / (timed[-1][0] - timed[0][0])
    return pace_s * num_left


def _subset_metrics(line: MetricsLine) -> dict[str, float]:
    prefix = "reward/success/"
    return _numbers({k.removeprefix(prefix): v for k, v in line.items() if k.startswith(prefix)})


def _ledger(entries: dict[str, Any]) -> dict[str, int]:
    known = {key: _integer(entries.get(key)) for key in ("issued", *LEDGER_KEYS, "lost")}
    return {key: value for key, value in known.items() if value is not None}


def _last_warnings(logs: Path, num: int) -> list[str]:
    found: list[str] = []
    for path in sorted(logs.glob("*.log")):
        try:
            with path.open("rb") as handle:
                handle.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
                texts = handle.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        found += [text for text in texts if _WARNING.match(text)]
    return sorted(found)[-num:]


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _age_s(path: Path) -> float | None:
    modified_at = _modified_at(path)
    return None if modified_at is None else max(0.0, time.time() - modified_at)


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return cast("list[object]", value) if isinstance(value, list) else []


def _numbers(value: object) -> dict[str, float]:
    items = _object(value).items()
    return {str(key): number for key, v in items if (number := _number(v)) is not None}


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def _integer(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
