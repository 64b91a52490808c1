"""Monitors a run by its files and its hub: steps, live roles and the ledger."""

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real_run import Role
from common.http.blocking import request
from common.store.run_dir import RunDir

ASK_S = 1.0  # Time limit of a hub's answer.


@dataclass(slots=True)
class StepObserver:
    """Polls a run directory on request."""

    run_dir: RunDir
    # Monotonic time of each step's end.
    step_times: list[float] = field(default_factory=lambda: [])
    _offset: int = 0

    def poll_steps(self) -> int:
        """Read the new steps; return the total number.

        A restarted learner writes the lines of the steps after its checkpoint again.
        """
        path = self.run_dir.metrics
        if path.exists():
            with path.open("rb") as handle:
                if handle.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0
                handle.seek(self._offset)
                whole, end, _ = handle.read().rpartition(b"\n")
            self._offset += len(whole) + len(end)
            steps = [json.loads(line).get("step", 0) for line in whole.splitlines()]
            num_new = max(steps, default=0) - len(self.step_times)
            self.step_times += [time.monotonic()] * num_new
        return len(self.step_times)

    def is_back(self, role: Role, *, since: float, num_steps: int) -> bool:
        """Return whether a role works again.

        Args:
            since: wall-clock seconds of the fault's end.
            num_steps: number of steps at that time.
        """
        match role:
            case Role.LEARNER | Role.RANK:
                return self.poll_steps() > num_steps
            case Role.SCHEDULER:
                return _written_s(self.run_dir.status) > since
            case Role.HUB:
                return self._hub_answers()
            case Role.ACTOR | Role.ENGINE:
                return self._actors_play(since)

    def _hub_answers(self) -> bool:
        """Return whether the hub answers."""
        url = self.run_dir.find_address("envhub")
        try:
            return request(f"{url}/healthz", timeout_s=ASK_S, is_own=True).status == 200
        except (OSError, ValueError):
            return False

    def _actors_play(self, since: float) -> bool:
        """Return whether all live actors have reported since then that they sample."""
        written_s = _written_s(self.run_dir.status)
        actors = read_json(self.run_dir.status).get("actors", [])
        alive = [actor for actor in actors if not actor["is_dead"]]
        heard = [actor for actor in alive if written_s - actor["last_seen_s"] > since]
        return bool(heard) and heard == alive and all(a["tokens_per_s"] > 0 for a in heard)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, {} if it does not exist."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _written_s(path: Path) -> float:
    """Return when a file was written last; 0 without it."""
    return path.stat().st_mtime if path.exists() else 0.0
