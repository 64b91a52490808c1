"""How long what takes its time will take: from what it took on this machine before, or so far."""

import time
from collections.abc import Mapping
from typing import Any

from common.config.run_config import ModelSection
from common.dashboard.run_view import RunView
from common.store.status.startup_history import StartupHistory

KINDS = ("actor", "learner", "scheduler", "envhub")


def start_of(role: str, model: ModelSection) -> str:
    """Return by what a start of a role is known: models take very different times."""
    kind = next((kind for kind in KINDS if role.startswith(kind)), role)
    return f"{kind} {model.path} {model.dtype}"


class Pace:
    """What the launcher knows of times: it tells the displays, and learns from what it sees."""

    def __init__(self, model: ModelSection, *, usual: StartupHistory | None = None) -> None:
        self._model, self._usual = model, usual or StartupHistory()
        self._starting: dict[str, float] = {}
        self._known: dict[str, float] = {}
        self._phase: tuple[str, int] = ("", 0)  # and how many episodes it has
        self._began: tuple[float, int] = (0.0, 0)  # when it was seen first, and what was done

    def look(self, view: RunView) -> None:
        """Note who has started meanwhile, and which phase goes on."""
        known = {each.name for each in view.status.actors if each.last_seen_s is not None}
        if view.status.learner.last_seen_s is not None:
            known.add("learner")  # as the launcher calls it
        for role in (set(self._starting) - set(view.starting)) & known:
            self._usual.note(start_of(role, self._model), self._starting[role])
        for role in set(view.starting) - set(self._starting):
            self._known.pop(role, None)
            if (usual_s := self._usual.seconds(start_of(role, self._model))) is not None:
                self._known[role] = round(usual_s, 1)
        self._starting = dict(view.starting)
        phase = (view.status.phase, view.status.num_total)
        if phase != self._phase:
            self._phase, self._began = phase, (time.time(), view.status.num_done)

    def told(self) -> Mapping[str, Any]:
        """Return the fields of a `LaunchState` that it knows."""
        usual_s = {role: self._known[role] for role in self._starting if role in self._known}
        began, done = self._began
        return {
            "usual_s": usual_s,
            "phase": self._phase[0],
            "phase_began_at": began,
            "phase_done": done,
        }
