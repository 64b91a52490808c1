"""Plays given items with one policy and no scheduler: what `eval` and `evolve` are made of."""

import asyncio
import logging
import multiprocessing
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import AutoTokenizer

from actor.engine import Completion, Engine
from actor.env_client import HubClient, HubSession
from actor.episode import Act, Render, run_episode
from actor.render import Renderer
from common.config import RunConfig
from common.errors import EngineError
from common.journal import JournalWriter
from common.log import configure_logging
from common.messages import EpisodeKind, Lease, PolicyKind, Trajectory

logger = logging.getLogger(__name__)

TOLD_EVERY = 0.1  # share of the episodes after which progress is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One episode that is to be played."""

    episode_id: str
    env: str
    item_id: str
    seed: int  # of the environment
    horizon: int  # most turns

    def lease(self, cfg: RunConfig) -> Lease:
        """Return the plan as the lease that an episode wants."""
        return Lease(
            episode_id=self.episode_id,
            group_id=self.item_id,
            member=0,
            attempt=0,
            kind=EpisodeKind.EVAL,
            policy=PolicyKind.MODEL,
            env=self.env,
            item_id=self.item_id,
            seed=self.seed,
            horizon=self.horizon,
            horizon_stage=0,
            opened_at_version=0,
            deadline_s=cfg.actor.episode_timeout_s,
        )


async def play_all(
    cfg: RunConfig,
    plans: Iterable[Plan],
    *,
    hub: HubClient,
    act: Callable[[Plan], Act],
    render: Render,
    on_done: Callable[[Trajectory], None],
) -> None:
    """Play all plans, `actor.max_concurrent` at once, and hand over each as it ends.

    Failures of the environment are recorded on their episodes.

    Raises:
        EnvError: the hub cannot be reached.
        EngineError: the policy failed.
    """
    instructions = await hub.instructions()
    slots = asyncio.Semaphore(cfg.actor.max_concurrent)
    waiting = list(plans)
    num_done = 0

    async def one(plan: Plan) -> None:
        nonlocal num_done
        async with slots:
            trajectory = await run_episode(
                plan.lease(cfg),
                open_session=lambda: hub.open(
                    plan.env, plan.item_id, seed=plan.seed, style=cfg.envhub.style
                ),
                act=act(plan),
                render=render,
                instruction=instructions.get(plan.env, {}).get(cfg.envhub.style, ""),
                max_tokens=cfg.actor.max_model_len,
                turn_tokens=cfg.actor.max_turn_tokens,
                actor="play",
            )
        on_done(trajectory)
        num_done += 1
        if num_done % max(1, int(len(waiting) * TOLD_EVERY)) == 0:
            logger.info("played episodes=%d of=%d", num_done, len(waiting))

    async with asyncio.TaskGroup() as group:
        for plan in waiting:
            group.create_task(one(plan), name=plan.episode_id)


async def play_with_engine(
    cfg: RunConfig,
    plans: Iterable[Plan],
    *,
    hub_url: str,
    token: str | None,
    on_done: Callable[[Trajectory], None],
) -> None:
    """Play all plans with the checkpoint at `model.path` in an engine of this process.

    Raises:
        EngineError: the engine did not start or failed.
        EnvError: the hub cannot be reached.
    """
    renderer = Renderer(AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True))
    engine = await Engine.start(
        cfg.model, cfg.actor, end_of_turn_ids=renderer.end_of_turn_ids, seed=cfg.run.seed
    )
    engine.version = 0
    num_requests = 0

    def act(plan: Plan) -> Act:
        async def take(ids: list[int], _: HubSession) -> Completion:
            nonlocal num_requests
            num_requests += 1
            async with asyncio.timeout(cfg.actor.turn_timeout_s):
                return await engine.generate(
                    list(ids),
                    request_id=f"{plan.episode_id}:{num_requests}",
                    max_tokens=cfg.actor.max_turn_tokens,
                    salt="play",
                )

        return take  # type: ignore[return-value]

    try:
        async with HubClient(hub_url, token=token, timeout_s=cfg.actor.env_timeout_s) as hub:
            await play_all(cfg, plans, hub=hub, act=act, render=renderer, on_done=on_done)
    finally:
        engine.shut_down()


def play_into_journal(
    cfg: RunConfig, plans: list[Plan], *, hub_url: str, token: str | None, folder: Path
) -> None:
    """Play all plans in a process of its own and write the episodes to a journal at `folder`.

    An engine leaves traces in its process (its distributed groups, its memory); a process of its
    own takes them along when it ends.

    Raises:
        EngineError: the process failed; its log tells why.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=_play_process, args=(cfg, plans, hub_url, token, folder), name="play"
    )
    process.start()
    try:
        process.join()
    finally:
        if process.is_alive():
            process.terminate()
            with suppress(TimeoutError):
                process.join(10)
    if process.exitcode != 0:
        raise EngineError(f"playing {len(plans)} episodes ended with exit code {process.exitcode}")


def _play_process(
    cfg: RunConfig, plans: list[Plan], hub_url: str, token: str | None, folder: Path
) -> None:
    configure_logging("play", cfg.log.level)
    journal = JournalWriter(folder)

    def keep(trajectory: Trajectory) -> None:
        journal.append(replace(trajectory, kind=EpisodeKind.EVAL))

    try:
        asyncio.run(play_with_engine(cfg, plans, hub_url=hub_url, token=token, on_done=keep))
    finally:
        journal.close()
