"""Plays given items with the checkpoint at `model.path`, in a process of its own."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from actor.play.play import Patience, journal_at
from common.config.run_config import RunConfig
from common.errors import EngineError
from common.launch.guardian import Guardian
from common.launch.process import describe_exit
from common.log import configure_logging
from common.wire.planned import PlannedEpisode

END_S = 10.0  # until a process that was told to end must have


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
    if (code := process.exitcode or 0) != 0:
        raise EngineError(f"playing {len(plans)} episodes ended: {describe_exit(code)}")


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
