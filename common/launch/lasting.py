"""Errors that a restart does not mend, recognised by a role's exit code and its last log lines."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from common.launch.base import EXIT_FAILED, EXIT_NOT_STARTED
from common.launch.process import ERROR, describe_exit, find_error

# Errors of the code or of a library's version. They repeat with certainty.
CERTAIN = {
    *("TypeError", "AttributeError", "NameError", "NotImplementedError"),
    *("ImportError", "ModuleNotFoundError"),
}
# Errors that usually repeat. The second one with the same text is taken as lasting.
LIKELY = {
    *("RuntimeError", "ValueError", "KeyError", "IndexError", "AssertionError"),
    *("FileNotFoundError", "EngineError"),
}
REFUSED = re.compile(
    r"\b(unrecogni[sz]ed|unknown|unsupported) (key|option|argument)|unexpected keyword argument",
    re.IGNORECASE,
)
# Another process has the memory or the port, and may have released it before the restart.
TAKEN = re.compile(r"out ?of ?memory|address already in use", re.IGNORECASE)
# The cause lies outside of the process, and may have passed before the restart.
PASSING = re.compile(
    rf"{TAKEN.pattern}|no space left|too many open files|timed out|timeout"
    r"|connection (refused|reset|closed)|temporarily unavailable|cuda error|nccl",
    re.IGNORECASE,
)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_RAISED = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Missing|Lost|Timeout|Failed))(?::.*)?")
_FATAL = re.compile(r"what\(\)|terminate called|Fatal Python error")


@dataclass(frozen=True, slots=True)
class LastingError:
    """An error that a restart probably does not mend."""

    text: str  # One line.
    is_certain: bool  # False: only if it repeats.

    @property
    def key(self) -> str:
        """The text without numbers, which differ between two starts."""
        return re.sub(r"\d+", "#", self.text)


def lasting_error(lines: Sequence[str], code: int) -> LastingError | None:
    """Return the error of a role that ended, or None if a restart may mend it.

    Args:
        lines: last lines of its log.
        code: exit code; negative: minus the signal.
    """
    if code == EXIT_NOT_STARTED:
        return LastingError(find_error(lines).removeprefix(ERROR), is_certain=False)
    if -code in CRASHES:
        if any(PASSING.search(line) for line in lines):
            return None
        line = next((each for each in lines if _FATAL.search(each)), find_error(lines))
        text = f"{describe_exit(code)}: {line.strip()}"
        return LastingError(text, is_certain=any(REFUSED.search(each) for each in lines))
    if code != EXIT_FAILED:
        return None
    raised = [match for line in lines if (match := _RAISED.fullmatch(line))]
    if not raised or PASSING.search(raised[-1][0]):
        return None
    line, kind = raised[-1][0], raised[-1][1]
    if kind not in CERTAIN | LIKELY:
        return None
    return LastingError(line, is_certain=kind in CERTAIN or REFUSED.search(line) is not None)
