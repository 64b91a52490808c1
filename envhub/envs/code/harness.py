"""Runs the tests of a program inside a sandbox. It is sent as text and needs Python 3.8.

It reads {"program", "setup", "tests", "seconds", "mark"} from the file of its first argument and
removes the file. Each test runs in a process of its own after the program, and passes if it ends
without an error. The line "MARK INDEX" is written for a test that passed.

A process reports its success through a pipe, not through its exit code, so a program that ends
the process early does not pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import NoReturn


def run_test(source: str, seconds: float, mark: bytes) -> bool:
    """Return whether a test passes within the time."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        perform(source, reading, writing, mark)
    os.close(writing)
    deadline_s = time.monotonic() + seconds
    received = b""
    while len(received) < len(mark):
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([reading], [], [], left_s)[0]:
            break
        chunk = os.read(reading, 4096)
        if not chunk:
            break
        received += chunk
    os.close(reading)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return received == mark


def perform(source: str, reading: int, writing: int, mark: bytes) -> NoReturn:
    """Execute the program and its test in this forked process. It never returns."""
    try:
        os.setsid()
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for target in (0, 1, 2):
            os.dup2(nothing, target)
        sys.argv = ["program.py"]
        names = {"__name__": "__main__"}
        exec(compile(source, "program.py", "exec"), names)
        os.write(writing, mark)
    finally:
        os._exit(0)


def main() -> None:
    """Run all tests."""
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    os.remove(sys.argv[1])
    mark = given["mark"]
    for index, test in enumerate(given["tests"]):
        source = "\n".join([given["program"], given["setup"], test])
        if run_test(source, given["seconds"], mark.encode()):
            os.write(1, f"{mark} {index}\n".encode())


if __name__ == "__main__":
    main()
