"""Interfaces between the episode pool and other players: programs of the user's, opponents."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Protocol

from actor.rollout.episode import Act, OpenSession, Render
from actor.rollout.render import Renderer
from common.config.actor import ActorSection
from common.wire.messages import Lease, Trajectory


class AgentRunner(Protocol):
    """Plays an episode with a program that calls the policy, instead of the built-in loop."""

    async def play(
        self,
        lease: Lease,
        *,
        open_session: OpenSession,
        act: Act,
        task: tuple[str, str],
        may_repeat: bool,
    ) -> Trajectory:
        """Play an episode to its end, as `run_episode` does.

        Args:
            task: instruction of the environment and the agent's acknowledgement of it.
            may_repeat: raise `HubLost` instead of recording the loss of the hub.
        """
        ...

    async def close(self) -> None:
        """Stop the programs that outlive an episode."""
        ...


class SeatFiller(Protocol):
    """Plays the seats of an environment that a leased episode does not play."""

    def opener(
        self,
        lease: Lease,
        open_session: Callable[[], Any],
        *,
        own: Callable[[Lease], tuple[Act, Render]],
        task: tuple[str, str],
        texts: Mapping[str, str],
    ) -> OpenSession:
        """Return a function that opens a hub's session as the session of the lease's seat."""
        ...

    async def close(self) -> None:
        """Close the connections to opponents."""
        ...


SEATS = "actor.seats.seats"  # Module with the class `Seats`, a `SeatFiller`.


def load_seats(cfg: ActorSection) -> SeatFiller:
    """Return the players of other seats by `actor.seats`."""
    return import_module(SEATS).Seats(cfg)


class MakeAgents(Protocol):
    """Makes the runner of one actor."""

    def __call__(self, cfg: ActorSection, *, actor: str, renderer: Renderer) -> AgentRunner: ...


def make_runner(
    make_agents: MakeAgents | None, cfg: ActorSection, *, actor: str, renderer: Renderer
) -> AgentRunner | None:
    """Return the runner for `actor.endpoint=true`; None if the built-in loop plays.

    Raises: ValueError: this process has no runner of agents.
    """
    if not cfg.endpoint:
        return None
    if make_agents is None:
        raise ValueError("actor.endpoint=true: this process cannot run agents")
    return make_agents(cfg, actor=actor, renderer=renderer)
