"""A Ray cluster of several nodes on this machine, for as long as a test needs it."""

import contextlib
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

ENVIRONMENT = {  # read while Ray is imported, and by what it starts
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the loopback address only
    "RAY_enable_worker_prestart": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # 15 is its own: roles would wait for whatever else runs here
}
QUICK = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}


class Nodes:
    """The cluster; the first node is the one that tests are attached to."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._cluster.address

    def add(self, **what: Any) -> Any:
        """Return a new node."""
        return self._cluster.add_node(**what)

    def kill(self, node: Any) -> None:
        """End a node without a word."""
        self._cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def running_cluster(folder: Path, **head: Any) -> Generator[Nodes]:
    """Yield a cluster with one node; stop it."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    from ray.cluster_utils import Cluster

    # Ray writes the address there, and makes it only for clusters without a folder of their own.
    Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray").mkdir(exist_ok=True)
    config = {"include_dashboard": False, "_system_config": QUICK, "temp_dir": str(folder)}
    cluster = Cluster(initialize_head=True, head_node_args={**config, **head})
    try:
        yield Nodes(cluster)
    finally:
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def wait_for(
    happened: Callable[[], bool],
    *,
    timeout_s: float = 300.0,
    others: Callable[[], object] = lambda: None,
) -> None:
    """Wait for an event in Ray. Raises: AssertionError: it did not happen; shows `others`."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"waited in vain: {others()}"
        time.sleep(0.05)
