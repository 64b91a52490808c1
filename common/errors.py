"""Errors that roles raise for what others may do wrong."""


class LongstrideError(Exception):
    """Root of every error that this product raises on purpose."""


class ConfigError(LongstrideError, ValueError):
    """A key, a value or a file that the user named is wrong (exit code 2)."""


class WireError(LongstrideError, ValueError):
    """A received message does not match its schema."""


class NotStarted(LongstrideError):
    """A role failed by itself before it began to work; its next start may fail alike."""


class PeerMissing(LongstrideError):
    """Another part of the run did not answer in time; a later start may find it."""


class MessageTooLarge(WireError):
    """A message exceeds a limit of the wire, so that its sender refuses to send it."""


class EnvError(LongstrideError):
    """An environment or its hub failed: infrastructure, never a statement about the policy."""


class HubLost(EnvError):
    """A hub that cannot be reached, or that does not know the session any more: it was restarted.

    It takes all of its episodes with it and says nothing of any: they can be played again.
    """


class EnvTimeout(EnvError, TimeoutError):
    """The environment did not answer within its deadline."""


class EngineError(LongstrideError):
    """The generation engine failed; ends the role."""


class WeightSyncError(LongstrideError):
    """A weight version could not be transferred intact within its deadline."""


class LedgerError(LongstrideError):
    """issued != trained + filtered + stale + failed + in flight; ends the run."""
