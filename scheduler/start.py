"""Start of the scheduler process: its address, its clock, and the state of an earlier process."""

import logging
import time
from dataclasses import dataclass

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.loopback import loopback
from common.wire.addresses import WILDCARDS, bracketed
from common.wire.security import RunKeys
from common.wire.sockets import Router
from scheduler.core import SchedulerCore
from scheduler.event_log import EventLog
from scheduler.state import restore, save

logger = logging.getLogger(__name__)

WAKE = "wake"  # Sender name of the logged tick that follows a suspension.


@dataclass(slots=True)
class LoopClock:
    """The core's clock: the main loop sets it, and a replay sets it to the logged times."""

    now: float

    def __call__(self) -> float:
        return self.now


def own_address(cfg: RunConfig, port: int) -> str:
    """Return the address for roles on this machine and on this run directory."""
    host = cfg.scheduler.advertise or cfg.scheduler.host
    return f"tcp://{bracketed(loopback() if host in WILDCARDS else host)}:{port}"


def resume(
    core: SchedulerCore, clock: LoopClock, log: EventLog, *, launched_at: float | None = None
) -> None:
    """Restore the snapshot and replay the messages logged since.

    The replay uses the logged times of the earlier process. At the end every lease and every member
    gets a new deadline. A finished run whose configuration has more steps now returns to training.

    Args:
        launched_at: Unix time of the launcher's start. The recent failures still count if the
            earlier process had the same launcher.
    """
    saved = log.load()
    if saved is None:
        return
    try:
        clock.now = float(saved["time_s"])
        core.restore(saved["core"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise log.damaged(error) from error
    num_events = 0
    for time_s, sender_name, message in log.events():
        clock.now = time_s
        if message is None and sender_name == WAKE:
            core.wake()
        elif message is None:
            core.tick(is_replay=True)
        else:
            core.handle(sender_name, message)
        num_events += 1
    clock.now = time.monotonic()
    lifecycle = core.lifecycle
    failures = [save(each, with_volatile=True) for each in (lifecycle.failures, lifecycle.kinds)]
    core.restore(core.snapshot())
    if launched_at is not None and saved.get("launched_at") == launched_at:
        restore(lifecycle.failures, failures[0])
        restore(lifecycle.kinds, failures[1])
    core.continue_training()
    logger.info("resumed version=%d phase=%s events=%d", core.version, core.phase, num_events)


def listen(cfg: RunConfig, keys: RunKeys, *, preferred_port: int) -> Router:
    """Bind the configured port.

    For port 0 bind the previous port if it is free, because the roles already use it.
    """
    host = cfg.scheduler.host
    port = cfg.scheduler.port
    if port == 0 and preferred_port:
        try:
            return Router(keys, host=host, port=preferred_port)
        except ConfigError as error:
            logger.info("choosing another port reason=%s", error)
    return Router(keys, host=host, port=port)
