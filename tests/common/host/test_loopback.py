"""Laws of a machine without IPv4: what a run listens on, in a network namespace with ::1 alone."""

import os
import shutil
import subprocess
import sys

import pytest

from common.host.loopback import can_bind, loopback
from common.repository import ROOT
from tests.end_to_end.nodes import why_not

INSIDE = 'ip link set lo up && ip -4 address del 127.0.0.1/8 dev lo && exec "$@"'
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("unshare") or bool(why_not()),
    reason="makes a network namespace: needs root, ip and unshare",
)


def run_with_ipv6_only(code: str) -> str:
    """Return what a program prints on a machine with ::1 as its only address."""
    inside = ["unshare", "-n", "sh", "-c", INSIDE, "sh"]
    done = subprocess.run(
        [*inside, sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_machine_with_ipv4_keeps_its_ipv4_loopback() -> None:
    assert can_bind("127.0.0.1")
    assert loopback() == "127.0.0.1"


@pytest.mark.slow
def test_default_hosts_become_ipv6_addresses() -> None:
    code = (
        "from tools.checks.preflight import check_ports\n"
        "from common.config.load import load_config\n"
        "from tools.cli.requested import on_loopback\n"
        "cfg = on_loopback(load_config('smoke', ['learner.host=::']))\n"
        "check_ports(cfg)\n"
        "print(cfg.scheduler.host, cfg.learner.host, cfg.envhub.host)\n"
    )
    assert run_with_ipv6_only(code) == "::1 :: ::1\n"


LISTENERS = """
import socket, threading
from urllib.parse import urlsplit
from actor.agents.server import AgentServer
from actor.api.chat import bound
from tools.dashboard.web.server import listen, url_of
from common.host.loopback import loopback
from common.weights.transport import BroadcastGroup, CollectiveMember
from common.weights.rendezvous import interface_of
from common.weights.rendezvous import StoreServer
from envhub.web.local_site import LocalSite
with listen(loopback(), "0") as page:
    socket.create_connection(("::1", urlsplit(url_of(page, "")).port)).close()
bound(0).close()
print(LocalSite(None).address.rpartition(":")[0], interface_of("::1"))
StoreServer(loopback()).close()
"""
WEIGHTS = """
import torch
import torch.distributed as dist
store = dist.HashStore()
out = torch.zeros(4, dtype=torch.uint8)
def receive():
    group = BroadcastGroup(store, place(1), epoch=1)
    group.broadcast(out)
def place(rank):
    return CollectiveMember(rank, 2, "gloo", bind_host="::1", timeout_s=20.0)
other = threading.Thread(target=receive)
other.start()
group = BroadcastGroup(store, place(0), epoch=1)
group.broadcast(torch.full((4,), 7, dtype=torch.uint8))
other.join()
print(out.tolist())
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """The lines of one process, whose imports take seconds."""
    return run_with_ipv6_only(LISTENERS + WEIGHTS).splitlines()


@pytest.mark.long
@pytest.mark.slow
def test_every_run_listener_answers_on_ipv6(printed: list[str]) -> None:
    assert printed[0] == "[::1] lo"


@pytest.mark.long
@pytest.mark.slow
def test_weights_travel_on_ipv6(printed: list[str]) -> None:
    assert printed[1:] == ["[7, 7, 7, 7]"]


@pytest.mark.long
@pytest.mark.slow
def test_ray_is_refused_by_name_on_ipv6() -> None:
    code = (
        "from common.config.run_config import RaySection\n"
        "from common.errors import ConfigError\n"
        "from tools.launch.ray.cluster import open_cluster\n"
        "try:\n"
        "    open_cluster(RaySection(), num_cpus=1).__enter__()\n"
        "except ConfigError as error:\n"
        "    print(str(error)[:45])\n"
    )
    assert run_with_ipv6_only(code) == "launcher=ray: Ray listens on 127.0.0.1, and t\n"
