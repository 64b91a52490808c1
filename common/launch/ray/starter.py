"""Starts roles as Ray workers, each in its own place on a cluster."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import os
import secrets
import sys
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from common.launch.base import RoleSpec
from common.launch.guardian import MARKS
from common.launch.ray.host import (
    KEY_FILE,
    PYTHON,
    RUN_PY,
    RoleHost,
    WorkerAssignment,
    WorkerCommand,
)
from common.launch.ray.placement import ClusterNode, ClusterPlacement
from common.launch.ray.process import RayProcess
from common.launch.roles import absolute_dir, other_checkout
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.security import issue_join_key

logger = logging.getLogger(__name__)

NUM_CALLS = 8  # Concurrent calls of a worker.
OF_A_NODE = ("RAY_", "CUDA_", MARKS)  # Variables of a node that the launcher does not pass on.
OF_THE_RUN = ("run.dir=", "run.name=")  # The run directory; other nodes lack it.
VISIBLE = "CUDA_VISIBLE_DEVICES"


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
            place_timeout_s: for all roles except actors, since the run needs them.
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
            place_timeout_s=None if spec.name.startswith("actor") else self._timeout_s,
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
        pinned = {"ray.io/node-id": self._home.node_id} if needs.is_home else {}
        labels = {**needs.labels, **pinned}
        if name.partition("-")[0] in ("envhub", "scheduler"):
            # Outside of a group, Ray itself keeps roles without GPUs away from nodes with GPUs.
            return {**options, "label_selector": labels}
        num_shared = len(self._placement.shared)
        is_sharing = name.startswith("actor") and int(name.partition("-")[2]) < num_shared
        key = "learner" if is_sharing else name
        if key not in self._groups:
            bundles = [_bundle(needs.num_cpus, needs.num_gpus)]
            if key == "learner":
                bundles += [_bundle(self._placement.actor.num_cpus, 0)] * num_shared
            self._groups[key] = placement_group(
                bundles,
                strategy="STRICT_PACK",
                name=f"longstride-{self._run_dir.root.name}-{key}",
                bundle_label_selector=[labels] * len(bundles),
            )
        index = 1 + int(name.partition("-")[2]) if is_sharing else 0
        strategy = PlacementGroupSchedulingStrategy(self._groups[key], index)
        return {**options, "scheduling_strategy": strategy}

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
        own = {sys.executable: python, str(ROOT / "run.py"): run_py}
        words = absolute_dir(spec.argv, self._run_dir) if other else spec.argv
        argv = tuple(own.get(each, each) for each in words)
        if is_home:
            kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_NODE)}
            return WorkerCommand(
                name=spec.name, argv=argv, env={**kept, **env}, log_path=str(spec.log_path)
            )
        if run_py not in argv:
            return WorkerCommand(name=spec.name, argv=argv, env=env)
        address = self._run_dir.find_address("scheduler")
        if address is None:
            return None
        role, *overrides = argv[2:]
        overrides = [each for each in overrides if not each.startswith(OF_THE_RUN)]
        join = ("--join", address.removeprefix("tcp://"), "--key", KEY_FILE)
        if role == "envhub":
            overrides.append(f"envhub.host={place.host}")  # The node decides where its hub listens.
        return WorkerCommand(
            name=spec.name,
            argv=(python, run_py, role, *join, *overrides),
            env=env,
            join_key=issue_join_key(
                self._run_dir.keys, run_name=self._run_dir.root.name, role=role, name=spec.name
            ),
        )

    def _visible_gpus(self, name: str, place: WorkerAssignment) -> str | None:
        """Return the GPUs that a role may see; None while the learner's shared ones are unknown."""
        num_shared = len(self._placement.shared)
        if not name.startswith("actor") or int(name.partition("-")[2]) >= num_shared:
            return ",".join(place.gpu_ids)
        learner = self._processes["learner"].place
        if learner is None:
            return None
        return ",".join(learner.gpu_ids[i] for i in self._placement.shared[int(name[6:])])


def _bundle(num_cpus: float, num_gpus: int) -> dict[str, float]:
    """Return the resources that a placement group reserves on a node."""
    return {"CPU": num_cpus, **({"GPU": float(num_gpus)} if num_gpus else {})}
