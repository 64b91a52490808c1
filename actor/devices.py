"""The GPUs of each engine of an actor process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from common.config.actor import ActorSection
from common.host.machine import gpus

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def visible_gpus(number: int, cfg: ActorSection) -> Iterator[None]:
    """Show the GPUs of one engine to the processes that are started in the context.

    A process with one engine shows all of its own GPUs.

    Example (4 GPUs, two engines of two workers): engine 0 gets the first two, engine 1 the rest.
    """
    shown = [gpu.uuid for gpu in gpus()] if cfg.engines_per_process > 1 else []
    before = os.environ.get(VISIBLE)
    if shown:
        os.environ[VISIBLE] = ",".join(gpus_of(number, shown, width=cfg.tensor_parallel_size))
    try:
        yield
    finally:
        if shown and before is None:
            del os.environ[VISIBLE]
        elif shown and before is not None:
            os.environ[VISIBLE] = before


def gpus_of(number: int, shown: list[str], *, width: int) -> list[str]:
    """Return the GPUs of one engine: the next `width` ones, from the beginning after the last.

    Example (2 GPUs, three engines of one worker): engine 2 shares the first GPU with engine 0.
    """
    first = number * width
    return list(dict.fromkeys(shown[i % len(shown)] for i in range(first, first + width)))
