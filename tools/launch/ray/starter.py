"""Starts roles as Ray workers, each in its own place on a cluster."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.errors import ConfigError
from common.host.guardian import MARKS
from common.repository import CODE
from common.store.run_dir import RunDir
from common.wire.access.identities import RANKS
from common.wire.security import issue_join_key
from tools.launch.base import RoleSpec
from tools.launch.ray.host import (
    KEY_FILE,
    PYTHON,
    RUN_PY,
    RoleHost,
    WorkerAssignment,
    WorkerCommand,
)
from tools.launch.ray.placement import ClusterNode, ClusterPlacement, Needs, shortage
from tools.launch.ray.process import RayProcess
from tools.launch.roles import absolute_dir, other_checkout

logger = logging.getLogger(__name__)

NUM_CALLS = 8  # Concurrent calls of a worker.
OF_A_NODE = ("RAY_", "CUDA_", MARKS)  # Variables of a node that the launcher does not pass on.
PATIENT = ("actor", RANKS)  # Roles that wait for a node without a limit.
OF_THE_RUN = ("run.dir=", "run.name=")  # The run directory; other nodes lack it.
VISIBLE = "CUDA_VISIBLE_DEVICES"
LEARNER = "learner"
NODE_ID = "ray.io/node-id"  # A label that Ray gives to each node.
WAIT_S = 1  # Maximum seconds of one wait for a placement group; signals are handled after it.


class RayStarter:
    """Starts roles on nodes with free resources. A restarted role keeps its place."""

    def __init__(
        self,
        run_dir: RunDir,
        placement: ClusterPlacement,
        *,
        home: ClusterNode,
        is_own: bool,
        place_timeout_s: float,
    ) -> None:
        """Start nothing yet.

        Args:
            home: the node of this process and of the run directory.
            is_own: whether this process started the cluster.
            place_timeout_s: for the learner and the hub, since the run needs them.
        """
        self._run_dir = run_dir
        self._timeout_s = place_timeout_s
        self._is_own_cluster = is_own
        self._placement = placement
        self._home = home
        self.host = home.host
        self._mark = secrets.token_hex(8)
        self._groups: dict[str, PlacementGroup] = {}
        self._processes: dict[str, RayProcess] = {}

    def reserve_learner(self, *, free_nodes: Callable[[], list[ClusterNode]]) -> None:
        """Reserve the resources of the learner on all of its nodes, before other roles take them.

        Args:
            free_nodes: returns the nodes with their free resources, for the error.

        Raises: ConfigError: no room in time. The error has the number of missing nodes.
        """
        placement = self._placement
        deadline = time.monotonic() + self._timeout_s
        sharing = [placement.of(f"actor-{i}") for i in range(len(placement.shared))]
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

    def start(self, spec: RoleSpec) -> RayProcess:
        """Start a role as soon as a node has room for it."""
        needs = self._placement.of(spec.name)
        worker = ray.remote(RoleHost).options(
            max_concurrency=NUM_CALLS, **self._placement_options(spec.name)
        )
        process = RayProcess(
            spec.name,
            worker.remote(f"{self._mark}-{spec.name}"),
            needs=needs.text,
            log_path=spec.log_path,
            make_order=lambda place: self._command_for(spec, place),
            place_timeout_s=None if spec.name.startswith(PATIENT) else self._timeout_s,
        )
        self._processes[spec.name] = process
        return process

    def memory_bytes(self) -> int:
        """Return the memory of the roles that are not descendants of this process."""
        if self._is_own_cluster:
            return 0
        return sum(process.memory_bytes for process in self._processes.values())

    def close(self) -> None:
        """Release all places."""
        for group in self._groups.values():
            remove_placement_group(group)

    def _placement_options(self, name: str) -> dict[str, Any]:
        """Return a worker's options: its resources and its placement group."""
        needs = self._placement.of(name)
        options: dict[str, Any] = {"num_cpus": needs.num_cpus, "num_gpus": needs.num_gpus}
        role, _, number = name.partition("-")
        if role in ("envhub", "scheduler"):
            # Outside of a group, Ray itself keeps roles without GPUs away from nodes with GPUs.
            return {**options, "label_selector": self._selector(needs)}
        key = name
        index = 0
        if role == RANKS:
            key = RANKS
            index = int(number) - 1
        elif self._is_sharing(name):
            key = LEARNER
            index = 1 + int(number)
        if key not in self._groups:
            self._groups[key] = self._make_group(key, [needs])
        strategy = PlacementGroupSchedulingStrategy(self._groups[key], index)
        return {**options, "scheduling_strategy": strategy}

    def _is_sharing(self, name: str) -> bool:
        """Return whether a role is an actor that shares GPUs with the learner."""
        role, _, number = name.partition("-")
        return role == "actor" and int(number) < len(self._placement.shared)

    def _make_group(
        self, key: str, requests: Sequence[Needs], *, strategy: str = "STRICT_PACK"
    ) -> PlacementGroup:
        """Return a new placement group with a bundle for each request."""
        return placement_group(
            [_bundle(each) for each in requests],
            strategy=strategy,
            name=f"longstride-{self._run_dir.root.name}-{key}",
            bundle_label_selector=[self._selector(each) for each in requests],
        )

    def _selector(self, needs: Needs) -> dict[str, str]:
        """Return the label selector of a request."""
        home = self._home.node_id
        pinned = {NODE_ID: home} if needs.is_home else {}
        return needs.labels | ({NODE_ID: f"!{home}"} if needs.is_apart else pinned)

    def _command_for(self, spec: RoleSpec, place: WorkerAssignment) -> WorkerCommand | None:
        """Return the order for a place; None while required information is missing."""
        is_home = place.node_id == self._home.node_id
        visible = self._visible_gpus(spec.name, place)
        if visible is None:
            return None
        env = {} if visible else dict(spec.env)  # Threads are limited only without GPUs.
        env[VISIBLE] = visible
        other = other_checkout(self._run_dir, spec.name)
        python, run_py = other or (PYTHON, RUN_PY)
        replacements = {sys.executable: python, str(CODE / "run.py"): run_py}
        words = absolute_dir(spec.argv, self._run_dir) if other else spec.argv
        argv = tuple(replacements.get(each, each) for each in words)
        if is_home:
            inherited = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_NODE)}
            return WorkerCommand(
                name=spec.name, argv=argv, env={**inherited, **env}, log_path=str(spec.log_path)
            )
        if run_py not in argv:
            return WorkerCommand(name=spec.name, argv=argv, env=env)
        address = self._run_dir.find_address("scheduler")
        role, *overrides = argv[2:]
        key = self._join_key(spec.name, role) if address is not None else None
        if address is None or key is None:
            return None
        overrides = [each for each in overrides if not each.startswith(OF_THE_RUN)]
        join = ("--join", address.removeprefix("tcp://"), "--key", KEY_FILE)
        if role == "envhub":
            overrides.append(f"envhub.host={place.host}")  # The node decides where its hub listens.
        return WorkerCommand(
            name=spec.name, argv=(python, run_py, role, *join, *overrides), env=env, join_key=key
        )

    def _join_key(self, name: str, role: str) -> str | None:
        """Return the text of a key file for a role; None before the scheduler has written it."""
        if name.startswith(RANKS):
            path = self._run_dir.keys / f"{name}.key"
            return path.read_text(encoding="utf-8") if path.exists() else None
        run_name = self._run_dir.root.name
        return issue_join_key(self._run_dir.keys, run_name=run_name, role=role, name=name)

    def _visible_gpus(self, name: str, place: WorkerAssignment) -> str | None:
        """Return the GPUs that a role may see; None while the learner's shared ones are unknown."""
        if not self._is_sharing(name):
            return ",".join(place.gpu_ids)
        learner = self._processes[LEARNER].place
        if learner is None:
            return None
        return ",".join(learner.gpu_ids[i] for i in self._placement.shared[int(name[6:])])


def _bundle(needs: Needs) -> dict[str, float]:
    """Return the resources that a placement group reserves on a node."""
    gpus = {"GPU": float(needs.num_gpus)} if needs.num_gpus else {}
    return {"CPU": needs.num_cpus, **gpus}
