"""The scheduler process: construction, main loop, shutdown."""

import json
import logging
import secrets
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.lock import hold_role
from common.host.loopback import loopback
from common.stall.beacon import beacon_of
from common.store.disk import POLL_S as ROOM_POLL_S
from common.store.disk import DiskFull, RoomWait, if_room
from common.store.run_dir import RunDir, cut_head, json_object, write_atomically, write_json
from common.user_code import changed_functions, digests_of
from common.wire.access.lease_mac import lease_key, marked
from common.wire.addresses import WILDCARDS, bracketed
from common.wire.messages import (
    ConfigChanged,
    ConfigRequest,
    FileRequest,
    Goodbye,
    Heartbeat,
    Hello,
    HubGoodbye,
    HubHello,
    HubNoted,
    JoinRequest,
    LeaseGrant,
    LeaseRequest,
    Progress,
    RanksPlace,
    RanksRequest,
    Rejected,
    StepDone,
)
from common.wire.security import RunKeys, load_keys, write_join_key, write_rank_keys
from common.wire.sockets import Received, Router
from scheduler import state
from scheduler.components import build_components
from scheduler.core import SchedulerCore
from scheduler.curriculum.user_functions import user_functions
from scheduler.evaluation import Phase, eval_lines
from scheduler.event_log import EventLog
from scheduler.live_config import LiveChanges
from scheduler.members.enrolment import Enrolments
from scheduler.members.hubs import StartMessages, StoppedEarly, greet_known
from scheduler.members.registry import AddressRegistry
from scheduler.status import others

logger = logging.getLogger(__name__)

POLL_S = 0.05
# Seconds between two batches of messages: thousands of peers send hundreds at a time.
GATHER_S = 0.02
SAVE_S = 2.0  # Seconds between two snapshots; the log holds all messages since the last one.
STATUS_S = 1.0
ASK_AGAIN_S = 2.0  # Seconds until an actor asks again while the disk is full.
LAST_WAIT_S = 60.0  # Seconds to wait, after the end of the run, for a killed learner to restart.
ASLEEP_S = 5.0  # A longer gap between two rounds of the loop means that this process was suspended.
OUTSIDE = (JoinRequest, FileRequest, HubHello, HubGoodbye, RanksPlace, RanksRequest, ConfigRequest)
# Size limit of the file of outcomes (about a million episodes); above the limit the older half is
# removed.
MAX_OUTCOMES_BYTES = 64 << 20
# Largest share of a core for snapshots, and for status files. In runs with thousands of actors both
# are written less often because of the limit.
MAX_FILES_FRAC = 0.005
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
    failures = state.save(lifecycle.failures, with_volatile=True)
    kinds = state.save(lifecycle.kinds, with_volatile=True)
    core.restore(core.snapshot())
    if launched_at is not None and saved.get("launched_at") == launched_at:
        state.restore(lifecycle.failures, failures)
        state.restore(lifecycle.kinds, kinds)
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


class DiskWait:
    """Writes to disk before answers are sent, and waits for free space if the disk is full.

    During the wait a heartbeat gets the answer that its sender received last, and a lease request
    gets an empty grant. Every other message is queued until it can be logged. So no answer depends
    on state that a kill of the process would lose.

    Example: write(log.flush, path) -> the messages queued during the wait, most often none.
    """

    def __init__(
        self, router: Router, stop: threading.Event, *, on_round: Callable[[], None]
    ) -> None:
        self._router = router
        self._stop = stop
        self._on_round = on_round
        self._progress: dict[bytes, Progress] = {}  # Last `Progress` sent, by receiver.

    def sent(self, receiver: bytes, answer: Any) -> None:
        """Remember the last `Progress` that a receiver was sent."""
        if isinstance(answer, Progress):
            self._progress[receiver] = answer

    def write(self, write: Callable[[], object], path: Path) -> list[Received]:
        """Call `write` until it succeeds; return the messages queued during the wait.

        Raises: DiskFull: the scheduler was stopped first.
        """
        wait = RoomWait(path)
        queued = list[Received]()
        while True:
            try:
                write()
            except OSError as error:
                wait.note_failure(error)
            else:
                wait.over()
                return queued
            if self._stop.is_set():
                raise DiskFull(f"stopped while the disk is full: {path} is not written")
            self._on_round()
            for received in self._router.receive_all(timeout_s=ROOM_POLL_S):
                answer = self._idle_answer(received)
                if answer is None:
                    queued.append(received)
                else:
                    self._router.send(received.sender, answer)

    def _idle_answer(self, received: Received) -> Any:
        """Return an answer that commits the scheduler to nothing; None if there is none."""
        match received.message:
            case Heartbeat():
                return self._progress.get(received.sender)
            case LeaseRequest():
                return LeaseGrant(leases=[], retry_after_s=ASK_AGAIN_S, reason="disk full")
        return None


@dataclass(slots=True)
class LoopParts:
    """All objects that the main loop uses."""

    core: SchedulerCore
    clock: LoopClock
    log: EventLog
    router: Router
    run_dir: RunDir
    registry: AddressRegistry
    enrolments: Enrolments
    disk: DiskWait
    live: LiveChanges
    hub_token: str  # Token of the run's own hubs.
    lease_key: bytes
    # ROUTER identity -> name, as soon as the sender has given its name.
    names: dict[bytes, str] = field(default_factory=dict)
    is_changed: bool = True  # True if the state has changed since the last snapshot.
    save_at: float = 0.0  # Time of the next snapshot.
    status_at: float = 0.0  # Time of the next status.json.
    ledger_of: tuple[int, Phase] | None = None  # Version and phase of the last ledger.json.
    # Time until which the scheduler keeps serving restarted roles after the end of the run.
    serves_until: float = 0.0
    launched_at: float | None = None  # Unix time of the launcher's start; None: unknown.
    # Digests of the files of the user's functions, by the key that names the function.
    functions: dict[str, str] = field(default_factory=dict[str, str])


def run(cfg: RunConfig, run_dir: RunDir) -> None:
    """Run the scheduler until SIGTERM, or until the run is over and all members have left.

    Raises:
        EnvError: no hub that serves the tasks connected in time.
        ConfigError: the hub does not have a task, or an address is in use.
        LedgerError: the ledger does not balance.
        EpisodesFailed: too many episodes failed.
    """
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        signal.signal(signal.SIGINT, lambda *_: stop.set())
    serve(cfg, run_dir, stop)


def serve(cfg: RunConfig, run_dir: RunDir, stop: threading.Event) -> None:
    """Build, loop until `stop` is set, shut down.

    A failed loop saves no snapshot, so that a restart can resume from the last good one.

    Raises: ConfigError: another process is the scheduler of this run.
    """
    # Seconds for the hubs to start and for the log to be replayed.
    start_s = 2 * cfg.actor.start_timeout_s
    role = "scheduler"
    with hold_role(run_dir.root, role), beacon_of(run_dir, role, start_s=start_s) as beacon:
        _serve(cfg, run_dir, stop, partial(beacon.note, "main", "serving"))


def _serve(
    cfg: RunConfig, run_dir: RunDir, stop: threading.Event, on_round: Callable[[], None]
) -> None:
    """Restore the state, and serve until the run is over; see `serve`."""
    keys = load_keys(run_dir.keys)
    log = EventLog(run_dir.root)
    router = listen(cfg, keys, preferred_port=(log.load() or {}).get("port", 0))
    try:
        disk = DiskWait(router, stop, on_round=on_round)
        parts = build(cfg, run_dir, keys, log, router, disk, stop)
    except StoppedEarly:
        router.close()
        return
    except BaseException:
        router.close()
        raise
    try:
        loop(parts, stop, on_round=on_round)
        save(parts)
        write_reports(parts)
    finally:
        for hub in filter(None, parts.registry.hub_senders):
            parts.router.send(hub, HubNoted(is_finished=parts.core.phase is Phase.DONE))
        parts.log.close()
        parts.router.close()
        logger.info("stopped version=%d phase=%s", parts.core.version, parts.core.phase)


def build(
    cfg: RunConfig,
    run_dir: RunDir,
    keys: RunKeys,
    log: EventLog,
    router: Router,
    disk: DiskWait,
    stop: threading.Event,
) -> LoopParts:
    """Publish the scheduler's address, wait for the hubs, resume the last state, start serving."""
    saved = log.load() or {}
    live = LiveChanges(cfg, run_dir, saved.get("change"))
    cfg = live.cfg
    key_path = write_join_key(run_dir.keys, keys, run_name=cfg.run.name)
    run_dir.publish_address("scheduler", own_address(cfg, router.port))
    logger.info(
        "other machines join with: run.py actor --join HOST:%d --key %s", router.port, key_path
    )
    for path in write_rank_keys(
        run_dir.keys, run_name=cfg.run.name, num_nodes=cfg.learner.num_nodes
    ):
        logger.info(
            "a node of the learner joins with: run.py learner --join HOST:%d --key %s",
            router.port,
            path,
        )
    registry, enrolments = (
        AddressRegistry(cfg.scheduler.dead_after_s),
        Enrolments(cfg, run_dir.keys),
    )
    start_messages = StartMessages(cfg=cfg, router=router, registry=registry, enrolments=enrolments)
    greet_known(registry, saved.get("hubs", []), token=keys.hub_token)
    token = cfg.envhub.token or keys.hub_token
    catalogue = start_messages.wait_for_catalogue(token=token, stop=stop)
    for line in cfg.curriculum.warnings(cfg.horizon):
        logger.warning(line.removeprefix("warning: "))
    functions = user_functions(cfg)
    for user in functions:
        logger.info("%s", user.note)
    digests = digests_of(functions)
    for line in changed_functions(saved.get("functions", {}), digests):
        logger.warning("%s. The run continues with the new function and the saved state.", line)
    clock = LoopClock(time.monotonic())
    components = build_components(cfg, catalogue)
    core = SchedulerCore(components, clock=clock, run_epoch=secrets.token_hex(8))
    launched_at = json_object(run_dir.launch).get("began_at")
    resume(core, clock, log, launched_at=launched_at)
    parts = LoopParts(
        core=core,
        clock=clock,
        log=log,
        router=router,
        run_dir=run_dir,
        registry=registry,
        enrolments=enrolments,
        disk=disk,
        live=live,
        hub_token=keys.hub_token,
        lease_key=lease_key(keys),
        serves_until=clock.now + LAST_WAIT_S,
        launched_at=launched_at,
        functions=digests,
    )
    came_meanwhile = disk.write(lambda: log.save(state_of(parts)), log.path)
    core.mark_saved()
    logger.info("listening port=%d phase=%s version=%d", router.port, core.phase, core.version)
    answer_all(parts, [*start_messages.early, *came_meanwhile])
    return parts


def loop(parts: LoopParts, stop: threading.Event, *, on_round: Callable[[], None]) -> None:
    """Serve until `stop` is set, or until the run is over and all members have left."""
    while not stop.is_set() and not has_ended(parts):
        on_round()
        received = parts.router.receive_all(timeout_s=POLL_S)
        set_clock(parts, time.monotonic())
        answer_all(parts, received)
        parts.registry.expire(parts.clock.now)
        is_boundary = parts.core.phase is not Phase.TRAIN
        if came := change_config(parts, is_boundary=is_boundary):
            answer_all(parts, came)
        if parts.core.tick():
            parts.log.append(parts.clock.now, "", [])
            parts.is_changed = True
        if parts.is_changed and (parts.clock.now >= parts.save_at or parts.log.is_long):
            save(parts)
        write_due(parts)
        if received:
            time.sleep(max(0.0, parts.clock.now + GATHER_S - time.monotonic()))


def set_clock(parts: LoopParts, now: float) -> None:
    """Set the loop's clock; after a suspension of this process, extend all deadlines."""
    slept_s, parts.clock.now = now - parts.clock.now, now
    if slept_s > ASLEEP_S:
        logger.warning(
            "extended all deadlines after a suspension of this process suspended_s=%.1f", slept_s
        )
        parts.core.wake()
        parts.registry.wake(now)
        parts.log.append(now, WAKE, [])


def has_ended(parts: LoopParts) -> bool:
    """True if the run is over and all members have left.

    A scheduler that starts after the end keeps serving for a while. If the learner was killed
    during its exit, it restarts too and must be notified that the run is over.
    """
    if parts.core.phase is not Phase.DONE:
        return False
    members = parts.core.members.by_name.values()
    has_left = bool(members) and all(member.is_dead for member in members)
    return has_left and parts.clock.now >= parts.serves_until


def answer_all(parts: LoopParts, received: list[Received]) -> None:
    """Handle and log a batch of messages, flush the log, then send the answers."""
    answers: list[tuple[bytes, Any]] = []
    came_meanwhile: list[Received] = []
    for envelope in received:
        if type(envelope.message) in OUTSIDE:
            answer = answer_outside(parts, envelope)
            if answer is not None:
                answers.append((envelope.sender, answer))
            continue
        name = name_of(parts, envelope)
        version = parts.core.version
        answer = parts.core.handle(name, envelope.message)
        parts.log.append(parts.clock.now, name, envelope.frames)
        parts.is_changed = True
        if isinstance(envelope.message, Goodbye) and envelope.message.role == "learner":
            parts.serves_until = 0.0
        if isinstance(answer, LeaseGrant):
            schema = parts.router.version_for(envelope.sender)
            answer = marked(answer, name, parts.lease_key, version=schema)
        elif isinstance(answer, Progress) and getattr(envelope.message, "role", "") == "learner":
            refused = parts.router.num_refused("scheduler") | parts.registry.refused()
            answer = replace(answer, refused=refused)
        if answer is not None:
            answers.append((envelope.sender, answer))
        if isinstance(envelope.message, StepDone) and parts.core.version > version:
            came_meanwhile += change_config(parts, is_boundary=True, learner=envelope.sender)
        for news in (parts.registry.hear(envelope.message), parts.live.hear(envelope.message)):
            if news is not None:
                answers.append((envelope.sender, news))
    came_meanwhile += parts.disk.write(parts.log.flush, parts.log.path)
    for receiver, answer in answers:
        parts.disk.sent(receiver, answer)
    for receiver in parts.router.send_all(answers):
        logger.debug(
            "could not send the answer to receiver=%s", parts.names.get(receiver, receiver.hex())
        )
    if came_meanwhile:
        set_clock(parts, time.monotonic())
        answer_all(parts, came_meanwhile)


def change_config(
    parts: LoopParts, *, is_boundary: bool, learner: bytes | None = None
) -> list[Received]:
    """Apply the due changes of live keys; return the messages of a wait for disk space.

    Args:
        learner: sender of the step's report, which receives the values at once.
    """
    core = parts.core
    live = parts.live
    came_meanwhile: list[Received] = []
    for request, sender in live.take_due(parts.clock.now, is_boundary=is_boundary):
        try:
            change = live.apply(request, step=core.version, is_over=core.run.is_trained)
        except ConfigError as error:
            parts.router.send(sender, Rejected(reason=str(error)))
            continue
        core.configure(live.cfg)
        parts.enrolments.configure(live.cfg)
        # The next log holds only messages that are handled with the new values.
        came_meanwhile += parts.disk.write(lambda: parts.log.save(state_of(parts)), parts.log.path)
        core.mark_saved()
        came_meanwhile += parts.disk.write(live.record, parts.run_dir.config_changes)
        parts.router.send(sender, ConfigChanged(number=change.number, step=change.step))
        if learner is not None:
            parts.router.send(learner, live.values())
    return came_meanwhile


def answer_outside(parts: LoopParts, received: Received) -> Any:
    """Return the answer to a message that neither the core nor the log needs."""
    is_finished = parts.core.phase is Phase.DONE
    members = parts.core.members
    registry = parts.registry
    message = received.message
    if isinstance(message, ConfigRequest):
        step = parts.core.version
        is_over = parts.core.run.is_trained
        now = parts.clock.now
        return parts.live.accept(message, received.sender, now=now, step=step, is_over=is_over)
    return (
        parts.enrolments.answer(
            message, lambda name: members.is_alive(name) or registry.has_hub(name)
        )
        or registry.hear_ranks(message, is_finished=is_finished)
        or registry.hear_hub(message, received.sender, parts.clock.now, is_finished=is_finished)
    )


def name_of(parts: LoopParts, received: Received) -> str:
    """Return the name that a sender gave itself, or its ROUTER identity before that."""
    match received.message:
        case Hello() | Heartbeat() | Goodbye():
            parts.names[received.sender] = received.message.name
        case LeaseRequest():
            parts.names[received.sender] = received.message.actor
    return parts.names.get(received.sender, received.sender.hex())


def state_of(parts: LoopParts) -> dict[str, Any]:
    """Return the state that a restarted scheduler resumes from."""
    return {
        "core": parts.core.snapshot(with_volatile=True),
        "time_s": parts.clock.now,
        "port": parts.router.port,
        "change": parts.live.saved(),
        "launched_at": parts.launched_at,
        "hubs": parts.registry.saved_hubs(parts.hub_token),
        "functions": parts.functions,
    }


def save(parts: LoopParts) -> None:
    """Save a snapshot and start a new log. On a full disk the old ones remain in use."""
    started_s = time.thread_time()
    snapshot = state_of(parts)
    is_saved = if_room(lambda: parts.log.save(snapshot), parts.log.path)
    parts.save_at = next_time(parts, SAVE_S, started_s)
    if is_saved:  # On failure the current log continues.
        parts.core.mark_saved()
        parts.is_changed = False


def write_due(parts: LoopParts) -> None:
    """Write all files if they are due or the phase is new; in a new version only the ledger."""
    written = parts.ledger_of
    phase = parts.core.phase
    if parts.clock.now >= parts.status_at or written is None or written[1] != phase:
        write_reports(parts)
    elif written != (parts.core.version, phase):
        write_ledger(parts)


def write_reports(parts: LoopParts) -> None:
    """Write status.json, the evaluations, the outcomes and the ledger."""
    started_s = time.thread_time()
    core = parts.core
    now = parts.clock.now
    connections = others(
        core.members, parts.router, parts.registry, run_epoch=core.run_epoch, now=now
    )
    status = core.status() | connections | {"live_config": parts.live.report()}
    path = parts.run_dir.status
    if_room(lambda: write_json(path, status, indent=None), path)
    if status["eval_stream"]["evals"]:
        curve, lines = parts.run_dir.root / "eval.jsonl", eval_lines(status["eval_stream"])
        if_room(lambda: write_atomically(curve, lines), curve)
    write_outcomes(parts)
    write_ledger(parts)
    parts.status_at = next_time(parts, STATUS_S, started_s)


def write_outcomes(parts: LoopParts) -> None:
    """Append the outcomes since the last call, one JSON line for each episode."""
    news = parts.core.lifecycle.news
    path = parts.run_dir.outcomes
    lines = "".join(json.dumps([*each, parts.core.version]) + "\n" for each in news)

    def append() -> None:
        with path.open("a", encoding="utf-8") as handle:
            handle.write(lines)

    if lines and if_room(append, path):
        news.clear()
    if path.exists() and path.stat().st_size > MAX_OUTCOMES_BYTES:
        with path.open("rb") as handle:
            handle.seek(MAX_OUTCOMES_BYTES // 2)
            handle.readline()
            half = handle.tell()
        if_room(lambda: cut_head(path, half), path)


def write_ledger(parts: LoopParts) -> None:
    """Write the ledger and, once for each version or phase, the selection audit."""
    files = {parts.run_dir.ledger: parts.core.lifecycle.ledger_report()}
    if parts.ledger_of != (parts.core.version, parts.core.phase):
        files[parts.run_dir.selection] = parts.core.lifecycle.audit.report()
    for path, report in files.items():
        if_room(partial(write_json, path, {"version": parts.core.version, **report}), path)
    parts.ledger_of = (parts.core.version, parts.core.phase)


def next_time(parts: LoopParts, every_s: float, started_s: float) -> float:
    """Return when to write a file again.

    Args:
        every_s: minimum seconds between two writes.
        started_s: CPU time of this thread at which the last write began.
    """
    return parts.clock.now + max(every_s, (time.thread_time() - started_s) / MAX_FILES_FRAC)
