"""The output of a command: its errors in one line, and a reader that has ended."""

import os
import select
import sys

from common.text import log_text
from tools.launch.base import EXIT_FAILED

EXIT_OUTPUT_CLOSED = 141  # The code of a program that SIGPIPE ends.


def print_error(text: str) -> None:
    """Print an error in one line."""
    print(f"error: {log_text(' '.join(text.split()))}", file=sys.stderr)


def has_lost_output() -> bool:
    """Return whether the reader of the output, such as `head`, has ended; drop further output."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poller.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def flush_output(exit_code: int) -> int:
    """Write what the output has buffered; return the exit code of the process."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return EXIT_OUTPUT_CLOSED if has_lost_output() else EXIT_FAILED
    return exit_code
