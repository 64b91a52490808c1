"""Plays episodes whose agent is a program of the user's, run as a process of its own for each."""

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from contextlib import suppress

import psutil

from actor.agents.episode import AgentEpisode
from actor.agents.server import AgentServer
from actor.rollout.context import History, Room
from actor.rollout.episode import (
    Act,
    ContextFull,
    OpenSession,
    Play,
    PolicyFailed,
    judged,
    trajectory_of,
)
from actor.rollout.render import Renderer
from common.config.run_config import ActorSection
from common.wire.messages import Lease, Trajectory

logger = logging.getLogger(__name__)

LEFT_S = 1.0  # for what it printed last, once it is ended
LOOK_S = 0.2
EXIT_S = 5.0  # for an agent to end by itself once its episode is over
NUM_LINES = 20  # of what it printed last, told where it fails


class Agents:
    """The agents of one actor: `actor.agent`, once per episode.

    An agent finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY, its task at LONGSTRIDE_ENV.
    Its episode ends when the environment says so, at the horizon, or when it exits.
    """

    def __init__(self, cfg: ActorSection, *, actor: str, renderer: Renderer) -> None:
        """Make it; it listens from the first episode on."""
        self._cfg = cfg
        self._actor = actor
        self._renderer = renderer
        self.server = AgentServer()
        self._starting = asyncio.Lock()

    async def _start(self) -> None:
        async with self._starting:
            if not self.server.url:
                await self.server.start()
                logger.info("agents are served url=%s", self.server.url)

    async def close(self) -> None:
        """Stop listening."""
        await self.server.close()

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
        await self._start()
        started = time.monotonic()
        max_tokens, turn_tokens = self._cfg.max_model_len, self._cfg.max_turn_tokens
        room = Room(max_tokens=max_tokens, turn_tokens=turn_tokens)
        play = Play(keeps_last=False, history=History(self._renderer, room))
        session = None
        try:
            async with judged(play, lease, may_repeat=may_repeat):
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
                await self._run(episode, lease)
        finally:
            if session is not None:
                await session.close()
        return trajectory_of(lease, play, actor=self._actor, wall_s=time.monotonic() - started)

    async def _run(self, episode: AgentEpisode, lease: Lease) -> None:
        with self.server.serving(episode):
            process = await self._spawn(episode, lease)
            lines: deque[bytes] = deque(maxlen=NUM_LINES)
            reading = asyncio.create_task(_read(process, lines))
            ended = asyncio.create_task(episode.ended.wait())
            exits = asyncio.create_task(_exit_of(process))
            try:
                await asyncio.wait(
                    [ended, exits, episode.failed], return_when=asyncio.FIRST_COMPLETED
                )
                if episode.failed.done():
                    episode.failed.result()
                if ended.done() and not exits.done():
                    await asyncio.wait([exits], timeout=EXIT_S)
            finally:
                _kill(process)
                await asyncio.wait([reading, exits], timeout=LEFT_S)
                for each in (reading, exits, ended):
                    each.cancel()
                await asyncio.gather(reading, exits, ended, return_exceptions=True)
                process._transport.close()  # type: ignore[attr-defined] # whoever holds its output
                if not episode.failed.done():
                    episode.failed.cancel()
        if episode.refused:
            logger.warning(
                "agent was refused episode=%s requests=%s", lease.episode_id, dict(episode.refused)
            )
        if episode.is_full and not episode.ended.is_set():  # whatever its agent makes of that
            if episode.has_sampled:
                episode.leave()
            raise ContextFull("the agent's last request has no room")
        if process.returncode and not episode.ended.is_set():
            said = b"\n".join(lines).decode(errors="replace")[-600:]
            raise PolicyFailed(f"actor.agent exits with {process.returncode}: {said}")
        episode.leave()

    async def _spawn(self, episode: AgentEpisode, lease: Lease) -> Process:
        url = self.server.url
        told = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": episode.key,
            "LONGSTRIDE_ENV": f"{url}/env",
            "LONGSTRIDE_EPISODE": lease.episode_id,
            **_no_proxy(),
        }
        try:
            return await asyncio.create_subprocess_exec(
                *self._cfg.agent,
                env={**os.environ, **told},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PolicyFailed(f"actor.agent={self._cfg.agent}: {error}") from error


def _no_proxy() -> dict[str, str]:
    """Return what keeps a proxy of the environment, and thereby of the agent, out of the way."""
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    names = ",".join(filter(None, [known, "127.0.0.1"]))
    return {"NO_PROXY": names, "no_proxy": names}


async def _exit_of(process: Process) -> None:
    """Return when it has ended; its own `wait` waits for whoever else holds its output, too."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait([waiting], timeout=LOOK_S)
    finally:
        waiting.cancel()


async def _read(process: Process, lines: deque[bytes]) -> None:
    """Keep the last that an agent prints, so that it never waits for anybody to read it."""
    stream = process.stdout
    while stream is not None and (chunk := await stream.read(1 << 16)):
        lines.extend(chunk[-4096:].splitlines())


def _kill(process: Process) -> None:
    """End an agent with all that it started, also what left its process group."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in family:
        with suppress(psutil.Error):
            child.kill()
