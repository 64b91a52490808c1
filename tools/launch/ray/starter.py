"""Starts the roles of a run on the nodes that Ray chooses."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import re
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.errors import ConfigError
from common.host.child_process import KILLED_S, ChildProcess, read_tail
from common.store.run_dir import RunDir
from common.wire.access.identities import RANKS
from common.wire.security import issue_join_key
from tools.launch.base import EXIT_CONFIG_ERROR, RoleProcess, RoleSpec
from tools.launch.local import LocalStarter
from tools.launch.ray.placement import ClusterNode, ClusterPlacement, Needs, shortage
from tools.launch.ray.worker import JoinCommand, JoinWorker, RoleReport, WorkerPlace
from tools.launch.roles import other_checkout

logger = logging.getLogger(__name__)

NUM_CALLS = 8  # Concurrent calls of a worker.
PATIENT = ("actor", RANKS)  # Roles that wait for a node without a limit.
OF_THE_RUN = ("run.dir=", "run.name=")  # The run directory; other nodes lack it.
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEARNER = "learner"
NODE_ID = "ray.io/node-id"  # A label that Ray gives to each node.
WAIT_S = 1  # Maximum seconds of one wait for a placement group; signals are handled after it.
LOST = -signal.SIGKILL  # Exit code of a role whose node or worker has failed.
LOG_S = 30.0  # Seconds without a node after which the log names the role.


class RayProcess:
    """A role that Ray places. On the run's own node it is a child process, elsewhere it joins.

    Calls return at once, except for `clear_away` (seconds).

    Example:
        Ray finds a node, the worker reports its place, gets its command, and reports until the
        role ends. If the node dies before, the role ends with the exit code of a kill.
    """

    def __init__(
        self,
        spec: RoleSpec,
        worker: Any,
        *,
        needs: str,
        start: Callable[[WorkerPlace], ChildProcess | JoinCommand | None],
        place_timeout_s: float,
    ) -> None:
        """Take over a Ray actor (`JoinWorker`) that Ray may not have placed yet.

        Args:
            needs: text about the resources that it waits for.
            start: starts the role beside the run directory, or returns the command with which a
                place joins; None while information is missing.
            place_timeout_s: seconds after which an unplaced role exits with 2.
        """
        self.name = spec.name
        self.log_path = spec.log_path
        self.started_at: float | None = None
        self.place: WorkerPlace | None = None
        self.memory_bytes = 0  # On another node.
        self._worker = worker
        self._needs = needs
        self._start = start
        self._deadline = time.monotonic() + place_timeout_s
        self._log_at = time.monotonic() + LOG_S
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.touch()
        self._log_offset = self.log_path.stat().st_size
        self._placed = worker.place.remote()
        self._child: ChildProcess | None = None  # On this node.
        self._reports: Any = None  # From another node.
        self._code: int | None = None

    @property
    def waits_for(self) -> str:
        """The resource that the start waits for; "" after the start."""
        if self.started_at is not None or self._code is not None:
            return ""
        return self._needs if self.place is None else "scheduler: its address"

    def poll(self) -> int | None:
        """Return the exit code (negative: minus the signal); None while it runs."""
        try:
            if self._code is None and self._child is None:
                self._advance()
        except RayError as error:
            self._end_lost(error)
        return self._child.poll() if self._child is not None else self._code

    def terminate(self) -> None:
        """Send SIGTERM to the role itself, not to its child processes."""
        if self._child is not None:
            self._child.terminate()
        elif self._reports is not None:
            self._worker.terminate.remote()
        elif self._code is None:
            self._code = -signal.SIGTERM

    def request_stacks(self) -> None:
        """Make a role on another node write its stacks to its log."""
        if self._reports is not None and self._code is None:
            self._worker.request_stacks.remote()

    def clear_away(self) -> None:
        """Kill the remaining processes of the role, and release its place."""
        if self._child is not None:
            self._child.clear_away()
        elif self._reports is not None and self._code is None:
            self._worker.kill.remote()
            deadline = time.monotonic() + 2 * KILLED_S
            while self.poll() is None and time.monotonic() < deadline:
                ray.wait([self._reports], timeout=KILLED_S)
            if self._code is None:
                logger.error("cannot kill processes role=%s: no answer", self.name)
        ray.kill(self._worker)
        self._code = LOST if self._code is None else self._code

    def log_tail(self, *, max_lines: int) -> list[str]:
        """Return the last lines of its log since this start."""
        return read_tail(self.log_path, self._log_offset, max_lines=max_lines)

    def _advance(self) -> None:
        """Start the role once it has a place, then take over the reports that have arrived."""
        if self.place is None:
            if not ray.wait([self._placed], timeout=0)[0]:
                self._check_deadline()
                return
            place: Any = ray.get(self._placed)
            self.place = place
            logger.info("placed role=%s node=%s", self.name, place.host)
        assert self.place is not None
        if self._reports is None:
            command = self._start(self.place)
            if isinstance(command, ChildProcess):
                self._child = command
                self.started_at = command.started_at
            elif command is not None:
                self._reports = self._worker.run.remote(command)
        while self._reports is not None and self._code is None and self._reports.next_ready():
            report: Any = ray.get(next(self._reports))
            self._apply(report)

    def _apply(self, report: RoleReport) -> None:
        """Take over the state and the log text of a role on another node."""
        if self.started_at is None:
            self.started_at = time.time()
            logger.info("started role=%s pid=%d", self.name, report.pid)
        self.memory_bytes = report.memory_bytes
        self._code = report.exit_code
        self._write(report.text)

    def _write(self, text: bytes) -> None:
        """Append text to the role's log."""
        with self.log_path.open("ab") as log:
            log.write(text)

    def _end_lost(self, error: RayError) -> None:
        """End the role, because its worker process or its node is lost."""
        where = f" node={self.place.host}" if self.place else ""
        lines = str(error).splitlines()
        text = next((line for line in lines if "node" in line.lower()), (lines or [""])[0])
        logger.warning("lost role=%s%s: %s", self.name, where, text)
        self._write(f"launcher: lost{where}: {error}\n".encode())
        self._code = LOST
        if _is_deterministic(error):
            text = f"no Ray worker can run this role{where}: {str(error).strip().splitlines()[-1]}"
            self._write(f"error: {text}\n".encode())
            self._code = EXIT_CONFIG_ERROR

    def _check_deadline(self) -> None:
        """Log a role that Ray has not placed; end it if it must have a place by now."""
        if time.monotonic() > self._log_at:
            self._log_at = float("inf")
            logger.info("role=%s waits for %s", self.name, self._needs)
        if time.monotonic() > self._deadline:
            text = f"error: {self.name}: no node within ray.place_timeout_s for {self._needs}\n"
            self._write(text.encode())
            self._code = EXIT_CONFIG_ERROR


def _is_deterministic(error: RayError) -> bool:
    """Return whether the role cannot be started there, so that no restart helps."""
    if isinstance(error, ImportError | FileNotFoundError | PermissionError):
        return True
    is_creation = isinstance(error, ActorDiedError) and "creation task" in str(error)
    return (
        is_creation and re.search(r"\b(ImportError|ModuleNotFoundError)\b", str(error)) is not None
    )


class RayStarter:
    """Starts roles on nodes with free resources. A restarted role keeps its place.

    Scheduler, rank 0 and the actors on its GPUs are child processes of this process.
    """

    def __init__(
        self,
        run_dir: RunDir,
        placement: ClusterPlacement,
        *,
        home: ClusterNode,
        local: LocalStarter,
        place_timeout_s: float,
    ) -> None:
        """Start nothing yet.

        Args:
            home: the node of this process and of the run directory.
            local: starts the roles of this node.
            place_timeout_s: for the learner and the hub, since the run needs them.
        """
        self.host = home.host
        self._run_dir = run_dir
        self._timeout_s = place_timeout_s
        self._placement = placement
        self._home = home
        self._local = local
        self._mark = secrets.token_hex(8)
        self._groups: dict[str, PlacementGroup] = {}
        self._processes: dict[str, RayProcess] = {}
        self._holder: Any = None  # The worker that occupies the GPUs of rank 0's node.
        self._learner_gpus: tuple[str, ...] = ()

    def reserve_learner(self, *, free_nodes: Callable[[], list[ClusterNode]]) -> None:
        """Reserve the resources of the learner on all of its nodes, before other roles take them.

        Args:
            free_nodes: returns the nodes with their free resources, for the error.

        Raises: ConfigError: no room in time. The error has the number of missing nodes.
        """
        placement = self._placement
        deadline = time.monotonic() + self._timeout_s
        sharing = [Needs(num_cpus=placement.actor.num_cpus, is_home=True)] * len(placement.shared)
        self._groups[LEARNER] = self._make_group(LEARNER, [placement.learner, *sharing])
        wanted = {LEARNER: (placement.learner, 1)}
        if num := placement.num_rank_nodes:
            spread = self._make_group(RANKS, [placement.ranks] * num, strategy="STRICT_SPREAD")
            self._groups[RANKS] = spread
            wanted[RANKS] = (placement.ranks, num)
        for key, (needs, num) in wanted.items():
            if not self._groups[key].wait(timeout_seconds=WAIT_S):
                logger.info("waiting for room for the learner: %d x %s", num, needs.text)
            while not self._groups[key].wait(timeout_seconds=WAIT_S):
                if time.monotonic() > deadline:
                    lack = shortage(LEARNER, needs, free_nodes(), num=num) or needs.text
                    limit = f"ray.place_timeout_s={self._timeout_s:g}"
                    raise ConfigError(f"launcher=ray: no room within {limit}: {lack}")
        if placement.learner.num_gpus:
            self._holder = self._make_worker(LEARNER, placement.learner, group=LEARNER)
            place: Any = ray.get(self._holder.place.remote())
            self._learner_gpus = place.gpu_ids

    def start(self, spec: RoleSpec) -> RoleProcess:
        """Start a role, as soon as a node has room for it."""
        role, _, number = spec.name.partition("-")
        placement = self._placement
        if role == "scheduler":
            return self._start_here(spec, gpu_ids=())
        if role == LEARNER:
            return self._start_here(spec, gpu_ids=self._learner_gpus)
        if role == "actor" and int(number) < len(placement.shared):
            shared = [self._learner_gpus[i] for i in placement.shared[int(number)]]
            return self._start_here(spec, gpu_ids=shared)
        if role == RANKS:
            needs = placement.ranks
            worker = self._make_worker(spec.name, needs, group=RANKS, index=int(number) - 1)
        elif role == "actor":
            needs = placement.actor
            if spec.name not in self._groups:
                self._groups[spec.name] = self._make_group(spec.name, [needs])
            worker = self._make_worker(spec.name, needs, group=spec.name)
        else:
            assert placement.envhub is not None
            needs = placement.envhub
            worker = self._make_worker(spec.name, needs)
        process = RayProcess(
            spec,
            worker,
            needs=needs.text,
            start=lambda place: self._start_at(spec, place),
            place_timeout_s=float("inf") if role in PATIENT else self._timeout_s,
        )
        self._processes[spec.name] = process
        return process

    def memory_bytes(self) -> int:
        """Return the memory of the roles that are not descendants of this process."""
        return sum(process.memory_bytes for process in self._processes.values())

    def close(self) -> None:
        """Release all places."""
        for group in self._groups.values():
            remove_placement_group(group)

    def _make_worker(self, name: str, needs: Needs, *, group: str = "", index: int = 0) -> Any:
        """Return a new `JoinWorker` that Ray will place, in a bundle of a placement group if given.

        Outside of a group, Ray itself keeps roles without GPUs away from nodes with GPUs.
        """
        options = {"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus}
        place: dict[str, Any] = {"label_selector": self._selector(needs)}
        if group:
            strategy = PlacementGroupSchedulingStrategy(self._groups[group], index)
            place = {"scheduling_strategy": strategy}
        worker = ray.remote(JoinWorker).options(max_concurrency=NUM_CALLS, **options, **place)
        return worker.remote(f"{self._mark}-{name}")

    def _make_group(
        self, key: str, requests: Sequence[Needs], *, strategy: str = "STRICT_PACK"
    ) -> PlacementGroup:
        """Return a new placement group with a bundle for each request."""
        gpus = [{"GPU": float(each.num_gpus)} if each.num_gpus else {} for each in requests]
        return placement_group(
            [{"CPU": each.num_cpus} | gpu for each, gpu in zip(requests, gpus, strict=True)],
            strategy=strategy,
            name=f"longstride-{self._run_dir.root.name}-{key}",
            bundle_label_selector=[self._selector(each) for each in requests],
        )

    def _selector(self, needs: Needs) -> dict[str, str]:
        """Return the label selector of a request."""
        home = self._home.node_id
        pinned = {NODE_ID: home} if needs.is_home else {}
        return needs.labels | ({NODE_ID: f"!{home}"} if needs.is_apart else pinned)

    def _start_here(self, spec: RoleSpec, *, gpu_ids: Sequence[str]) -> ChildProcess:
        """Start a role as a child process that sees these GPUs only."""
        return self._local.start(replace(spec, env=_environment(spec, gpu_ids)))

    def _start_at(self, spec: RoleSpec, place: WorkerPlace) -> ChildProcess | JoinCommand | None:
        """Start a role here, or return the command for another node; None: no address yet."""
        if place.node_id == self._home.node_id:
            return self._start_here(spec, gpu_ids=place.gpu_ids)
        role, *overrides = spec.argv[2:]
        address = self._run_dir.find_address("scheduler")
        key = self._join_key(spec.name, role) if address is not None else None
        if address is None or key is None:
            return None
        overrides = [each for each in overrides if not each.startswith(OF_THE_RUN)]
        if role == "envhub":
            overrides.append(f"envhub.host={place.host}")  # The node decides where its hub listens.
        return JoinCommand(
            name=spec.name,
            role=role,
            scheduler=address.removeprefix("tcp://"),
            join_key=key,
            overrides=tuple(overrides),
            env=_environment(spec, place.gpu_ids),
            program=other_checkout(self._run_dir, spec.name),
        )

    def _join_key(self, name: str, role: str) -> str | None:
        """Return the text of a key file for a role; None before the scheduler has written it."""
        if name.startswith(RANKS):
            path = self._run_dir.keys / f"{name}.key"
            return path.read_text(encoding="utf-8") if path.exists() else None
        run_name = self._run_dir.root.name
        return issue_join_key(self._run_dir.keys, run_name=run_name, role=role, name=name)


def _environment(spec: RoleSpec, gpu_ids: Sequence[str]) -> dict[str, str]:
    """Return the variables of a role. Threads are limited only without GPUs."""
    return ({} if gpu_ids else spec.env) | {VISIBLE: ",".join(gpu_ids)}
