"""Commands of this project as Ray tasks that return their result files as text."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false

import glob
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.errors import LongstrideError
from common.launch.guardian import Guardian
from common.launch.process import ChildProcess, describe_exit
from common.repository import ROOT

LOOK_S = 0.5
HERE = "{here}"  # Placeholder in an argument: the task's folder, which is deleted at its end.


@ray.remote(max_retries=2)
def _command(argv: list[str], keep: str) -> tuple[int, str, dict[str, str]]:
    """Run the command in this task; return exit code, last log lines and files to keep."""
    with (
        tempfile.TemporaryDirectory(prefix="longstride-job-") as here,
        closing(Guardian()) as guardian,  # It ends the child of a cancelled task.
    ):
        command = [sys.executable, *(each.replace(HERE, here) for each in argv)]
        log = Path(here) / "job.log"
        child = ChildProcess("job", command, log_path=log, cwd=ROOT, guardian=guardian)
        while not child.has_ended_by(time.monotonic() + LOOK_S):
            pass
        last = " / ".join(child.log_tail(max_lines=3))
        child.clear_away()
        found = {
            Path(name).name: Path(name).read_text(encoding="utf-8")
            for name in glob.glob(str(Path(here) / keep))
        }
        return child.poll() or 0, last, found


class Jobs:
    """Runs commands on a cluster, from several threads at once, each on a node with a free CPU.

    Example:
        One CPU, two commands: the second waits while the first one runs. If another program takes
        the CPU after the first has ended, the second fails after `place_timeout_s`.
    """

    def __init__(self, *, stop: threading.Event, place_timeout_s: float) -> None:
        """Start nothing yet; the event `stop` ends the running commands."""
        self._stop = stop
        self._place_timeout_s = place_timeout_s
        self._running: set[PlacementGroup] = set()

    def perform(self, argv: Sequence[str], *, keep: str, timeout_s: float) -> dict[str, str]:
        """Run `run.py ...` on a node with a free CPU; return its result files, name to text.

        Every node needs this project at the same path, as the roles do. If a node dies, its task is
        repeated on another node.

        Args:
            argv: "{here}" in it is replaced by the task's own folder for results.
            keep: glob pattern of the files in that folder that are returned.
            timeout_s: for the command, after its placement.

        Raises: LongstrideError: the command found no node, failed without files or timed out, or
            `stop` was set.
        """
        group = placement_group([{"CPU": 1.0}])
        try:
            self._await_room(group)
            self._running.add(group)
            seat = PlacementGroupSchedulingStrategy(group, 0)
            task = _command.options(num_cpus=1, scheduling_strategy=seat).remote([*argv], keep)
            code, last, found = self._result(task, timeout_s=timeout_s)
        except RayError as error:
            raise LongstrideError(f"Ray failed: {str(error).splitlines()[0]}") from error
        finally:
            self._running.discard(group)
            remove_placement_group(group)
        if code and not found:
            raise LongstrideError(f"the command on Ray failed, {describe_exit(code)}: {last}")
        return found

    def _await_room(self, group: PlacementGroup) -> None:
        since = time.monotonic()
        while not group.wait(LOOK_S):
            self._check_stop()
            if self._running:  # A command of this process occupies the CPU.
                since = time.monotonic()
            if time.monotonic() - since > self._place_timeout_s:
                raise LongstrideError(
                    f"no Ray node had a free CPU for {self._place_timeout_s:g} s"
                    " (ray.place_timeout_s)"
                )

    def _result(self, task: Any, *, timeout_s: float) -> tuple[int, str, dict[str, str]]:
        deadline = time.monotonic() + timeout_s
        try:
            while not ray.wait([task], timeout=LOOK_S)[0]:
                self._check_stop()
                if time.monotonic() > deadline:
                    raise LongstrideError(f"the command on Ray did not end within {timeout_s:g} s")
        except LongstrideError:
            ray.cancel(task, force=True)
            raise
        return ray.get(task, timeout=LOOK_S)

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise LongstrideError("stopped")
