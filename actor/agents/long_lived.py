"""Agents that live as long as the run. Each requests episodes, one at a time or several at once."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from actor.agents.episode import AgentEpisode
from actor.agents.process import AgentProcess
from actor.agents.server import AgentServer
from actor.rollout.episode import PolicyFailed
from common.config.actor import ActorSection
from common.host.guardian import Guardian

logger = logging.getLogger(__name__)

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

    async def play(self, episode: AgentEpisode) -> None:
        """Return when an agent has taken and ended the episode. Raises: the episode's failure."""
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
