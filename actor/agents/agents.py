"""Plays episodes whose agent is a program of the user's.

A process plays one episode, or lives as long as the run and requests one episode after another.
"""

import asyncio
import logging
import os
import secrets
import signal
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from actor.agents.episode import AgentEpisode
from actor.agents.harnesses import command_of
from actor.agents.server import AgentServer
from actor.formats.renderer import Renderer
from actor.rollout.context import History, Room
from actor.rollout.episode import (
    EpisodeState,
    OpenSession,
    PolicyFailed,
    StreamingAct,
    record_end_reason,
    trajectory_of,
)
from common.config.actor import ActorSection, AgentLifetime
from common.host.guardian import Guardian
from common.host.loopback import direct_loopback
from common.wire.messages import EndReason, Lease, Trajectory

logger = logging.getLogger(__name__)

LEFT_S = 1.0  # Seconds to read the last output of a killed process.
POLL_S = 0.2
NUM_LINES = 20  # Last lines of output that an error contains.
MAX_OUTPUT_CHARS = 600  # Maximum number of characters of these lines.


class AgentProcess:
    """A running agent. Its starter must end it.

    If this process is killed, the guardian ends the agent.

    Example:
        variables = {"OPENAI_API_KEY": key}
        process = await AgentProcess.start(["python", "agent.py"], variables, guardian)
        try:
            await asyncio.wait([process.exits], timeout=9.0)
        finally:
            await process.end()
    """

    def __init__(self, process: Process, guardian: Guardian) -> None:
        """Read the output continuously, so that the process never blocks on a full pipe."""
        self._process = process
        self._guardian = guardian
        guardian.add(process.pid)
        self._lines: deque[bytes] = deque(maxlen=NUM_LINES)
        self._reading = asyncio.create_task(self._read())
        self.exits = asyncio.create_task(self._exit())

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], guardian: Guardian
    ) -> "AgentProcess":
        """Start a command with these variables added to our environment. Raises: PolicyFailed."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, **direct_loopback(os.environ), **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PolicyFailed(f"actor.agent={list(command)}: {error}") from error
        return cls(process, guardian)

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.returncode

    @property
    def death(self) -> str:
        """Exit code and last output of the process."""
        output = b"\n".join(self._lines).decode(errors="replace")[-MAX_OUTPUT_CHARS:]
        return f"actor.agent: the process exited with code {self.code}: {output}"

    async def end(self) -> None:
        """Kill the process and its children, including those outside of its process group."""
        self.kill()
        self._guardian.remove(self._process.pid)
        tasks = [self._reading, self.exits]
        await asyncio.wait(tasks, timeout=LEFT_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._process._transport.close()  # type: ignore[attr-defined] # A child may hold the pipe.

    def kill(self) -> None:
        """Kill the process and its children without waiting; `end` waits."""
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = psutil.Process(self._process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for child in family:
            with suppress(psutil.Error):
                child.kill()

    async def _exit(self) -> None:
        """Return when the process has ended, even if a child still holds its output.

        `Process.wait` would wait for the end of the output.
        """
        waiting = asyncio.ensure_future(self._process.wait())
        try:
            while self._process.returncode is None:
                await asyncio.wait([waiting], timeout=POLL_S)
        finally:
            waiting.cancel()

    async def _read(self) -> None:
        """Keep the last lines of the output."""
        stream = self._process.stdout
        while stream is not None and (chunk := await stream.read(1 << 16)):
            self._lines.extend(chunk[-4096:].splitlines())


ASK_S = 20.0  # Seconds that a request for an episode is held open before the agent must ask again.
CHECK_S = 1.0  # Seconds between two checks for agents that take no episodes.
WARN_AFTER_S = 30.0  # Seconds without a request, while episodes wait, before a warning.
MAX_IDLE_EXITS = 3  # Consecutive exits without any episode taken before the waiting episodes fail.
MAX_PAUSE_S = 30.0  # Longest pause in seconds before a restart after such exits.


@dataclass(slots=True, eq=False)
class _AgentWorker:
    """One agent process and the episodes that it has taken."""

    process: AgentProcess
    episodes: list[AgentEpisode] = field(default_factory=list[AgentEpisode])
    num_asking: int = 0  # Pending requests for an episode.
    num_taken: int = 0
    heard_at: float = field(default_factory=time.monotonic)

    @property
    def quiet_s(self) -> float:
        """Seconds for which the process has had neither an episode nor a pending request."""
        is_busy = self.num_asking or any(not each.is_closed for each in self.episodes)
        self.heard_at = time.monotonic() if is_busy else self.heard_at
        return time.monotonic() - self.heard_at


class LongLived:
    """`actor.num_agents` processes of `actor.agent`, restarted whenever they exit.

    An exit fails only the episodes that the process had taken. A process that takes none while
    episodes wait causes a warning, and is restarted after `actor.episode_timeout_s`.

    Example: two episodes wait; the agent asks its LONGSTRIDE_EPISODES three times at once: it has
    both, and the third request waits for another one.
    """

    def __init__(self, cfg: ActorSection, server: AgentServer, guardian: Guardian) -> None:
        """Create the group without processes; `start` starts them."""
        self._cfg = cfg
        self._server = server
        self._guardian = guardian
        self._offers: deque[AgentEpisode] = deque()  # Episodes that no agent has taken.
        self._offered = asyncio.Condition()
        self._workers: list[_AgentWorker] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._num_idle_exits = 0

    def start(self) -> None:
        """Start the processes and keep them running. The server must already listen."""
        work = [self._keep() for _ in range(self._cfg.num_agents)]
        self._keepers = [asyncio.create_task(each) for each in [*work, self._watch()]]

    async def close(self) -> None:
        """Stop the processes."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def play(self, episode: AgentEpisode, *, step_aside: Callable[[], None]) -> None:
        """Return when an agent has taken and ended the episode; see `Agents.play`.

        Raises: the episode's failure.
        """
        step_aside()
        await self._offer(episode)
        ended = asyncio.create_task(episode.ended.wait())
        try:
            await asyncio.wait(
                [ended, episode.failed, *self._keepers], return_when=asyncio.FIRST_COMPLETED
            )
            for future in (episode.failed, *self._keepers):
                if future.done():
                    future.result()
        finally:
            ended.cancel()
            if episode in self._offers:
                self._offers.remove(episode)

    async def _offer(self, episode: AgentEpisode) -> None:
        """Add an episode to those that agents can request."""
        async with self._offered:
            self._offers.append(episode)
            self._offered.notify()

    async def _keep(self) -> None:
        """Run one process, and restart it whenever it exits."""
        while True:
            try:
                await self._run()
            except PolicyFailed as error:  # The process could not be started.
                self._exited(str(error), has_taken=False)
            await asyncio.sleep(min(MAX_PAUSE_S, 2.0**self._num_idle_exits - 1.0))

    async def _run(self) -> None:
        """Run one agent process until it exits."""
        url = self._server.url
        key = secrets.token_urlsafe(24)
        worker = _AgentWorker(
            await AgentProcess.start(
                self._cfg.agent, {"LONGSTRIDE_EPISODES": f"{url}/episodes/{key}"}, self._guardian
            )
        )
        self._workers.append(worker)
        try:
            with self._server.taking(key, lambda is_there: self._take(worker, is_there)):
                await asyncio.wait([worker.process.exits], timeout=None)
            for episode in worker.episodes:
                episode.fail(PolicyFailed(worker.process.death))
            self._exited(worker.process.death, has_taken=worker.num_taken > 0)
        finally:
            self._workers.remove(worker)
            await worker.process.end()

    def _exited(self, reason: str, *, has_taken: bool) -> None:
        """Count an exit. After `MAX_IDLE_EXITS` exits without an episode, waiting episodes fail."""
        logger.warning("restarting agent process reason=%s", reason)
        self._num_idle_exits = 0 if has_taken else self._num_idle_exits + 1
        others = any(worker.num_taken for worker in self._workers if worker.process.code is None)
        if self._num_idle_exits < MAX_IDLE_EXITS or others:
            return
        while self._offers:
            self._offers.popleft().fail(PolicyFailed(reason))

    async def _take(
        self, worker: _AgentWorker, is_there: Callable[[], bool]
    ) -> AgentEpisode | None:
        """Return the next episode; None if none arrives within `ASK_S`."""
        worker.num_asking += 1
        try:
            async with asyncio.timeout(ASK_S), self._offered:
                await self._offered.wait_for(lambda: self._offers)
                if not is_there():  # The client has closed the connection.
                    self._offered.notify()
                    return None
                episode = self._offers.popleft()
            worker.num_taken += 1
            worker.episodes = [each for each in worker.episodes if not each.is_closed]
            worker.episodes.append(episode)
            episode.is_taken = True
            return episode
        except TimeoutError:
            return None
        finally:
            worker.num_asking -= 1

    async def _watch(self) -> None:
        """Warn while episodes wait for agents that neither play nor ask.

        Such an agent is killed after `actor.episode_timeout_s`, and restarted.
        """
        is_reported = False
        limit_s = min(WARN_AFTER_S, self._cfg.episode_timeout_s / 2)
        while True:
            await asyncio.sleep(CHECK_S)
            num_waiting = len(self._offers)
            quiet = [worker for worker in self._workers if worker.quiet_s > limit_s]
            if not (num_waiting and quiet):
                is_reported = False
                continue
            if not is_reported:
                logger.warning(
                    "agent processes request no episodes from the URL in LONGSTRIDE_EPISODES"
                    " num_agents=%d num_waiting=%d",
                    len(quiet),
                    num_waiting,
                )
                is_reported = True
            for worker in quiet:
                if worker.quiet_s > self._cfg.episode_timeout_s:
                    logger.warning("restarting idle agent process idle_s=%.0f", worker.quiet_s)
                    worker.process.kill()


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
        self._command: list[str] = list(cfg.agent)

    async def _start(self) -> Guardian:
        """Start the server and the configured long-lived agents at the first call."""
        async with self._starting:
            if self._guardian is None:
                self._command = await asyncio.to_thread(command_of, self._cfg)
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
        act: StreamingAct,
        task: tuple[str, str],
        may_repeat: bool,
        step_aside: Callable[[], None] = lambda: None,
    ) -> Trajectory:
        """Play an episode to its end, as `run_episode` does.

        Args:
            task: see `AgentEpisode`.
            step_aside: called when the episode begins to wait for a long-lived agent, which may
                play other episodes before.
        """
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
                await self._run_agent(episode, guardian, step_aside=step_aside)
        finally:
            if session is not None:
                await session.close()
        if play.end is EndReason.DEADLINE and episode is not None and not episode.is_taken:
            play.error += "; no agent process requested the episode"
        return trajectory_of(lease, play, actor=self._actor, wall_s=time.monotonic() - started)

    async def _run_agent(
        self, episode: AgentEpisode, guardian: Guardian, *, step_aside: Callable[[], None]
    ) -> None:
        """Play an episode with a long-lived agent, or with a new process."""
        with self.server.serving(episode):
            death = ""
            try:
                if self._long_lived is not None:
                    await self._long_lived.play(episode, step_aside=step_aside)
                else:
                    death = await self._run_process(episode, guardian)
            finally:
                if not episode.failed.done():
                    episode.failed.cancel()
                episode.close()
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
        process = await AgentProcess.start(self._command, environ, guardian)
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
