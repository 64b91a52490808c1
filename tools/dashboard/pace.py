"""Estimates of durations: role starts from earlier starts, phases from their progress so far."""

import time
from collections.abc import Mapping
from typing import Any

from actor.engine.startup_history import StartupHistory
from common.config.model import ModelSection
from tools.dashboard.run_view import RunView

KINDS = ("actor", "learner", "scheduler", "envhub")


def start_of(role: str, model: ModelSection) -> str:
    """Return the key of a role's start in `StartupHistory`; the model is a part of it."""
    kind = next((kind for kind in KINDS if role.startswith(kind)), role)
    return f"{kind} {model.path} {model.dtype}"


class EtaEstimator:
    """Measures startup times and phase progress of a run, and supplies them to the displays."""

    def __init__(self, model: ModelSection, *, usual: StartupHistory | None = None) -> None:
        self._model, self._usual = model, usual or StartupHistory()
        self._starting: dict[str, float] = {}
        self._known: dict[str, float] = {}
        self._phase: tuple[str, int] = ("", 0)  # Name and total number of episodes.
        # Time of the first observation of the phase, and the episodes done then.
        self._began: tuple[float, int] = (0.0, 0)

    def observe(self, view: RunView) -> None:
        """Record the roles that finished starting, and the current phase."""
        known = {each.name for each in view.status.actors if each.last_seen_s is not None}
        if view.status.learner.last_seen_s is not None:
            known.add("learner")  # The launcher's name of this role.
        for role in (set(self._starting) - set(view.starting)) & known:
            self._usual.note(start_of(role, self._model), self._starting[role])
        for role in set(view.starting) - set(self._starting):
            self._known.pop(role, None)
            if (usual_s := self._usual.seconds(start_of(role, self._model))) is not None:
                self._known[role] = round(usual_s, 1)
        self._starting = dict(view.starting)
        phase = (view.status.phase, view.status.num_total)
        if phase != self._phase:
            self._phase = phase
            self._began = (time.time(), view.status.num_done)

    def as_dict(self) -> Mapping[str, Any]:
        """Return the known fields of a `LaunchState`."""
        usual_s = {role: self._known[role] for role in self._starting if role in self._known}
        began, done = self._began
        return {
            "usual_s": usual_s,
            "phase": self._phase[0],
            "phase_began_at": began,
            "phase_done": done,
        }
