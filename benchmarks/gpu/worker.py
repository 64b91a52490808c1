"""A process that runs checks of the suite `gpu`: `-m benchmarks.gpu.worker SETTINGS`.

The settings are a JSON object. The process appends one JSON line for each event to a file: ready,
start, row, note, title, end and left_out.
"""

import gc
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.gpu.plan import GpuCheck, why_left_out
from benchmarks.learner.checks.bench import SIZES, DeviceBench
from benchmarks.suite import Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the process measures, and until when."""

    sizes: str  # Name of the sizes: gpu or small.
    checks: list[dict[str, Any]]  # The fields of each check, in order.
    ends_at: float | None  # Time of the monotonic clock; None: no budget.
    events: str  # File of the events.


def run_checks(
    checks: Sequence[GpuCheck],
    make_bench: Callable[[Suite], DeviceBench],
    *,
    ends_at: float,
    send: Callable[[str, dict[str, Any]], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run checks in order, and leave out those that cannot run or do not fit into the time left.

    Args:
        ends_at: end of the budget on the clock; infinite without one.
        send: receives the kind of an event and its values.
    """
    for check in checks:
        reason = why_left_out(check, left_s=ends_at - clock())
        if reason:
            send("left_out", {"check": check.name, "reason": reason})
            continue
        send("start", {"check": check.name})
        began = clock()
        suite = Suite(out=sys.stderr, listener=send)
        with suite.check(check.name):
            check.load()(make_bench(suite))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        send("end", {"check": check.name, "took_s": clock() - began})


def make_bench(suite: Suite, *, sizes: str) -> DeviceBench:
    """Return the device and the sizes of the checks."""
    if sizes == "small":
        device, peer = torch.device("cpu"), "cpu"
    else:
        device = torch.device("cuda", 0)
        peer = "cuda:1" if torch.cuda.device_count() > 1 else "cpu"
    return DeviceBench(suite=suite, sizes=SIZES[sizes], device=device, peer_device=peer)


def describe_device(sizes: str) -> str:
    """Return the device of the checks and the versions that it is used with."""
    if sizes == "small":
        return f"small sizes on the CPU, torch {torch.__version__}"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 1e9:.0f} GB,"
        f" torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


class EventFile:
    """Appends events to a file, one JSON line each, and writes them at once."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def send(self, kind: str, values: dict[str, Any]) -> None:
        """Write one event."""
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()


def main(argv: list[str]) -> None:
    """Run the checks of the settings, and write an event for each."""
    logging.basicConfig(level="INFO")
    settings = WorkerSettings(**json.loads(argv[0]))
    with Path(settings.events).open("a", encoding="utf-8") as file:
        events = EventFile(file)
        events.send("ready", {"device": describe_device(settings.sizes)})
        run_checks(
            [GpuCheck(**fields) for fields in settings.checks],
            lambda suite: make_bench(suite, sizes=settings.sizes),
            ends_at=math.inf if settings.ends_at is None else settings.ends_at,
            send=events.send,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
