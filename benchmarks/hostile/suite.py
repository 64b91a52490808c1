"""The suite `hostile`: attacks on every listener of a run during normal operation.

Well-behaved peers measure the time of each answer during an attack.
"""

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from benchmarks.chaos.watch import read_json
from benchmarks.hostile.attack import Attack
from benchmarks.real_run import TRAINING_ALONE, child
from benchmarks.suite import Suite
from common.config.load import load_config
from common.errors import LongstrideError
from common.host.child_process import ChildProcess, describe_exit
from common.host.loopback import loopback
from common.http.blocking import own_connection
from common.store.run_dir import RunDir
from common.store.run_start import save_config
from common.weights.messages import WeightsJoin, WeightsLeave, WeightsOffer
from common.wire.addresses import SAME_MACHINE, host_of, with_host
from common.wire.codec import decode, encode
from common.wire.messages import (
    Ack,
    Directory,
    Heartbeat,
    Hello,
    Lease,
    LeaseGrant,
    LeaseRequest,
    Progress,
    Rejected,
    Trajectory,
    Welcome,
)
from common.wire.security import RunKeys, create_keys, own_keys
from common.wire.sockets import connect_dealer
from learner.journal.metrics import read_metrics
from tools.simulator.workload import synthetic_trajectory

NAME = "honest"
PAUSE_S = 0.05  # Time between an answer and the next request.
ANSWER_S = 60.0
MAX_LEASES = 16  # Number of unplayed leases at which requests stop.
NUM_TOKENS = 40
NUM_PROMPT = 20
ATTACK = "benchmarks.hostile.attack"
START_S = 180.0
STOP_S = 30.0
ATTACK_S = 600.0
WARM_UP_S = 5.0
COUNTED_S = 60.0  # Limit of the time until status and metrics contain all refusals.
MAX_ANSWER_S = 1.0
MAX_GROWTH_MIB = 64.0
MIB = 1 << 20
HUB = "hub"
# Role by listener.
LISTENERS = {"scheduler": "scheduler", "trajectories": "learner", "weights": "learner"}
ENEMY = "enemy"
HUB_REFUSED = "127.0.0.1"  # A hub counts refusals by address.
REFUSALS = ("400", "401", "413", "422", "431")  # Statuses that count as refusals.
KINDS = ("invalid", "forbidden", "dropped")
PARTS = ("trained", "filtered", "stale", "failed", "in_flight")
ENV = "babyai"
ITEM = "GoToLocal-train-7"
SETTINGS = (
    *TRAINING_ALONE,
    "run.name=run",
    "train.num_steps=1000000",
    "log.level=WARNING",
    "groups.size=2",
    "groups.min_size=2",
    "groups.per_step=4",
    "learner.warmup_steps=0",
    "learner.controller.skip_step=false",
    "learner.max_canary_delta=1000",
)
LEGEND = (
    "A scheduler, a learner and a hub as a run starts them, and an actor whose engine guesses.\n"
    "Each listener is attacked in turn by another process: half of the frames by the holder of an\n"
    "actor's key, half by strangers. Answers: what an honest actor or client waits for meanwhile."
)


class Honest(threading.Thread):
    """Sends requests to one listener repeatedly.

    Consumes: its answers.
    Waits for: an answer, `ANSWER_S` at most.
    Unblocked by: the answer; `stop` waits for it. An error ends the thread and is stored.
    """

    def __init__(self, name: str, ask: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._ask = ask
        self._ends = threading.Event()
        self.waits_s: list[float] = []
        # Monotonic time of the unanswered request; None: no request is active.
        self._asked_s: float | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Send requests until stopped."""
        try:
            while not self._ends.wait(PAUSE_S):
                self._asked_s = began_s = time.monotonic()
                self._ask()
                self._asked_s = None
                self.waits_s.append(time.monotonic() - began_s)
        except Exception as error:  # noqa: BLE001 - The main thread reports the error.
            self.error = error

    @property
    def pending_s(self) -> list[float]:
        """The seconds since the unanswered request, if there is one."""
        asked_s = self._asked_s
        return [] if asked_s is None else [time.monotonic() - asked_s]

    def stop(self) -> None:
        """Stop the thread."""
        self._ends.set()
        self.join(2 * ANSWER_S)


class RouterClient:
    """A connection to a ROUTER socket."""

    def __init__(self, context: Any, keys: RunKeys, address: str) -> None:
        self._socket = connect_dealer(context, keys, address=address, timeout_s=ANSWER_S)

    def send(self, message: Any) -> None:
        """Send without waiting for an answer."""
        self._socket.send_multipart(encode(message))

    def ask(self, message: Any, *wanted: type) -> Any:
        """Return the next answer of a wanted type. Raises: LongstrideError: refused, or none."""
        self.send(message)
        while True:
            try:
                answer = decode(self._socket.recv_multipart())
            except zmq.Again as error:
                raise LongstrideError(f"no answer within {ANSWER_S:g}s") from error
            if isinstance(answer, Rejected):
                raise LongstrideError(f"an honest peer is refused: {answer.reason}")
            if isinstance(answer, wanted):
                return answer


class Actor:
    """An actor with a simulated engine: leases, heartbeats, trajectories, offers of weights.

    Each method is for a separate thread.
    """

    def __init__(self, keys: RunKeys, scheduler: str) -> None:
        """Connect to a scheduler and send a hello."""
        self._context = zmq.Context()
        self._keys = keys
        self.addresses = {"scheduler": scheduler}  # Addresses by listener.
        self._lines = {"scheduler": RouterClient(self._context, keys, scheduler)}
        hello = Hello(role="actor", name=NAME, incarnation="life-0", version=0)
        self._lines["scheduler"].ask(hello, Welcome)
        self._leases: queue.Queue[Lease] = queue.Queue()
        self._last: Trajectory | None = None
        self._num_lives = 0

    def finds_learner(self) -> bool:
        """Request the learner's address; once there is one, connect to it and return True."""
        beat = Heartbeat(role="actor", name=NAME, version=0, running=[], directory=0)
        directory = self._lines["scheduler"].ask(beat, Directory)
        if directory.learner:
            for name, at in (("trajectories", directory.learner), ("weights", directory.weights)):
                here = with_host(at, loopback()) if host_of(at) == SAME_MACHINE else at
                self.addresses[name] = here
                self._lines[name] = RouterClient(self._context, self._keys, here)
        return bool(directory.learner)

    def ask_scheduler(self) -> None:
        """Request leases if there is room, and send a heartbeat."""
        if self._leases.qsize() < MAX_LEASES:
            ask = LeaseRequest(actor=NAME, num_free_slots=4, version=0)
            grant = self._lines["scheduler"].ask(ask, LeaseGrant)
            for lease in grant.leases:
                self._leases.put(lease)
        running = [lease.episode_id for lease in list(self._leases.queue)]
        beat = Heartbeat(role="actor", name=NAME, version=0, running=running, num_slots=4)
        self._lines["scheduler"].ask(beat, Progress)

    def ask_intake(self) -> None:
        """Deliver an episode; without a lease repeat the last one."""
        with contextlib.suppress(queue.Empty):
            self._last = played(self._leases.get_nowait())
        if self._last is not None:
            ack = self._lines["trajectories"].ask(self._last, Ack)
            if not ack.is_accepted:
                raise LongstrideError(f"an honest episode is refused: {ack.reason}")

    def ask_weights(self) -> None:
        """Join, receive an offer of the weights, and leave."""
        self._num_lives += 1
        line = self._lines["weights"]
        life = f"life-{self._num_lives}"
        join = WeightsJoin(actor=NAME, incarnation=life, devices=[""], version=-1)
        line.ask(join, WeightsOffer)
        line.send(WeightsLeave(actor=NAME, incarnation=life))

    def close(self) -> None:
        """Close all connections."""
        self._context.destroy(linger=0)


def played(lease: Lease) -> Trajectory:
    """Return an episode of one turn; every second member of a group succeeds."""
    mask = np.arange(NUM_TOKENS) >= NUM_PROMPT
    return synthetic_trajectory(
        np.arange(NUM_TOKENS),
        mask,
        version=max(0, lease.opened_at_version),
        actor=NAME,
        reward=float(lease.member % 2),
        is_success=lease.member % 2 == 1,
        logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
        turn_scores=np.full(1, lease.member % 2, dtype=np.float32),
        **lease.identity(),
    )


class HonestHubClient:
    """Opens a session, makes a step, closes it."""

    def __init__(self, url: str, token: str, *, env: str, item_id: str) -> None:
        self._http = own_connection(url, timeout_s=ANSWER_S)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._item = {"env": env, "item_id": item_id, "seed": 0}

    def play(self) -> None:
        """Play a turn. Raises: LongstrideError: refused."""
        session = self._ask("POST", "/v1/sessions", self._item)["session_id"]
        self._ask("POST", f"/v1/sessions/{session}/step", {"action": "go forward", "seq": 1})
        self._ask("DELETE", f"/v1/sessions/{session}", None)

    def _ask(self, method: str, path: str, content: object) -> Any:
        body = None if content is None else json.dumps(content)
        self._http.request(method, path, body, self._headers)
        with self._http.getresponse() as answer:
            text = answer.read()
            if answer.status >= 300:
                raise LongstrideError(f"an honest client is refused: {answer.status} {text!r:.200}")
        return json.loads(text) if text else {}

    def close(self) -> None:
        """Close the connection."""
        self._http.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackVolume:
    """The extent of the attacks."""

    num_frames: int = 100_000  # Frames for each ROUTER socket.
    num_connections: int = 10_000  # Connections without a key for each ROUTER socket.
    num_requests: int = 20_000  # Requests to the hub.


SMALL = AttackVolume(num_frames=2_000, num_connections=200, num_requests=500)


def run_suite(suite: Suite) -> None:
    """Attack each listener, in two or three minutes."""
    measure(suite, AttackVolume())


def measure(suite: Suite, size: AttackVolume) -> None:
    """Start the roles, attack one listener after the other, report the results."""
    suite.title(LEGEND)
    with suite.check("hostile") as folder:
        _measure(suite, size, folder)


def _measure(suite: Suite, size: AttackVolume, folder: Path) -> None:
    cfg = load_config("quickstart", (f"run.dir={folder}", *SETTINGS))
    run_dir = RunDir(root=folder / cfg.run.name)
    keys = create_keys(run_dir.keys)
    save_config(cfg, run_dir.config)
    with contextlib.ExitStack() as stack:
        where = (f"run.dir={folder}", f"run.name={cfg.run.name}")
        roles: dict[str, ChildProcess] = {}
        for role in ("envhub", "scheduler", "learner"):
            argv = ["run.py", role, *where]
            process = child(role, argv, log=folder / f"{role}.txt", stop_s=STOP_S)
            roles[role] = stack.enter_context(process)
        actor_keys = own_keys(run_dir.keys, role="actor", name=NAME)
        actor = Actor(actor_keys, run_dir.wait_for_address("scheduler", timeout_s=START_S))
        stack.callback(actor.close)
        roles["learner"].wait_until(actor.finds_learner, timeout_s=START_S)
        url = run_dir.wait_for_address("envhub", timeout_s=START_S)
        client = HonestHubClient(url, keys.hub_token, env=ENV, item_id=ITEM)
        stack.callback(client.close)
        asks = (actor.ask_scheduler, actor.ask_intake, actor.ask_weights, client.play)
        scene = AttackedRun(run_dir, roles, actor.addresses | {HUB: url}, keys.hub_token)
        for name, ask in zip((*LISTENERS, HUB), asks, strict=True):
            scene.honest[name] = Honest(name, ask)
            stack.callback(scene.honest[name].stop)
            scene.honest[name].start()
        time.sleep(WARM_UP_S)
        for name in scene.honest:
            add_attack(suite, scene, name, size)
        suite.at_least("steps that were trained meanwhile", scene.num_steps(), "", 1)
    ledger = read_json(run_dir.ledger)
    gap = abs(ledger["issued"] - sum(ledger[part] for part in PARTS))
    suite.at_most("episodes unaccounted for", gap, "", 0, f"{ledger['issued']} issued")


@dataclass(slots=True)
class AttackedRun:
    """A run without a supervisor, and its well-behaved peers."""

    run_dir: RunDir
    roles: dict[str, ChildProcess]
    addresses: dict[str, str]  # Addresses by listener.
    token: str
    honest: dict[str, Honest] = field(default_factory=dict[str, Honest])

    def check(self) -> None:
        """Raise LongstrideError if a role has ended, or a well-behaved peer was refused."""
        for role, process in self.roles.items():
            if (code := process.poll()) is not None:
                last = " / ".join(process.log_tail(max_lines=3))
                raise LongstrideError(f"{role} ended with {describe_exit(code)}: {last}")
        for peer in self.honest.values():
            if peer.error is not None:
                raise LongstrideError(f"{peer.name}: {peer.error!r}")

    def num_steps(self) -> float:
        """Return the number of steps so far."""
        return max((line["step"] or 0.0 for line in read_metrics(self.run_dir.metrics)), default=0)

    def counted(self, name: str, *, what: str) -> float:
        """Return the number of refusals of a peer in both status and metrics.

        Args:
            what: first part of the counter's name: "enemy", "strangers", an address.
        """
        refused = read_json(self.run_dir.status)["refused"]
        peers: dict[str, Any] = refused["scheduler"]["peers"].get(what, {})
        causes: dict[str, int] = refused["scheduler"]["connections"]["refused"]
        flat = refused["learner"] | refused["hubs"]
        flat |= {f"scheduler/{what}/{kind}": peers.get(kind, 0) for kind in KINDS}
        flat |= {f"scheduler/strangers/{cause}": num for cause, num in causes.items()}
        lines = read_metrics(self.run_dir.metrics)
        start = f"{name}/{what}/"
        last = lines[-1] if lines else {}
        return min(_sum(flat, start), _sum(last, f"refused/{start}"))


def _sum(counts: Mapping[str, float | None], start: str) -> float:
    """Return the sum of the refusals, without answers that could not be sent."""
    return sum(n or 0 for k, n in counts.items() if k.startswith(start) and "unsent" not in k)


def add_attack(suite: Suite, scene: AttackedRun, name: str, size: AttackVolume) -> None:
    """Attack one listener; write the answer times of its well-behaved peer, and the counters."""
    role = scene.roles[LISTENERS.get(name, "envhub")]
    honest = scene.honest[name]
    process = psutil.Process(role.pid)
    rss_before = process.memory_info().rss
    num_before = len(honest.waits_s)
    began_s = time.monotonic()
    done = attack(scene, name, size)
    took_s = time.monotonic() - began_s
    scene.check()
    waits = sorted([*honest.waits_s[num_before:], *honest.pending_s])
    worst = waits[-1] if waits else math.nan
    p99 = waits[int(0.99 * (len(waits) - 1))] if waits else math.nan
    if name == HUB:
        wanted = {HUB_REFUSED: sum(done["answers"].get(status, 0) for status in REFUSALS)}
        note = f"{done['num_with_key']} requests, answered {done['answers']}"
        suite.at_most("hub, attacks that are not refused", num_passed(done["answers"]), "", 0)
    else:
        wanted = {ENEMY: done["num_with_key"], "strangers": done["num_strangers"]}
        note = (
            f"{done['num_with_key']} frames with a key, {done['num_stranger_frames']} without on"
            f" {done['num_strangers']} connections"
        )
    note = f"p99 {p99:.2f} s of {len(waits)}; {note} in {took_s:.0f} s"
    suite.at_most(f"{name}, worst answer to an honest peer", worst, "s", MAX_ANSWER_S, note)
    counted = _settled(scene, name, wanted)
    text = ", ".join(f"{who} {counted[who]:.0f} of {num}" for who, num in wanted.items())
    missing = sum(max(0.0, num - counted[who]) for who, num in wanted.items())
    suite.at_most(f"{name}, refusals not counted in status and metrics", missing, "", 0, text)
    after = process.memory_info().rss
    note = f"{rss_before / MIB:.0f} -> {after / MIB:.0f} MiB"
    grown = (after - rss_before) / MIB
    suite.at_most(f"{name}, growth of {role.name}'s memory", grown, "MiB", MAX_GROWTH_MIB, note)


def num_passed(answers: Mapping[str, int]) -> int:
    """Return the number of answers without a status from 400 to 499, such as 200 and 500.

    The hub may also close a connection without an answer ("none").
    """
    return sum(num for s, num in answers.items() if s != "none" and not s.startswith("4"))


def _settled(scene: AttackedRun, name: str, wanted: dict[str, int]) -> dict[str, float]:
    """Return the counters once they are complete, or after `COUNTED_S`."""
    listener = name if name != HUB else "envhub"
    deadline = time.monotonic() + COUNTED_S
    while True:
        counted = {who: scene.counted(listener, what=who) for who in wanted}
        if all(counted[who] >= num for who, num in wanted.items()) or time.monotonic() > deadline:
            return counted
        time.sleep(0.5)


def attack(scene: AttackedRun, name: str, size: AttackVolume) -> dict[str, Any]:
    """Run an attack in a process; return its counters. Raises: LongstrideError: it failed."""
    result = scene.run_dir.root / f"attack-{name}.json"
    is_hub = name == HUB
    keys = None if is_hub else own_keys(scene.run_dir.keys, role="actor", name=ENEMY)
    order = Attack(
        address=scene.addresses[name],
        result=str(result),
        num_frames=size.num_requests if is_hub else size.num_frames,
        num_connections=0 if is_hub else size.num_connections,
        keys=keys,
        name=ENEMY,
        token=scene.token,
    )
    argv = ["-m", ATTACK, json.dumps(asdict(order))]
    log = scene.run_dir.root / f"attack-{name}.txt"
    with child("attack", argv, log=log, stop_s=STOP_S) as process:
        process.wait_until(result.exists, timeout_s=ATTACK_S)
    return read_json(result)
