"""Plays given items with one policy and no scheduler: what `eval` and `evolve` are made of."""

import asyncio
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from actor.rollout.env_client import HubClient
from actor.rollout.episode import Act, Render, run_episode
from common.config.run_config import RunConfig
from common.errors import EngineError, LongstrideError
from common.launch.guardian import Guardian
from common.log import configure_logging
from common.store.journal import JournalWriter
from common.wire.messages import EpisodeKind, Lease, Trajectory
from common.wire.planned import PlannedEpisode

logger = logging.getLogger(__name__)

TOLD_EVERY = 0.1  # share of the episodes after which progress is logged
END_S = 10.0  # until a process that was told to end must have

Record = Callable[[Trajectory], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A policy and how it is played."""

    policy: Callable[[PlannedEpisode], tuple[Act, Render]]
    max_concurrent: int
    max_tokens: int  # context limit, in what the renderer counts
    turn_tokens: int  # most of them in one turn


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
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    *,
    hub: HubClient,
    player: Player,
    record: Record,
    patience: Patience,
) -> None:
    """Play all plans, some at once, and record each as it ends.

    A failure of the infrastructure is recorded on its episode when its last attempt is over.

    Raises:
        EnvError: the hub cannot be reached at the start.
        EngineError: the policy failed.
        LongstrideError: more than `patience.max_failed` episodes failed.
    """
    instructions = await hub.instructions()
    slots = asyncio.Semaphore(player.max_concurrent)
    count = _Count(num_plans=len(plans), max_failed=patience.max_failed)

    async def one(plan: PlannedEpisode) -> None:
        act, render = player.policy(plan)
        async with slots:
            for attempt in range(patience.max_attempts):
                trajectory = await run_episode(
                    lease_of(plan, attempt=attempt, deadline_s=cfg.actor.episode_timeout_s),
                    open_session=lambda: hub.open(
                        plan.env, plan.item_id, seed=plan.seed, style=cfg.envhub.style
                    ),
                    act=act,
                    render=render,
                    instruction=instructions.get(plan.env, {}).get(cfg.envhub.style, ""),
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
    except BaseExceptionGroup as failures:  # the first one ended the others
        raise failures.exceptions[0] from None


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


def play_into_journal(
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    *,
    hub_url: str,
    token: str | None,
    folder: Path,
    patience: Patience | None = None,
) -> None:
    """Play all plans with the checkpoint at `model.path` and write the episodes to a journal.

    This happens in a process of its own: an engine leaves traces in its process (its distributed
    groups, its memory), which that process takes along when it ends.

    Raises:
        EngineError: the process failed; its log tells why.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_play_process,
        args=(cfg, list(plans), hub_url, token, folder, patience or Patience()),
        name="play",
    )
    guardian = Guardian()
    process.start()
    try:
        guardian.add(process.ident or 0)
        process.join()
    finally:
        _end(process)
        guardian.remove(process.ident or 0)
        guardian.close()
    if process.exitcode != 0:
        raise EngineError(f"playing {len(plans)} episodes ended with exit code {process.exitcode}")


def _end(process: BaseProcess) -> None:
    """End the process and its engine, which are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not process.is_alive():
            return
        with suppress(ProcessLookupError):
            os.killpg(process.ident or 0, number)
        process.join(END_S)


def _play_process(
    cfg: RunConfig,
    plans: list[PlannedEpisode],
    hub_url: str,
    token: str | None,
    folder: Path,
    patience: Patience,
) -> None:
    os.setsid()  # whoever ends the group ends the engine too
    from actor.play.engine_player import play_with_engine  # here only: it loads the engine

    configure_logging("play", cfg.log.level)
    with journal_at(folder) as record:
        asyncio.run(
            play_with_engine(
                cfg, plans, hub_url=hub_url, token=token, record=record, patience=patience
            )
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
