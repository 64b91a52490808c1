"""Plays given episodes with the checkpoint at `model.path`, in a separate process."""

import asyncio
import contextlib
import gc
import multiprocessing
import os
import secrets
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from actor.agents.agents import agents_of
from actor.formats.renderer import Renderer
from actor.formats.tools import load_renderer
from actor.rollout.episode import EnvSession, OnTokens, Render, StreamingAct, Turn
from actor.seats.seats import Seats
from actor.seeds import SamplingSeeds
from common.config.actor import ActorSection
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import EngineError
from common.formats.chat_template import fix_prompts
from common.host.child_process import describe_exit
from common.host.guardian import Guardian, inheriting, kill_marked
from common.log import configure_logging
from common.text import counted
from tools.evaluate.play import EpisodePlayer, PlannedEpisode, PlayJob, lease_of, play

if TYPE_CHECKING:
    from actor.engine.engine import Engine

QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
END_S = 10.0  # Seconds for the process to end after a signal.


def make_job(
    cfg: RunConfig, plans: Sequence[PlannedEpisode], url: str, token: str, journal: Path
) -> PlayJob:
    """Return the job of playing `plans` once at the hub at `url`."""
    return PlayJob(
        plans=plans,
        hub_url=url,
        token=token,
        env_timeout_s=cfg.actor.env_timeout_s,
        style=cfg.envhub.style,
        episode_timeout_s=cfg.actor.episode_timeout_s,
        journal=journal,
    )


def play_in_own_process(job: PlayJob, cfg: RunConfig) -> None:
    """Play the job with the checkpoint at `model.path` in a separate process.

    An engine leaves state in its process (distributed groups, memory), which is freed only when the
    process ends.

    Raises: EngineError: the process failed; its log has the reason.
    """
    context = multiprocessing.get_context("spawn")
    args = (job, cfg.model, cfg.actor, cfg.run.seed, cfg.log.level)
    process = context.Process(target=_play_process, args=args, name="play")
    mark = secrets.token_hex(16)
    start_tracker()  # Started without the mark, because it outlives the process.
    with contextlib.closing(Guardian()) as guardian:
        # The process has no group of its own until it has loaded this module.
        guardian.add_mark(mark)
        with inheriting(mark):
            process.start()
        try:
            process.join()
        finally:
            _end(process)
            kill_marked(mark)
    if (code := process.exitcode or 0) != 0:
        raise EngineError(
            f"the process that played {counted(len(job.plans), 'episode')} failed:"
            f" {describe_exit(code)}"
        )


def start_tracker() -> None:
    """Start the process that removes the semaphores of killed processes, and make it quiet.

    The engine's processes are killed, so their semaphores are not "leaked".
    """
    name = "PYTHONWARNINGS"
    before = os.environ.get(name)
    os.environ[name] = ",".join(filter(None, [before, QUIET_TRACKER]))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _end(process: BaseProcess) -> None:
    """Stop the process group of the process and its engine."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.ident or 0, number)
        process.join(END_S)


def _play_process(
    job: PlayJob, model: ModelSection, actor: ActorSection, seed: int, log_level: str
) -> None:
    """Play the job; this is the main function of the separate process."""
    os.setsid()  # One signal to the group also stops the engine.
    configure_logging("play", log_level)
    fix_prompts(model)
    # An error within vLLM's import keeps the frames of this call stack. An engine in one of them
    # would last until the end of the interpreter, which its finalizer reports as an error.
    from actor.engine.engine import Engine  # It loads vLLM.

    asyncio.run(play_with_engine(Engine, job, model, actor, seed=seed))
    gc.collect()


async def play_with_engine(
    engine_type: "type[Engine]",
    job: PlayJob,
    model: ModelSection,
    actor: ActorSection,
    *,
    seed: int,
) -> None:
    """Play the job. Raises: EngineError: the engine did not start or failed; and as `play`."""
    renderer = load_renderer(model.path, actor.format)
    renderer.check_room(actor)
    engine = await engine_type.start(
        model, actor, end_of_turn_ids=renderer.end_of_turn_ids, seed=seed, is_repeatable=True
    )
    engine.version = 0
    agents = agents_of(actor, actor="play", renderer=renderer)
    seats = Seats(actor)
    player = replace(player_of(engine, renderer, actor), agents=agents, seats=seats)
    try:
        await play(job, player)
    finally:
        if agents is not None:
            await agents.close()
        await seats.close()
        engine.shut_down()


def player_of(engine: "Engine", renderer: Renderer, actor: ActorSection) -> EpisodePlayer:
    """Return a player that samples from an engine in the built-in loop."""
    numbers = count(1)

    def policy(plan: PlannedEpisode) -> tuple[StreamingAct, Render]:
        """Return the function that samples the turns of an episode, and the renderer."""
        seeds = SamplingSeeds(lease_of(plan, attempt=0, deadline_s=0.0))

        async def act(ids: list[int], _: EnvSession, /, on_tokens: OnTokens | None = None) -> Turn:
            return await engine.generate(
                list(ids),
                request_id=f"{plan.episode_id}:{next(numbers)}",
                max_tokens=actor.max_turn_tokens,
                salt=lambda: "play",
                seed=seeds.next(),
                on_tokens=on_tokens,
            )

        return act, renderer

    return EpisodePlayer(
        policy=policy,
        max_concurrent=actor.max_concurrent,
        max_tokens=actor.max_model_len,
        turn_tokens=actor.max_turn_tokens,
        options=actor,
    )
