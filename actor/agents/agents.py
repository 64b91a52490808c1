"""Plays episodes whose agent is a program of the user's."""

import asyncio
import logging
import time

from actor.agents.episode import AgentEpisode
from actor.agents.long_lived import LongLived
from actor.agents.process import AgentProcess
from actor.agents.server import AgentServer
from actor.formats.renderer import Renderer
from actor.rollout.context import History, Room
from actor.rollout.episode import Act, EpisodeState, OpenSession, record_end_reason, trajectory_of
from common.config.actor import ActorSection, AgentLifetime
from common.host.guardian import Guardian
from common.wire.messages import EndReason, Lease, Trajectory

logger = logging.getLogger(__name__)

EXIT_S = 5.0  # Seconds for an agent to exit by itself once its episode is over.


class Agents:
    """The agents of one actor: `actor.agent` runs once per episode, or as long as the actor.

    An agent gets the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, and its task at
    LONGSTRIDE_ENV. A long-lived agent receives these values for each episode. An episode ends when
    the environment ends it, at the horizon, or when its agent ends it or exits.
    """

    def __init__(self, cfg: ActorSection, *, actor: str, renderer: Renderer) -> None:
        """Create the runner; its server starts with the first episode."""
        self._cfg = cfg
        self._actor = actor
        self._renderer = renderer.without_tools()  # An agent sends its own tools.
        self.server = AgentServer(cfg.agents, num_ports=max(1, cfg.num_engines))
        self._long_lived: LongLived | None = None
        self._guardian: Guardian | None = None  # Kills the agents when this process is killed.
        self._starting = asyncio.Lock()

    async def _start(self) -> Guardian:
        """Start the server and the configured long-lived agents at the first call."""
        async with self._starting:
            if self._guardian is None:
                await self.server.start()
                self._guardian = Guardian()
                logger.info("started agent server url=%s", self.server.url)
                if self._cfg.agent_lifetime is AgentLifetime.RUN:
                    self._long_lived = LongLived(self._cfg, self.server, self._guardian)
                    self._long_lived.start()
            return self._guardian

    async def close(self) -> None:
        """Stop the long-lived agents and the server."""
        if self._long_lived is not None:
            await self._long_lived.close()
        await self.server.close()
        if self._guardian is not None:
            await asyncio.to_thread(self._guardian.close)

    async def play(
        self,
        lease: Lease,
        *,
        open_session: OpenSession,
        act: Act,
        task: tuple[str, str],
        may_repeat: bool,
    ) -> Trajectory:
        """Play an episode to its end, as `run_episode` does; `task` as in `AgentEpisode`."""
        guardian = await self._start()
        started = time.monotonic()
        max_tokens = self._cfg.max_model_len
        turn_tokens = self._cfg.max_turn_tokens
        room = Room(max_tokens=max_tokens, turn_tokens=turn_tokens)
        play = EpisodeState(keeps_last=False, history=History(self._renderer, room))
        session = episode = None
        try:
            async with record_end_reason(play, lease, may_repeat=may_repeat):
                session = await open_session()
                play.env_s = time.monotonic() - started
                episode = AgentEpisode(
                    lease,
                    session=session,
                    act=act,
                    play=play,
                    renderer=self._renderer,
                    room=(max_tokens, turn_tokens),
                    task=task,
                )
                await self._run_agent(episode, guardian)
        finally:
            if session is not None:
                await session.close()
        if play.end is EndReason.DEADLINE and episode is not None and not episode.is_taken:
            play.error += "; no agent process requested the episode"
        return trajectory_of(lease, play, actor=self._actor, wall_s=time.monotonic() - started)

    async def _run_agent(self, episode: AgentEpisode, guardian: Guardian) -> None:
        """Play an episode with a long-lived agent, or with a new process."""
        with self.server.serving(episode):
            death = ""
            try:
                if self._long_lived is not None:
                    await self._long_lived.play(episode)
                else:
                    death = await self._run_process(episode, guardian)
            finally:
                if not episode.failed.done():
                    episode.failed.cancel()
            episode.leave(death)

    async def _run_process(self, episode: AgentEpisode, guardian: Guardian) -> str:
        """Play the episode with a new process; return how the process failed, or ""."""
        where = self.server.describe(episode)
        variables = {
            "OPENAI_BASE_URL": where["base_url"],
            "OPENAI_API_KEY": where["api_key"],
            "ANTHROPIC_BASE_URL": where["anthropic_url"],
            "ANTHROPIC_API_KEY": where["api_key"],
            "LONGSTRIDE_ENV": where["env_url"],
            "LONGSTRIDE_EPISODE": where["episode"],
        }
        episode.is_taken = True
        environ = {name: str(value) for name, value in variables.items()}
        process = await AgentProcess.start(self._cfg.agent, environ, guardian)
        ended = asyncio.create_task(episode.ended.wait())
        try:
            await asyncio.wait(
                [ended, process.exits, episode.failed], return_when=asyncio.FIRST_COMPLETED
            )
            if episode.failed.done():
                episode.failed.result()
            if ended.done() and not process.exits.done():
                await asyncio.wait([process.exits], timeout=EXIT_S)
            code = process.code
        finally:
            ended.cancel()
            await process.end()
        return process.death if code else ""


def agents_of(cfg: ActorSection, *, actor: str, renderer: Renderer) -> Agents | None:
    """Return the agents of an actor for `actor.endpoint=true`; None: the built-in loop plays."""
    return Agents(cfg, actor=actor, renderer=renderer) if cfg.endpoint else None
