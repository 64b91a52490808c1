"""Where a run stands, in one line: finished, stopped, or what is going on."""

from common.dashboard.run_view import SILENT_S, RunView
from common.dashboard.words import status_line
from common.launch.lock import is_held
from common.store.run_dir import RunDir
from common.store.run_start import load_finished

GOES_ON = "the same command goes on"


def state_line(run_dir: RunDir, view: RunView) -> str:
    """Return what `status` prints of a run, whatever its state."""
    if run_dir.finished.exists():
        result = load_finished(run_dir)["result"]
        return "; ".join(filter(None, [f"finished: step {view.step}/{view.num_steps}", result]))
    # Roles may have been started one by one, without a launcher that holds the run.
    is_written = view.silent_s is not None and view.silent_s <= SILENT_S
    if is_written or is_held(run_dir.root):
        return status_line(view)
    return f"stopped at step {view.step}/{view.num_steps}; {GOES_ON}"


def stop_line(run_dir: RunDir, step: int) -> str:
    """Return what a run that was interrupted after `step` says at its end."""
    complete = run_dir.checkpoints.glob("step-*/COMPLETE")
    numbers = [path.parent.name.removeprefix("step-") for path in complete]
    saved = max((int(number) for number in numbers if number.isdigit()), default=None)
    if saved is None and step == 0:
        return f"stopped before the first step; {GOES_ON}"
    if saved is None or saved < step:
        last = "nothing" if saved is None else f"step {saved}"
        return f"stopped at step {step}, saved is {last}; {GOES_ON} and repeats the steps since"
    return f"saved at step {saved}; {GOES_ON}"
