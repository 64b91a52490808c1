"""Immediate exit of a process that has nothing to save and whose cleanup takes long."""

import logging
import multiprocessing.util
import os
import signal
from contextlib import suppress
from types import FrameType

import psutil

logger = logging.getLogger(__name__)


def leave(code: int) -> None:
    """End this process at once with an exit code.

    Semaphores are removed first, such as the semaphore of tqdm, which torch.compile imports.
    Otherwise the resource tracker of the parent process reports them as leaked.
    """
    multiprocessing.util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    logging.shutdown()
    os._exit(code)


def end_during_start(number: int, _: FrameType | None) -> None:
    """Kill this process and its children: a signal handler for a start, which has no state to save.

    A start may block the event loop, as vLLM does, which then cannot handle the signal.
    """
    logger.info("stopping during the start signal=%s", signal.Signals(number).name)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    logging.shutdown()
    os._exit(0)
