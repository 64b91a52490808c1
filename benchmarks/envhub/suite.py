"""The suite `envhub`: steps per second of a hub, and of AgentGym's routes beside its server."""

import os
from urllib.parse import urlsplit

from benchmarks.envhub.client import ServiceTarget
from benchmarks.envhub.hub import ServiceProcess, hub_process
from benchmarks.envhub.load import Job, Measured, measure
from benchmarks.table import BenchTable

ENVS = ("textcraft", "babyai")
NUM_CLIENTS = (1, 32, 128)
NUM_ROUNDS = 3
BASE = "/agentgym/textcraft"
MIN_STEPS_PER_S = 1500.0  # With TextCraft and 128 clients.
MAX_P99_MS = 250.0
MIN_OF_AGENTGYM = 3.0
# Variable with the URL of AgentGym's own TextCraft server, if one runs.
PEER = "LONGSTRIDE_BENCH_PEER"


def run_suite(table: BenchTable) -> None:
    """Measure a hub of one process with keep-alive clients in another, in half a minute."""
    with hub_process(ENVS) as hub:
        for env in ENVS:
            for num in NUM_CLIENTS:
                done = in_turn([Job(target=hub.target, env=env, num_clients=num)])[0]
                note = f"p50 {done.percentile_ms(0.5):.2f} ms"
                name = f"{env}, steps of {num} clients"
                if env == "textcraft" and num == max(NUM_CLIENTS):
                    judge(table, name, done)
                else:
                    table.figure(name, done.per_s, "/s", note)
        add_agentgym(table, hub, peer=os.environ.get(PEER, ""))


def judge(table: BenchTable, name: str, done: Measured) -> None:
    """Write the figures that have bounds."""
    table.at_least(name, done.per_s, "/s", MIN_STEPS_PER_S)
    table.at_most(f"{name}, p99", done.percentile_ms(0.99), "ms", MAX_P99_MS)


def add_agentgym(table: BenchTable, hub: ServiceProcess, *, peer: str) -> None:
    """Measure steps on AgentGym's routes, compared with its server if one runs."""
    name = "textcraft, AgentGym's routes, 128 clients"
    ours = Job(target=hub.target, base=BASE)
    if not peer:
        table.figure(name, in_turn([ours])[0].per_s, "/s")
        table.note("AgentGym's server", f"not measured: name the URL of its TextCraft in {PEER}")
        return
    theirs = Job(target=ServiceTarget(url=peer), base=urlsplit(peer).path.rstrip("/"))
    hubs, peers = (each.per_s for each in in_turn([ours, theirs]))
    table.compare(name, hubs, peers, "/s", against="AgentGym's server", at_least=MIN_OF_AGENTGYM)


def in_turn(jobs: list[Job]) -> list[Measured]:
    """Return the measurements of all jobs, in several short rounds.

    The varying load of other programs affects all jobs equally.
    """
    rounds = [[measure(job) for job in jobs] for _ in range(NUM_ROUNDS)]
    return [
        Measured(
            duration_s=sum(each.duration_s for each in own),
            latencies_ms=[latency for each in own for latency in each.latencies_ms],
        )
        for own in zip(*rounds, strict=True)
    ]
