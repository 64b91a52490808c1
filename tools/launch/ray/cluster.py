"""Connection to a Ray cluster, or a temporary Ray cluster of this machine for one run."""

# Ray's types are partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import contextlib
import logging
import math
import os
import signal
import socket
import tempfile
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from common.config.ray import RaySection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.host.cgroups import num_cores
from common.host.loopback import IPV6, loopback
from common.host.machine import gpus
from common.store.run_dir import RunDir
from tools.checks.memory_plan import is_elsewhere
from tools.launch.base import RoleStarter, cluster_address
from tools.launch.local import start_here
from tools.launch.ray.placement import ClusterNode, num_cpus_wanted, place

logger = logging.getLogger(__name__)

ANSWER_S = 3.0
OBJECT_STORE_BYTES = 80 << 20  # Ray's minimum; a run stores no objects there.
AUTO = "auto"
# Variables that Ray reads during its import. The run's own cluster listens on the loopback address
# only (the first variable has this side effect), and does not kill processes for their memory.
OWN = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # Ray's default of 15 lets other programs starve the roles.
}


def own_node(num_cpus: float) -> ClusterNode:
    """Return the only node of a cluster that is started on this machine.

    Args:
        num_cpus: CPUs that the roles request. They limit nothing, so the node has at least these.
    """
    cpus = max(num_cores(), math.ceil(num_cpus))
    return ClusterNode(
        node_id="", host=loopback(), num_cpus=cpus, num_gpus=len(gpus()), is_home=True
    )


@contextlib.contextmanager
def start_on_ray(cfg: RunConfig, run_dir: RunDir) -> Generator[RoleStarter]:
    """Yield the starter of roles on the configured cluster, or on the run's own cluster.

    The resources of the learner are reserved before the first role starts.

    Raises: ConfigError: no cluster answers, a role fits on none of its nodes, or the learner finds
        no room in time.
    """
    if not cluster_address(cfg.ray):
        place(cfg, [own_node(num_cpus_wanted(cfg))])  # The check precedes any start.
    with open_cluster(cfg.ray, num_cpus=num_cpus_wanted(cfg)) as nodes:
        from tools.launch.ray.starter import RayStarter  # The import reads environment variables.

        placement = place(cfg, nodes)
        for line in placement.lines(nodes):
            logger.info("%s", line)
        with start_here(run_dir) as local:
            timeout_s = cfg.ray.place_timeout_s
            starter = RayStarter(
                run_dir, placement, home=nodes[0], local=local, place_timeout_s=timeout_s
            )
            try:
                starter.reserve_learner(free_nodes=lambda: live_nodes(is_free=True))
                yield starter
            finally:
                starter.close()


def placement_lines(cfg: RunConfig) -> list[str]:
    """Return the placement of each role as text, without starting a role.

    Raises: ConfigError: as `start_on_ray`.
    """
    if cluster_address(cfg.ray):
        with open_cluster(cfg.ray, num_cpus=0) as nodes:
            return place(cfg, nodes).lines(nodes)
    nodes = [own_node(num_cpus_wanted(cfg))]
    if is_elsewhere(cfg):  # The nodes of the machine that the configuration describes.
        named = replace(nodes[0], num_cpus=num_cpus_wanted(cfg), num_gpus=cfg.machine.num_gpus)
        nodes = [
            replace(named, host=f"node {i}", is_home=i == 0) for i in range(cfg.machine.num_nodes)
        ]
    return place(cfg, nodes).lines(nodes)


@contextlib.contextmanager
def open_cluster(section: RaySection, *, num_cpus: float) -> Generator[list[ClusterNode]]:
    """Yield the nodes of the configured cluster, or of a cluster that is started here.

    At the end this process leaves the cluster, and a cluster that was started here is stopped.

    Args:
        num_cpus: CPUs that the roles request, for a cluster that is started here.

    Raises: ConfigError: no cluster answers, or this process cannot be attached to it.
    """
    address = cluster_address(section)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not address and loopback() == IPV6:
        raise ConfigError(
            "launcher=ray: Ray listens on 127.0.0.1, and this machine has only ::1. Use"
            " launcher=local, or run `ip address add 127.0.0.1/8 dev lo`"
        )
    if ":" in address:
        _check_answers(address)
    with contextlib.ExitStack() as stack:
        arguments: dict[str, Any] = {}
        if not address:
            os.environ.update(OWN)
            folder = tempfile.TemporaryDirectory(prefix="ls-ray-", ignore_cleanup_errors=True)
            arguments = {
                "num_cpus": own_node(num_cpus).num_cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": stack.enter_context(folder),
            }
        import ray

        before = signal.getsignal(signal.SIGTERM)
        stack.callback(ray.shutdown)
        try:
            ray.init(address or "local", log_to_driver=False, configure_logging=False, **arguments)
        except (OSError, RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(f"ray.address={address}: {error}") from error
        finally:
            signal.signal(signal.SIGTERM, before)  # Ray installs its own handler.
        yield live_nodes()


def live_nodes(*, is_free: bool = False) -> list[ClusterNode]:
    """Return the nodes that are alive; this process's node is the first.

    Args:
        is_free: whether their resources are those that are free now.
    """
    import ray
    from ray._private.state import available_resources_per_node

    home = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node() if is_free else {}
    nodes: list[ClusterNode] = []
    for entry in filter(lambda entry: entry["Alive"], ray.nodes()):
        node_id = entry["NodeID"]
        resources = free.get(node_id, {}) if is_free else entry["Resources"]
        node = ClusterNode(
            node_id=node_id,
            host=entry["NodeManagerAddress"],
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=int(resources.get("GPU", 0)),
            labels=dict(entry["Labels"]),
            is_home=node_id == home,
        )
        nodes.insert(0 if node.is_home else len(nodes), node)
    return nodes


def _check_answers(address: str) -> None:
    """Check that a server listens at HOST:PORT. Ray's own attempts would take minutes."""
    if "://" in address:
        law = "expects HOST:PORT: run.py must run on a node of the cluster, not as a Ray client"
        raise ConfigError(f"ray.address={address}: {law}")
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"ray.address={address}: no cluster answers ({error}). Start one with `ray start"
            " --head`, or leave out the key to start a cluster on this machine"
        ) from error
