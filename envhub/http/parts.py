"""The parts of a hub that an extension gets when it adds its routes."""

from dataclasses import dataclass

from fastapi import FastAPI

from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions
from envhub.http.known_heads import KnownHeads


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long an instance without requests is kept, and how long an early request waits."""

    lease_s: float
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParts:
    """A hub's application and the objects behind its routes."""

    app: FastAPI
    sessions: Sessions
    registry: Registry
    known: KnownHeads  # Routes that are answered before the application sees them.
    patience: Patience  # Of AgentGym's routes.
