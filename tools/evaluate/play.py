"""Plays given episodes with one policy and without a scheduler, for `eval` and `evolve`."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from actor.agents.agents import Agents
from actor.delivery import deliverable
from actor.formats.tools import rendering
from actor.rollout.env_client import Environments, HubClient
from actor.rollout.episode import WHOLE, OpenSession, Render, StreamingAct, run_episode
from actor.seats.seats import Seats
from common.config.actor import AgentOptions
from common.errors import EnvPaused, LongstrideError
from common.text import counted
from common.wire.messages import EpisodeKind, Lease, PolicyKind, Trajectory
from learner.journal.journal import JournalWriter

logger = logging.getLogger(__name__)

PAUSE_S = 2.0  # Seconds between two tries of an episode whose environment is paused.
WARN_EVERY_S = 30.0  # Seconds between two warnings that an episode waits.
LOG_EVERY_FRAC = 0.1  # Share of the episodes between two log lines of progress.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEpisode:
    """One episode to play."""

    episode_id: str
    env: str
    item_id: str
    seed: int  # Seed of the environment.
    horizon: int  # Maximum number of turns.
    policy: PolicyKind = PolicyKind.MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlayer:
    """The policy that plays given episodes, with its limits and options."""

    policy: Callable[[PlannedEpisode], tuple[StreamingAct, Render]]
    max_concurrent: int
    max_tokens: int  # Context limit, in the renderer's unit.
    turn_tokens: int  # Maximum of these units in one turn.
    # Agent options, such as the handling of a full context.
    options: AgentOptions = WHOLE
    agents: Agents | None = None  # Programs that play instead of the built-in loop.
    seats: Seats | None = None  # Opponents. None: an episode plays all seats of a game.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayJob:
    """The episodes to play, their hub, and the journal for the results."""

    plans: Sequence[PlannedEpisode]
    hub_url: str
    token: str | None  # The hub's token.
    env_timeout_s: float  # Timeout of one request to the hub, in seconds.
    style: str  # Name of the style of observations.
    episode_timeout_s: float  # Deadline of an episode, in seconds.
    journal: Path
    max_attempts: int = 1  # Maximum number of attempts of one episode.
    # Maximum number of episodes with an infrastructure failure; None: unlimited.
    max_failed: int | None = None


async def play(job: PlayJob, player: EpisodePlayer) -> None:
    """Play all plans concurrently, and write each to the journal as it ends.

    An infrastructure failure is recorded only when it ends the last attempt of an episode.

    Raises:
        EngineError: the policy failed.
        EnvError: the hub cannot be reached.
        LongstrideError: more than `job.max_failed` episodes failed.
    """
    slots = asyncio.Semaphore(player.max_concurrent)
    count = _Count(num_plans=len(job.plans), max_failed=job.max_failed)

    async def play_one(plan: PlannedEpisode, environments: Environments) -> None:
        """Play one planned episode, and append it to the journal."""
        async with slots:
            played = await _play_with_retries(plan, environments, job, player)
        trajectory, _ = deliverable(played)
        journal.append(trajectory)
        count.add(trajectory)

    try:
        with closing(JournalWriter(job.journal)) as journal:
            async with (
                HubClient(job.hub_url, token=job.token, timeout_s=job.env_timeout_s) as hub,
                asyncio.TaskGroup() as group,
            ):
                environments = await Environments.of(hub, style=job.style)
                for plan in job.plans:
                    group.create_task(play_one(plan, environments), name=plan.episode_id)
    except BaseExceptionGroup as error:  # The first failure cancelled the remaining tasks.
        raise error.exceptions[0] from None


async def _play_with_retries(
    plan: PlannedEpisode, environments: Environments, job: PlayJob, player: EpisodePlayer
) -> Trajectory:
    """Play one episode again after each infrastructure failure, up to `max_attempts` times."""
    for attempt in range(job.max_attempts):
        lease = lease_of(plan, attempt=attempt, deadline_s=job.episode_timeout_s)
        trajectory = await _play_unpaused(lease, plan, environments, player)
        if not trajectory.end_reason.is_infrastructure_failure:
            break
        logger.warning(
            "episode failed episode=%s attempt=%d end=%s reason=%s",
            plan.episode_id,
            attempt,
            trajectory.end_reason,
            trajectory.error,
        )
    return trajectory


async def _play_unpaused(
    lease: Lease, plan: PlannedEpisode, environments: Environments, player: EpisodePlayer
) -> Trajectory:
    """Play an episode; wait while its environment is paused, because a service is down."""
    said_at = -math.inf
    while True:
        try:
            return await _play_once(lease, plan, environments, player)
        except EnvPaused as error:
            if time.monotonic() - said_at > WARN_EVERY_S:
                said_at = time.monotonic()
                logger.warning("episode waits episode=%s reason=%s", plan.episode_id, error)
            await asyncio.sleep(PAUSE_S)


async def _play_once(
    lease: Lease, plan: PlannedEpisode, environments: Environments, player: EpisodePlayer
) -> Trajectory:
    """Play one episode; return its trajectory, also if it failed."""

    def policy_of(lease: Lease) -> tuple[StreamingAct, Render]:
        act, render = player.policy(replace(plan, seed=lease.seed))
        return act, rendering(render, plan.env, environments.tools.get(plan.env, []))

    act, render = policy_of(lease)
    open_session: OpenSession = partial(environments.open, plan.env, plan.item_id, seed=plan.seed)
    task = environments.instruction(plan.env), environments.acknowledgement(plan.env)
    if player.seats is not None:
        open_session = player.seats.opener(
            lease,
            open_session,
            make_policy=policy_of,
            task=task,
            texts=environments.opponent_texts(plan.env),
        )
    if player.agents is not None:
        return await player.agents.play(
            lease, open_session=open_session, act=act, task=task, may_repeat=False
        )
    return await run_episode(
        lease,
        open_session=open_session,
        act=act,
        render=render,
        instruction=task[0],
        acknowledgement=task[1],
        max_tokens=player.max_tokens,
        turn_tokens=player.turn_tokens,
        actor="play",
        options=player.options,
    )


def lease_of(plan: PlannedEpisode, *, attempt: int, deadline_s: float) -> Lease:
    """Return the lease of a planned episode, as a scheduler would have granted it."""
    return Lease(
        **asdict(plan),
        group_id=plan.item_id,
        member=0,
        attempt=attempt,
        kind=EpisodeKind.EVAL,
        horizon_stage=0,
        opened_at_version=0,
        deadline_s=deadline_s,
    )


@dataclass(slots=True, kw_only=True)
class _Count:
    """Counts finished and failed episodes, and logs the progress."""

    num_plans: int
    max_failed: int | None
    num_done: int = 0
    num_failed: int = 0
    began_at: float = field(default_factory=time.monotonic)

    def add(self, trajectory: Trajectory) -> None:
        """Count an episode, and log the progress at regular shares of the plans."""
        self.num_done += 1
        self.num_failed += trajectory.end_reason.is_infrastructure_failure
        if self.num_done % max(1, int(self.num_plans * LOG_EVERY_FRAC)) == 0:
            took_s = time.monotonic() - self.began_at
            logger.info(
                "played episodes=%d of=%d failed=%d left_s=%.0f",
                self.num_done,
                self.num_plans,
                self.num_failed,
                took_s * (self.num_plans - self.num_done) / self.num_done,
            )
        if self.max_failed is not None and self.num_failed > self.max_failed:
            raise LongstrideError(
                f"{counted(self.num_failed, 'episode')} had infrastructure failures. The last one"
                f" was {trajectory.end_reason}: {trajectory.error}"
            )
