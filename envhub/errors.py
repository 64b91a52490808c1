"""The errors of a session, besides `EnvTimeout`. Each has one HTTP status."""

from common.errors import EnvError


class UnknownEnv(KeyError):
    """No environment of that name exists here; the text suggests the nearest name."""

    def __str__(self) -> str:
        return self.args[0]


class SessionUnknown(LookupError):
    """The session does not exist: never created, deleted, dropped after a failure, or expired."""


class SessionConflict(RuntimeError):
    """The step does not follow the last one, or the episode has already ended."""


class BadState(ValueError):
    """A saved state is damaged, or belongs to another episode or environment."""


class StateUnsaved(RuntimeError):
    """The state of an episode cannot be saved; the episode itself continues."""


class CapacityFull(RuntimeError):
    """The environment has reached its limit of sessions."""


class HubDraining(RuntimeError):
    """The hub is shutting down and accepts no new sessions."""


class EnvRaised(EnvError):
    """The environment or its worker failed; the session has ended."""


class ServicePaused(EnvRaised):
    """A service that the environment needs does not answer; the session has no outcome."""


class WorkerLost(EnvRaised):
    """The worker process of the session died or was killed because of another session."""
