"""Error classes of all roles."""

import re

from common.repository import with_program_name

# Another process has the memory or the port, and may have released it before the restart.
TAKEN = re.compile(r"out ?of ?memory|address already in use", re.IGNORECASE)
# The cause lies outside of the process, and may have passed before the restart.
PASSING = re.compile(
    rf"{TAKEN.pattern}|no space left|too many open files|timed out|timeout"
    r"|connection (refused|reset|closed)|temporarily unavailable|cuda error|nccl"
    r"|killed by SIG(KILL|TERM)",
    re.IGNORECASE,
)


class LongstrideError(Exception):
    """Base class of all errors that this product raises deliberately."""

    def __str__(self) -> str:
        return with_program_name(super().__str__())


class ConfigError(LongstrideError, ValueError):
    """A key, a value or a file of the user is wrong (exit code 2)."""


class WireError(LongstrideError, ValueError):
    """A received message does not match its schema."""


class NotStarted(LongstrideError):
    """A role failed by its own fault before it began to work; a restart may fail the same way."""


class PeerMissing(LongstrideError):
    """Another role of the run did not answer in time; a later start may reach it."""


class MessageTooLarge(WireError):
    """A message exceeds a limit of the wire; its sender does not send it."""


class EnvError(LongstrideError):
    """An environment or its hub failed. This is an infrastructure error, not a policy error."""


class EnvFailure(RuntimeError):
    """The machinery of the environment failed (a dead JVM, no browser, a server that is silent).

    The agent did not cause it, so it gives no reward. The session ends with this text. A function
    of the user that gives no valid reward fails in the same way.
    """


class HubLost(EnvError):
    """A hub is unreachable, or it has restarted and has lost the session.

    All episodes of that hub are lost without an outcome, so they can be played again.
    """


class EnvPaused(HubLost):
    """A hub has paused an environment, because a service that it needs does not answer.

    The hub and its other environments work. Episodes of this environment can be played later.
    """


class EnvTimeout(EnvError, TimeoutError):
    """The environment did not answer within its deadline."""


class HubFull(EnvTimeout):
    """A hub had no free session until the deadline. It works, so a later request may get one."""


class TrialFailed(LongstrideError):
    """An episode that a command needs failed (exit code 1)."""


class EpisodesFailed(LongstrideError):
    """Too large a share of the episodes failed. The error ends the run."""


class EngineError(LongstrideError):
    """The generation engine failed. The error ends the role."""


class WeightSyncError(LongstrideError):
    """A weight version could not be transferred intact within its deadline."""


class RankLost(LongstrideError):
    """A rank of the learner lost the connection to another rank. The error ends the learner."""


class LedgerError(LongstrideError):
    """issued != trained + filtered + stale + failed + in flight. The error ends the run."""
