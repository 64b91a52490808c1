"""Errors that a restart does not mend, recognised by a role's exit code and its last log lines."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# Errors of the code or of a library's version. They repeat with certainty.
from common.errors import PASSING, TAKEN
from common.host.child_process import ERROR, describe_exit, find_error
from common.text import kind_of
from tools.launch.base import EXIT_FAILED, EXIT_NOT_STARTED

CERTAIN = {
    "TypeError",
    "AttributeError",
    "NameError",
    "NotImplementedError",
    "ImportError",
    "ModuleNotFoundError",
}
# An error that ends the run by its meaning, whatever its cause was.
FINAL = "EpisodesFailed"
# Errors that usually repeat. The second one with the same text counts as permanent.
LIKELY = {
    "RuntimeError",
    "ValueError",
    "KeyError",
    "IndexError",
    "AssertionError",
    "FileNotFoundError",
    "EngineError",
}
REFUSED = re.compile(
    r"\b(unrecogni[sz]ed|unknown|unsupported) (key|option|argument)|unexpected keyword argument",
    re.IGNORECASE,
)
QUOTES = "; its last lines:"  # Begins the output of a child process that an error quotes.
MAX_LINES = 60  # Lines of a log that are read.
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_RAISED = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Missing|Lost|Timeout|Failed))(?::.*)?")
_CAUSE = re.compile(r"\b\w*(?:Error|Exception): .*")
_FATAL = re.compile(r"what\(\)|terminate called|Fatal Python error")


@dataclass(frozen=True, slots=True)
class PermanentError:
    """An error that a restart probably does not mend."""

    text: str  # One line.
    is_certain: bool  # False: only if it repeats.
    ends_run: bool = False  # The role ends the run by this error, also after it has worked.

    @property
    def key(self) -> str:
        """The text without numbers, which differ between two starts."""
        return kind_of(self.text)


def permanent_error(lines: Sequence[str], code: int) -> PermanentError | None:
    """Return the error of a role that ended, or None if a restart may mend it.

    Args:
        lines: last lines of its log.
        code: exit code; negative: minus the signal.
    """
    if code == EXIT_NOT_STARTED:
        return PermanentError(find_error(lines).removeprefix(ERROR), is_certain=False)
    if -code in CRASHES:
        if any(PASSING.search(line) for line in lines):
            return None
        line = next((each for each in lines if _FATAL.search(each)), find_error(lines))
        text = f"{describe_exit(code)}: {line.strip()}"
        return PermanentError(text, is_certain=any(REFUSED.search(each) for each in lines))
    if code != EXIT_FAILED:
        return None
    raised = [(i, match) for i, each in enumerate(lines) if (match := _RAISED.fullmatch(each))]
    if not raised:
        return None
    number, match = raised[-1]
    kind = match[1]
    line = match[0][match.start(1) :]  # Without the module of the error.
    if kind == FINAL:
        return PermanentError(line, is_certain=True, ends_run=True)
    quoted = [line for line in lines[number + 1 :] if line.startswith("  ")]
    text = line.partition(QUOTES)[0] + _cause(quoted)
    is_taken = any(TAKEN.search(line) for line in quoted)
    if is_taken or PASSING.search(text) or kind not in CERTAIN | LIKELY:
        return None
    return PermanentError(text, is_certain=kind in CERTAIN or REFUSED.search(text) is not None)


def _cause(quoted: Sequence[str]) -> str:
    """Return the last error in the output of a child process that an error quotes; "" if none."""
    causes = [match[0] for line in quoted if (match := _CAUSE.search(line))]
    return f"; the cause is {causes[-1]}" if causes else ""
