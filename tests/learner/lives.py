"""A process that has imported a learner and forks one life of it after the other, each killed.

`python -m tests.learner.lives`: reads a JSON list [run directory, point, number] per line; the life
kills itself with SIGKILL when it is at that point for the given time; "" is never. Answers with the
exit status of the life: -9, or 0.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.config.load import load_config
from common.log import configure_logging
from common.store.run_dir import RunDir
from learner.ingest.buffer import TrajectoryBuffer
from learner.journal.journal import JournalWriter
from learner.main import run
from learner.training import checkpoint
from learner.training.trainer import Trainer


def before(owner: Any, name: str, number: int, *, is_it: Callable[..., bool]) -> None:
    """Kill this process before the call of a method for the given time."""
    method, left = getattr(owner, name), [number]

    def killing(*arguments: Any, **named: Any) -> Any:
        left[0] -= is_it(*arguments, **named)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*arguments, **named)

    setattr(owner, name, killing)


def always(*_: Any, **__: Any) -> bool:
    return True


def has_appended(journal: JournalWriter) -> bool:
    return journal.position.offset > 0


def is_skip(_: TrajectoryBuffer, outcomes: Any) -> bool:
    return any(outcome.cause == "controller" for outcome in outcomes)


POINTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "between append and sync": (JournalWriter, "sync", has_appended),
    "between sync and acknowledgement": (TrajectoryBuffer, "add", always),
    "between acknowledgement and training": (Trainer, "train_on", always),
    "before a checkpoint has its tensors": (checkpoint, "export", always),
    "before a checkpoint has its name": (checkpoint, "sync_tree", always),
    "after a skipped batch is logged": (TrajectoryBuffer, "report", is_skip),
    "after a step is logged": (TrajectoryBuffer, "mark_trained", always),
}


def live(root: Path, point: str, number: int) -> None:
    """Be a learner until it is killed, or the run is over."""
    configure_logging("learner", "INFO")
    if point:
        owner, name, is_it = POINTS[point]
        before(owner, name, number, is_it=is_it)
    run_dir = RunDir(root=root)
    run(load_config(str(run_dir.config), []), run_dir)


def main() -> None:
    for line in sys.stdin:
        root, point, number = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(Path(root), point, number)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
