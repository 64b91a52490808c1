"""Suites that measure a hub on this machine: speed, compared with typical servers."""

import os
from urllib.parse import urlsplit

from benchmarks.envhub.client import ServiceTarget
from benchmarks.envhub.hub import ServiceProcess, hub_process, module_process
from benchmarks.envhub.keep_alive import Load, measure_load
from benchmarks.envhub.load import LoadJob, LoadResult, measure
from benchmarks.table import BenchTable

ENVS = ("textcraft", "babyai")
NUM_CLIENTS = (1, 32, 128)
NUM_OPENED = 64
NUM_BATCHED = 128
NUM_ROUNDS = 3
ROUTES = "textcraft, AgentGym's routes, {} raw clients"
MIN_STEPS_PER_S = 1500.0  # With TextCraft and 128 clients.
MAX_P99_MS = 250.0
MIN_OF_AGENTGYM = 3.0
# Variable with the URL of AgentGym's own TextCraft server, if one runs.
PEER = "LONGSTRIDE_BENCH_PEER"
REFERENCE = "benchmarks.envhub.reference"
LEGEND = (
    "hub: this project. usual: synchronous FastAPI handlers in the thread pool around the same\n"
    "environments, by the same loop and parser (uvloop, httptools). plain: the same by what\n"
    "`pip install uvicorn` brings. One process each, keep-alive clients on the other core.\n"
)


def run_suite(table: BenchTable) -> None:
    """Compare the hub with a typical server, in about two minutes."""
    with (
        hub_process(ENVS) as hub,
        module_process(REFERENCE) as usual,
        module_process(REFERENCE, environ={"LONGSTRIDE_BENCH_PLAIN": "1"}) as plain,
    ):
        servers = (hub, usual, plain)
        table.title(LEGEND.rstrip())
        promised: LoadResult | None = None
        for env in ENVS:
            for num_clients in NUM_CLIENTS:
                row = _row(table, servers, env, "step", num_clients)
                if env == "textcraft" and num_clients == max(NUM_CLIENTS):
                    promised = row
            _row(table, servers, env, "open", NUM_OPENED)
            _row(table, (hub,), env, "batch", NUM_BATCHED)
            _row(table, (hub,), env, "batch_open", NUM_OPENED)
        add_agentgym_rows(table, hub, plain)
    assert promised is not None
    judge(table, promised)


def _row(
    table: BenchTable, servers: tuple[ServiceProcess, ...], env: str, kind: str, num_clients: int
) -> LoadResult:
    """Measure one load on each server, write the rows, return the hub's figures.

    The servers take turns in several short rounds, so that the varying load of other programs
    affects all of them equally.
    """
    jobs = [
        LoadJob(
            target=server.target,
            kind=kind,
            is_reference=server is not servers[0],
            env=env,
            num_clients=num_clients,
        )
        for server in servers
    ]
    rounds = [[measure(job) for job in jobs] for _ in range(NUM_ROUNDS)]
    figures = [_joined(list(each)) for each in zip(*rounds, strict=True)]
    hub, *peers = figures
    name = f"{env}, {_label(kind, num_clients)}"
    if not peers:
        table.figure(name, hub.per_s, "/s", _latencies(hub))
    for against, peer in zip(("usual", "plain"), peers, strict=False):
        note = f"{_latencies(hub)}; theirs {_latencies(peer)}"
        table.compare(name, hub.per_s, peer.per_s, "/s", against=against, note=note)
    return hub


def add_agentgym_rows(table: BenchTable, hub: ServiceProcess, plain: ServiceProcess) -> None:
    """Measure steps on AgentGym's routes, compared with its server and its kind of server.

    AgentGym's servers use FastAPI with synchronous handlers and uvicorn's defaults.
    """
    base = "/agentgym/textcraft"
    peer = os.environ.get(PEER, "")
    loads = [
        Load(target=hub.target, base=base),
        Load(target=plain.target, base="/textcraft", reset_key="item_id"),
    ]
    if peer:
        loads.append(Load(target=ServiceTarget(url=peer), base=urlsplit(peer).path.rstrip("/")))
    rounds = [[measure_load(load) for load in loads] for _ in range(NUM_ROUNDS)]
    ours, *others = (_joined(list(each)) for each in zip(*rounds, strict=True))
    name = ROUTES.format(loads[0].num_clients)
    for against, theirs in zip(("as AgentGym serves", "AgentGym's server"), others, strict=False):
        note = f"{_latencies(ours)}; theirs {_latencies(theirs)}"
        least = None if against == "as AgentGym serves" else MIN_OF_AGENTGYM
        table.compare(
            name, ours.per_s, theirs.per_s, "/s", against=against, at_least=least, note=note
        )
    if not peer:
        table.note("AgentGym's server", f"not measured: name the URL of its TextCraft in {PEER}")


def _joined(rounds: list[LoadResult]) -> LoadResult:
    return LoadResult(
        num_done=sum(each.num_done for each in rounds),
        duration_s=sum(each.duration_s for each in rounds),
        latencies_ms=[latency for each in rounds for latency in each.latencies_ms],
    )


def _label(kind: str, num_clients: int) -> str:
    if kind == "step":
        return f"step, {num_clients} client" + ("s" if num_clients > 1 else "")
    if kind == "open":
        return f"create + reset, {num_clients} at once"
    noun = "steps" if kind == "batch" else "creations"
    return f"batches of {num_clients} {noun}"


def _latencies(measured: LoadResult) -> str:
    return f"p50 {measured.percentile_ms(0.5):.2f} p99 {measured.percentile_ms(0.99):.2f} ms"


def judge(table: BenchTable, measured: LoadResult) -> None:
    """Write the figures that have bounds."""
    name = f"TextCraft, {max(NUM_CLIENTS)} clients"
    table.at_least(f"{name}: steps", measured.per_s, "/s", MIN_STEPS_PER_S)
    table.at_most(f"{name}: p99 of a step", measured.percentile_ms(0.99), "ms", MAX_P99_MS)
