"""The bytes of a version on the wire, counted by the kernel: nodes are network namespaces."""

import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.wire.security import create_keys
from common.wire.sockets import Router
from learner.weights.publisher import Publisher
from learner.weights.source import LiveWeights, PublishedWeights
from tests.end_to_end.nodes import Network, why_not
from tests.end_to_end.runs import REPOSITORY
from tests.learner.weights.test_delta import SETTINGS
from tests.learner.weights.test_shared_copies import becomes

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_BYTES = 32 << 20
ACTORS_PER_NODE = 2
WORKERS_PER_ACTOR = 2
START = "import sys; from tests.learner.weights.keeping_actor import main; main(sys.argv[1:])"


def received_bytes(link: str) -> int:
    """Return the bytes that a node has received, by the counter at its end of the switch."""
    return int(Path(f"/sys/class/net/{link}/statistics/tx_bytes").read_text(encoding="ascii"))


def test_each_node_receives_a_version_once(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    keys = create_keys(tmp_path / "keys")
    weight = torch.randn(NUM_BYTES // 2)
    source = LiveWeights([("w", weight)], torch.bfloat16)
    with ExitStack() as stack:
        network = stack.enter_context(Network(139))
        router = Router(keys, host=network.host, port=0)
        settings = replace(
            SETTINGS,
            host=network.host,
            timeout_s=120.0,
            silent_after_s=60.0,
            bucket_bytes=1 << 20,
            keeps_versions=False,
        )
        publisher = Publisher(router, settings)
        publisher.start()
        stack.callback(publisher.stop)
        nodes = [
            stack.enter_context(network.node(index, tmp_path / str(index), hidden=tmp_path))
            for index in range(2)
        ]
        for node in nodes:
            for number in range(ACTORS_PER_NODE):
                place = (tmp_path / "keys", network.host, publisher.port, f"{node.name}-{number}")
                inside = ["ip", "netns", "exec", node.name, sys.executable, "-c", START]
                process = subprocess.Popen(
                    [*inside, *map(str, place), str(WORKERS_PER_ACTOR)], cwd=REPOSITORY
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
        num_actors = ACTORS_PER_NODE * len(nodes)
        assert becomes(lambda: publisher.drain_metrics()["weights/members"] == num_actors)
        assert publisher.publish(PublishedWeights(version=0, source=source))
        publisher.drain_metrics()
        before = [received_bytes(node.name) for node in nodes]
        assert publisher.publish(PublishedWeights(version=1, source=source))
        received = [
            received_bytes(node.name) - then for node, then in zip(nodes, before, strict=True)
        ]
        metrics = publisher.drain_metrics()
        assert metrics["weights/members"] == num_actors
        assert metrics["publish/bytes"] == NUM_BYTES * len(nodes)
        # Frames, acknowledgements and heartbeats add a few percent.
        assert received == pytest.approx([1.1 * NUM_BYTES] * len(nodes), rel=0.1)
