"""How long what takes its time will take: from what it took on this machine before, or so far."""

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.config.run_config import ModelSection
from common.dashboard.reading.index_cache import cache_folder
from common.dashboard.reading.tail import as_map, json_object
from common.dashboard.run_view import RunView
from common.store.run_dir import write_json

MAX_KNOWN = 500  # kinds of start; the oldest go
WEIGHT = 0.5  # of the last time in the mean
KINDS = ("actor", "learner", "scheduler", "envhub")


class Usual:
    """Seconds that starts usually take on this machine, kept in the user's cache folder.

    Example: note("actor model-a", 40.0), later note("actor model-a", 20.0): seconds() is 30.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read nothing yet."""
        self._path = path or cache_folder().with_name("durations.json")

    def seconds(self, what: str) -> float | None:
        """Return how long it usually takes; None if it was never seen to the end."""
        found = as_map(json_object(self._path).get(what)).get("seconds")
        return float(found) if isinstance(found, int | float) else None

    def note(self, what: str, seconds: float) -> None:
        """Add a start that has come to its end; where nothing can be kept, nothing is."""
        before = self.seconds(what)
        new = seconds if before is None else WEIGHT * seconds + (1 - WEIGHT) * before
        known = json_object(self._path) | {what: {"seconds": round(new, 1), "at": time.time()}}
        with suppress(OSError, ValueError, TypeError):  # or somebody has written into it
            newest = sorted(known, key=lambda name: as_map(known[name]).get("at", 0.0))
            kept = {name: known[name] for name in newest[-MAX_KNOWN:]}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, kept)


def start_of(role: str, model: ModelSection) -> str:
    """Return by what a start of a role is known: models take very different times."""
    kind = next((kind for kind in KINDS if role.startswith(kind)), role)
    return f"{kind} {model.path} {model.dtype}"


class Pace:
    """What the launcher knows of times: it tells the displays, and learns from what it sees."""

    def __init__(self, model: ModelSection, *, usual: Usual | None = None) -> None:
        self._model, self._usual = model, usual or Usual()
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
