"""Plays given episodes with the checkpoint at `model.path`, in a process of its own."""

import asyncio
import contextlib
import multiprocessing
import os
import secrets
import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from actor.play.play import Job
from actor.rollout.agent_runner import MakeAgents
from common.config.run_config import ActorSection, ModelSection, RunConfig
from common.errors import EngineError
from common.formats.chat_template import fix_date
from common.launch.guardian import Guardian, inheriting, kill_marked
from common.launch.process import describe_exit
from common.log import configure_logging
from common.wire.planned import PlannedEpisode

END_S = 10.0  # until a process that was told to end must have


def play_given(
    cfg: RunConfig,
    plans: Sequence[PlannedEpisode],
    url: str,
    token: str,
    folder: Path,
    *,
    make_agents: MakeAgents,
) -> None:
    """Play with the checkpoint at `model.path`, into the journal at `folder`."""
    play_in_own_process(make_job(cfg, plans, url, token, folder), cfg, make_agents=make_agents)


def make_job(
    cfg: RunConfig, plans: Sequence[PlannedEpisode], url: str, token: str, journal: Path
) -> Job:
    """Return the job of playing `plans` once at the hub at `url`."""
    return Job(
        plans=plans,
        hub_url=url,
        token=token,
        env_timeout_s=cfg.actor.env_timeout_s,
        style=cfg.envhub.style,
        episode_timeout_s=cfg.actor.episode_timeout_s,
        journal=journal,
    )


def play_in_own_process(job: Job, cfg: RunConfig, *, make_agents: MakeAgents | None) -> None:
    """Play the job with the checkpoint at `model.path`.

    This happens in a process of its own: an engine leaves traces in its process (its distributed
    groups, its memory), which that process takes along when it ends.

    Raises: EngineError: the process failed; its log tells why.
    """
    context = multiprocessing.get_context("spawn")
    given = (job, cfg.model, cfg.actor, cfg.run.seed, cfg.log.level, make_agents)
    process = context.Process(target=_play_process, args=given, name="play")
    mark = secrets.token_hex(16)
    resource_tracker.ensure_running()  # without the mark: it outlives the process
    with contextlib.closing(Guardian()) as guardian:
        guardian.add_mark(mark)  # it has no group of its own until it has loaded this module
        with inheriting(mark):
            process.start()
        try:
            process.join()
        finally:
            _end(process)
            kill_marked(mark)
    if (code := process.exitcode or 0) != 0:
        raise EngineError(f"playing {len(job.plans)} episodes ended: {describe_exit(code)}")


def _end(process: BaseProcess) -> None:
    """End the process and its engine, which are a group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not process.is_alive():
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.ident or 0, number)
        process.join(END_S)


def _play_process(
    job: Job,
    model: ModelSection,
    actor: ActorSection,
    seed: int,
    log_level: str,
    make_agents: MakeAgents | None,
) -> None:
    os.setsid()  # whoever ends the group ends the engine too
    from actor.play.engine_player import play_with_engine  # here only: it loads the engine

    configure_logging("play", log_level)
    fix_date(model.date)
    asyncio.run(play_with_engine(job, model, actor, seed=seed, make_agents=make_agents))
