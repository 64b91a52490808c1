"""Plays given items with one policy and no scheduler: what `eval` and `evolve` are made of."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actor.rollout.env_client import Environments
from actor.rollout.episode import Act, Render, run_episode
from common.errors import LongstrideError
from common.store.journal import JournalWriter
from common.wire.messages import EpisodeKind, Lease, Trajectory
from common.wire.planned import PlannedEpisode

logger = logging.getLogger(__name__)

TOLD_EVERY = 0.1  # share of the episodes after which progress is logged

Record = Callable[[Trajectory], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A policy and how it is played."""

    policy: Callable[[PlannedEpisode], tuple[Act, Render]]
    max_concurrent: int
    max_tokens: int  # context limit, in what the renderer counts
    turn_tokens: int  # most of them in one turn
    episode_timeout_s: float  # until an episode must have ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What is done about episodes that the infrastructure failed."""

    max_attempts: int = 1  # plays of one episode, the first included
    max_failed: int | None = None  # episodes; None: play on whatever fails


def lease_of(plan: PlannedEpisode, *, attempt: int, deadline_s: float) -> Lease:
    """Return the lease that an episode wants, as a scheduler would have granted it."""
    return Lease(
        episode_id=plan.episode_id,
        group_id=plan.item_id,
        member=0,
        attempt=attempt,
        kind=EpisodeKind.EVAL,
        policy=plan.policy,
        env=plan.env,
        item_id=plan.item_id,
        seed=plan.seed,
        horizon=plan.horizon,
        horizon_stage=0,
        opened_at_version=0,
        deadline_s=deadline_s,
    )


async def play_all(
    plans: Sequence[PlannedEpisode],
    *,
    environments: Environments,
    player: Player,
    record: Record,
    patience: Patience,
) -> None:
    """Play all plans, some at once, and record each as it ends.

    A failure of the infrastructure is recorded on its episode when its last attempt is over.

    Raises:
        EngineError: the policy failed.
        LongstrideError: more than `patience.max_failed` episodes failed.
    """
    slots = asyncio.Semaphore(player.max_concurrent)
    count = _Count(num_plans=len(plans), max_failed=patience.max_failed)

    async def one(plan: PlannedEpisode) -> None:
        act, render = player.policy(plan)
        async with slots:
            for attempt in range(patience.max_attempts):
                trajectory = await run_episode(
                    lease_of(plan, attempt=attempt, deadline_s=player.episode_timeout_s),
                    open_session=lambda: environments.open(plan.env, plan.item_id, seed=plan.seed),
                    act=act,
                    render=render,
                    instruction=environments.instruction(plan.env),
                    max_tokens=player.max_tokens,
                    turn_tokens=player.turn_tokens,
                    actor="play",
                )
                if not trajectory.end_reason.is_infrastructure_failure:
                    break
                logger.warning(
                    "failed episode=%s attempt=%d end=%s reason=%s",
                    plan.episode_id,
                    attempt,
                    trajectory.end_reason,
                    trajectory.error,
                )
        record(trajectory)
        count.add(trajectory)

    try:
        async with asyncio.TaskGroup() as group:
            for plan in plans:
                group.create_task(one(plan), name=plan.episode_id)
    except BaseExceptionGroup as error:  # the first one ended the others
        raise error.exceptions[0] from None


@dataclass(slots=True, kw_only=True)
class _Count:
    num_plans: int
    max_failed: int | None
    num_done: int = 0
    num_failed: int = 0

    def add(self, trajectory: Trajectory) -> None:
        self.num_done += 1
        self.num_failed += trajectory.end_reason.is_infrastructure_failure
        if self.num_done % max(1, int(self.num_plans * TOLD_EVERY)) == 0:
            logger.info(
                "played episodes=%d of=%d failed=%d", self.num_done, self.num_plans, self.num_failed
            )
        if self.max_failed is not None and self.num_failed > self.max_failed:
            raise LongstrideError(
                f"{self.num_failed} episodes failed by infrastructure, the last with "
                f"{trajectory.end_reason}: {trajectory.error}"
            )


@contextmanager
def journal_at(folder: Path) -> Iterator[Record]:
    """Yield what writes episodes to the journal at `folder`."""
    journal = JournalWriter(folder)

    def record(trajectory: Trajectory) -> None:
        journal.append(trajectory)

    try:
        yield record
    finally:
        journal.close()
