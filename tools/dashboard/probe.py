"""Liveness and readiness checks of a run, for process supervisors."""

import time

from common.host.lock import is_held
from common.store.run_dir import RunDir
from tools.dashboard.run_view import SILENT_S, RunView

HUNG_S = 60.0  # Maximum age of launch.json. The launcher writes it several times a second.


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
