"""What may go wrong with a session, besides `EnvTimeout`; each has one HTTP status."""

from common.errors import EnvError


class UnknownEnv(KeyError):
    """No environment of that name is offered; the text names the nearest one."""

    def __str__(self) -> str:
        return self.args[0]


class SessionUnknown(LookupError):
    """No such session: never made, deleted, dropped after a failure, or its lease ran out."""


class SessionConflict(RuntimeError):
    """The step does not follow the last one, or the episode has already ended."""


class CapacityFull(RuntimeError):
    """The environment already has as many sessions as it may have."""


class HubDraining(RuntimeError):
    """The hub is about to stop and takes no new sessions."""


class EnvRaised(EnvError):
    """The environment or its worker failed; the session is gone."""


class WorkerLost(EnvRaised):
    """The worker process of the session died or was killed on account of another session."""
