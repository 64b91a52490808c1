"""The state of a run in text, its probes for supervisors, and estimates of its durations."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from actor.engine.startup_history import StartupHistory
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.cpu import cpu_seconds
from common.host.lock import is_held
from common.store.members import node_lines
from common.store.run_dir import RunDir, as_map, json_object
from common.store.run_start import load_finished
from common.text import plain
from learner.journal.metrics import copy_state, tail_metrics
from tools.dashboard.run_view import SILENT_S, WINDOW_STEPS, RunView
from tools.dashboard.verdict import judge
from tools.dashboard.words import ledger_line, status_line

HUNG_S = 60.0  # Maximum age of launch.json. The launcher writes it several times a second.
KINDS = ("actor", "learner", "scheduler", "envhub")
RUN_FILES = ("config.yaml", "journal", "metrics.jsonl")
PARTS = ("eval", "sft", "dpo", "evolve", "iteration-*")  # Folders of commands within a run's.
GOES_ON = "the same command resumes the run"


def why_not_live(run_dir: RunDir) -> str:
    """Return why a run must be restarted; "" if it is live or finished."""
    if run_dir.finished.exists():
        return ""
    if not is_held(run_dir.root):
        return "no launcher process supervises the run"
    try:
        silent_s = time.time() - run_dir.launch.stat().st_mtime
    except FileNotFoundError:  # The run has just begun.
        return ""
    if silent_s <= HUNG_S:
        return ""
    return f"the launcher hangs: it last wrote launch.json {silent_s:.0f} s ago"


def why_not_ready(run_dir: RunDir, view: RunView) -> str:
    """Return why a run does no work at the moment; "" if it works or is finished."""
    if run_dir.finished.exists():
        return ""
    if view.stop_in_s is not None:
        return "the run is stopping"
    if view.silent_s is None or view.silent_s > SILENT_S:
        return "the scheduler does not write status.json"
    if view.starting:
        return f"roles are starting: {', '.join(sorted(view.starting))}"
    if not view.status.actors:
        return "no actor has joined the run"
    return why_not_live(run_dir)


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run of any version and age."""
    return folder.is_dir() and any((folder / name).exists() for name in RUN_FILES)


def parts_of(folder: Path) -> list[Path]:
    """Return the folders of the commands beside a run, the most recently changed first."""
    parts = [part for pattern in PARTS for part in folder.glob(pattern) if is_run(part)]
    return sorted(parts, key=changed_at, reverse=True)


def changed_at(folder: Path) -> float:
    """Return when a folder changed last; 0 if it was just removed."""
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def is_part(folder: Path) -> bool:
    """Return whether a folder belongs to a command beside a run, which has no scheduler."""
    is_named = any(fnmatch(folder.name, pattern) for pattern in PARTS)
    return is_named and not RunDir(root=folder).ledger.exists()


def part_line(part: Path) -> str:
    """Return the state of a command beside a run, such as "finished at step 240"."""
    run_dir = RunDir(root=part)
    step = (tail_metrics(run_dir.metrics, num_steps=1) or [{}])[-1].get("step")
    at = f" at step {step:.0f}" if step else ""
    if run_dir.finished.exists():
        return f"finished{at}"
    return f"running{at}" if is_held(part) else f"stopped{at}"


def state_line(run_dir: RunDir, view: RunView) -> str:
    """Return the state line of the command `status`."""
    if run_dir.finished.exists():
        result = load_finished(run_dir)["result"]
        return "; ".join(filter(None, [f"finished: step {view.step}/{view.num_steps}", result]))
    # Roles can also be started one by one, without a launcher that holds the run's lock.
    is_written = view.silent_s is not None and view.silent_s <= SILENT_S
    if is_written or is_held(run_dir.root):
        return status_line(view)
    return f"stopped at step {view.step}/{view.num_steps}; {GOES_ON}"


def details(cfg: RunConfig, run_dir: RunDir) -> list[str]:
    """Return the further lines of `status`: ledger, causes, processor time, nodes and limit."""
    ledger = json_object(run_dir.ledger)
    counts = ledger_line({k: v for k, v in ledger.items() if isinstance(v, int)})
    causes = [f"{name} {num}" for name, num in sorted(as_map(ledger.get("causes")).items())]
    tail = tail_metrics(run_dir.metrics, num_steps=WINDOW_STEPS)
    status = json_object(run_dir.status)
    verdict = judge(tail, asdict(cfg), {} if run_dir.finished.exists() else status)
    lines = [counts and f"episodes: {counts}", causes and f"causes: {', '.join(causes)}"]
    lines.append(_cpu_line(run_dir))
    lines.append(copy_line(run_dir) if copy_state(run_dir) else "")
    lines += node_lines(status)
    lines.append(_change_line(status))
    return [plain(str(line)) for line in [*lines, f"limit: {verdict.sentence}"] if line]


def _change_line(status: Mapping[str, Any]) -> str:
    """Return the last change of live keys; "" without one."""
    last = as_map(as_map(status.get("live_config")).get("last"))
    old = as_map(last.get("old"))
    changes = [f"{key} {old.get(key)} -> {value}" for key, value in as_map(last.get("new")).items()]
    if not changes:
        return ""
    return f"live change {last.get('number')} after step {last.get('step')}: {', '.join(changes)}"


def _cpu_line(run_dir: RunDir) -> str:
    """Return the processor time of the roles; "" if it was not measured."""
    used = sorted(cpu_seconds(run_dir).items(), key=lambda per_episode: -per_episode[1])
    if not used:
        return ""
    trained = json_object(run_dir.ledger).get("trained")
    total = sum(seconds for _, seconds in used)
    per_episode = f", {total / trained:.3g} s per trained episode" if trained else ""
    roles = ", ".join(f"{role} {seconds / total:.0%}" for role, seconds in used if seconds)
    return f"processor time: {total:.0f} s{per_episode} ({roles})"


def copy_line(run_dir: RunDir, *, is_whole: bool = False) -> str:
    """Return one line about the run's copy in a store.

    Args:
        is_whole: whether the copy is known to be complete.
    """
    state = json_object(run_dir.root / "copies.json")
    where = f"the copy at {state.get('to') or 'the store'}"
    if is_whole:
        return f"{where} is complete"
    age_s = max(0.0, time.time() - float(state.get("copied_at") or time.time()))
    lag = f"lacks {float(state.get('lag_bytes') or 0) / 1e6:.1f} MB of the journal"
    failed = f"; the store fails: {state['error']}" if state.get("error") else ""
    return f"{where} {lag}, it is {age_s:.0f} s old{failed}"


def stop_line(run_dir: RunDir, step: int) -> str:
    """Return the last line of a run that was interrupted after `step`."""
    complete = run_dir.checkpoints.glob("step-*/COMPLETE")
    numbers = [path.parent.name.removeprefix("step-") for path in complete]
    saved = max((int(number) for number in numbers if number.isdigit()), default=None)
    if saved is None and step == 0:
        return f"stopped before the first step; {GOES_ON}"
    if saved is None or saved < step:
        last = "no checkpoint" if saved is None else f"the last checkpoint at step {saved}"
        return f"stopped at step {step} with {last}; {GOES_ON} and repeats the later steps"
    return f"stopped with a checkpoint at step {saved}; {GOES_ON}"


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
        seen = {each.name for each in view.status.actors if each.last_seen_s is not None}
        if view.status.learner.last_seen_s is not None:
            seen.add("learner")  # The launcher's name of this role.
        for role in (set(self._starting) - set(view.starting)) & seen:
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
