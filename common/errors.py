"""Errors that roles raise for what others may do wrong, as one small tree.

LongstrideError
├── ConfigError       a key, a value or a file that the user named is wrong (exit code 2)
├── WireError         a message that is not what its schema says
├── EnvError          an environment, or the hub that serves it, failed: an infrastructure failure
│   └── EnvTimeout    ... by missing its deadline
├── EngineError       the generation engine failed; ends the role
├── WeightSyncError   a weight transfer missed its deadline or arrived damaged
└── LedgerError       the books do not balance; ends the run
"""


class LongstrideError(Exception):
    """Root of every error that this product raises on purpose."""


class ConfigError(LongstrideError, ValueError):
    """The configuration names something that is not there or not allowed."""


class WireError(LongstrideError, ValueError):
    """A received message does not match its schema."""


class EnvError(LongstrideError):
    """The environment or its hub failed. Never a statement about the policy."""


class EnvTimeout(EnvError, TimeoutError):
    """The environment did not answer within its deadline."""


class EngineError(LongstrideError):
    """The generation engine failed."""


class WeightSyncError(LongstrideError):
    """A weight version could not be transferred intact within its deadline."""


class LedgerError(LongstrideError):
    """issued != trained + filtered + stale + failed + in flight."""
