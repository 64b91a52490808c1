"""Suites that measure a hub on this machine: speed, compared with typical servers."""

import os
from dataclasses import replace
from urllib.parse import urlsplit

from benchmarks.envhub.client import ServiceTarget
from benchmarks.envhub.hub import ServiceProcess, hub_process, module_process
from benchmarks.envhub.job import Job, Measured, measure
from benchmarks.table import BenchTable

ENVS = ("textcraft", "babyai")
NUM_CLIENTS = (1, 32, 128)
NUM_OPENED = 64
NUM_ROUNDS = 3
BASE = "/agentgym/textcraft"
ROUTES = "textcraft, AgentGym's routes, 128 raw clients"
MIN_STEPS_PER_S = 1500.0  # With TextCraft and 128 clients.
MAX_P99_MS = 250.0
MIN_OF_AGENTGYM = 3.0
# Variable with the URL of AgentGym's own TextCraft server, if one runs.
PEER = "LONGSTRIDE_BENCH_PEER"
REFERENCE = "benchmarks.envhub.reference"
LEGEND = (
    "hub: this project. usual: synchronous FastAPI handlers in the thread pool around the same\n"
    "environments, by the same loop and parser (uvloop, httptools). plain: the same by what\n"
    "`pip install uvicorn` brings. One process each, keep-alive clients on the other core."
)


def run_suite(table: BenchTable) -> None:
    """Compare the hub with a typical server, in about two minutes."""
    with (
        hub_process(ENVS) as hub,
        module_process(REFERENCE) as usual,
        module_process(REFERENCE, environ={"LONGSTRIDE_BENCH_PLAIN": "1"}) as plain,
    ):
        table.title(LEGEND)
        peers = {"usual": usual, "plain": plain}
        for env in ENVS:
            for num in NUM_CLIENTS:
                label = f"{env}, step, {num} client" + ("s" if num > 1 else "")
                steps = add_load(table, label, hub, peers, kind="step", env=env, num_clients=num)
                if env == "textcraft" and num == max(NUM_CLIENTS):
                    judge(table, steps)
            label = f"{env}, create + reset, {NUM_OPENED} at once"
            add_load(table, label, hub, peers, kind="open", env=env, num_clients=NUM_OPENED)
        add_agentgym_rows(table, hub, plain)


def add_load(
    table: BenchTable,
    name: str,
    hub: ServiceProcess,
    peers: dict[str, ServiceProcess],
    *,
    kind: str,
    env: str,
    num_clients: int,
) -> Measured:
    """Measure one load on each server, write the rows, return the hub's figures."""
    job = Job(target=hub.target, kind=kind, env=env, num_clients=num_clients)
    others = [replace(job, target=each.target, is_reference=True) for each in peers.values()]
    ours, *theirs = in_turn([job, *others])
    for against, peer in zip(peers, theirs, strict=True):
        note = f"{_latencies(ours)}; theirs {_latencies(peer)}"
        table.compare(name, ours.per_s, peer.per_s, "/s", against=against, note=note)
    return ours


def in_turn(jobs: list[Job]) -> list[Measured]:
    """Return the measurements of all jobs, in several short rounds.

    The varying load of other programs affects all jobs equally.
    """
    rounds = [[measure(job) for job in jobs] for _ in range(NUM_ROUNDS)]
    return [
        Measured(
            num_done=sum(each.num_done for each in own),
            duration_s=sum(each.duration_s for each in own),
            latencies_ms=[latency for each in own for latency in each.latencies_ms],
        )
        for own in zip(*rounds, strict=True)
    ]


def add_agentgym_rows(table: BenchTable, hub: ServiceProcess, plain: ServiceProcess) -> None:
    """Measure steps on AgentGym's routes, compared with its server and its kind of server.

    AgentGym's servers use FastAPI with synchronous handlers and uvicorn's defaults.
    """
    peer = os.environ.get(PEER, "")
    jobs = [
        Job(target=hub.target, kind="raw", base=BASE),
        Job(target=plain.target, kind="raw", base="/textcraft", reset_key="item_id"),
    ]
    if peer:
        jobs.append(
            Job(target=ServiceTarget(url=peer), kind="raw", base=urlsplit(peer).path.rstrip("/"))
        )
    else:
        table.note("AgentGym's server", f"not measured: name the URL of its TextCraft in {PEER}")
    ours, *others = in_turn(jobs)
    for against, theirs in zip(("as AgentGym serves", "AgentGym's server"), others, strict=False):
        table.compare(
            ROUTES,
            ours.per_s,
            theirs.per_s,
            "/s",
            against=against,
            at_least=None if against == "as AgentGym serves" else MIN_OF_AGENTGYM,
            note=f"{_latencies(ours)}; theirs {_latencies(theirs)}",
        )


def _latencies(measured: Measured) -> str:
    return f"p50 {measured.percentile_ms(0.5):.2f} p99 {measured.percentile_ms(0.99):.2f} ms"


def judge(table: BenchTable, measured: Measured) -> None:
    """Write the figures that have bounds."""
    name = f"TextCraft, {max(NUM_CLIENTS)} clients"
    table.at_least(f"{name}: steps", measured.per_s, "/s", MIN_STEPS_PER_S)
    table.at_most(f"{name}: p99 of a step", measured.percentile_ms(0.99), "ms", MAX_P99_MS)
