"""The parts of a hub that an extension receives when it adds its routes."""

from dataclasses import dataclass

from fastapi import FastAPI

from envhub.catalogue.registry import Registry
from envhub.hosting.sessions import Sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentGymLimits:
    """Lifetime of an unused instance, and the time a request waits for a free session."""

    idle_s: float
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParts:
    """A hub's application and the objects behind its routes."""

    app: FastAPI
    sessions: Sessions
    registry: Registry
    limits: AgentGymLimits  # Limits of AgentGym's routes.
