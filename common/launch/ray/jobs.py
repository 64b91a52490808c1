"""Commands of this project as Ray tasks, whose results come back as text."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false

import glob
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.exceptions import RayError

from common.errors import LongstrideError
from common.repository import ROOT

LOOK_S = 0.5
HERE = "{here}"  # in an argument: the folder of the task, which goes at its end
TAIL_CHARS = 2000


@ray.remote(max_retries=2)
def _command(argv: list[str], keep: str) -> tuple[int, str, dict[str, str]]:
    """Run it where this task is; return its exit code, its last words and the files to keep."""
    with tempfile.TemporaryDirectory(prefix="longstride-job-") as here:
        told = [sys.executable, *(each.replace(HERE, here) for each in argv)]
        done = subprocess.run(
            told, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        found = {
            Path(name).name: Path(name).read_text(encoding="utf-8")
            for name in glob.glob(str(Path(here) / keep))
        }
        return done.returncode, done.stdout[-TAIL_CHARS:], found


def perform(argv: Sequence[str], *, keep: str, stop: threading.Event) -> dict[str, str]:
    """Run `run.py ...` on a node with a free CPU; return the files it left, name to text.

    Every node has this project at the same place, as its roles need it. A task whose node dies is
    tried on another one.

    Args:
        argv: "{here}" in it is a folder of the task's own, for results.
        keep: which files of that folder come back, as a pattern.

    Raises: LongstrideError: it failed and left nothing, or `stop` was set.
    """
    task = _command.options(num_cpus=1).remote([*argv], keep)
    try:
        while not ray.wait([task], timeout=LOOK_S)[0]:
            if stop.is_set():
                ray.cancel(task, force=True)
                raise LongstrideError("stopped")
        code, last, found = ray.get(task)
    except RayError as error:
        raise LongstrideError(f"on Ray: {str(error).splitlines()[0]}") from error
    if code and not found:
        raise LongstrideError(f"on Ray, exit code {code}: {' / '.join(last.splitlines()[-3:])}")
    return found
