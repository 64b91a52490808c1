"""Suites that measure a hub on this machine: speed beside the usual server, soak, solvability."""

from collections.abc import Callable
from typing import TextIO

from common.report.bench_table import BenchTable
from envhub.bench import soak, solve
from envhub.bench.hub import Service, hub_process, module_process
from envhub.bench.load import Job, Measured, measure

ENVS = ("textcraft", "babyai")
NUM_CLIENTS = (1, 32, 128)
NUM_OPENED = 64
NUM_BATCHED = 128
NUM_ROUNDS = 3
MIN_STEPS_PER_S = 1500.0  # TextCraft, 128 clients
MAX_P99_MS = 250.0
REFERENCE = "envhub.bench.reference"
COLUMNS = (
    f"{'environment':<12}{'load':<24}{'hub /s':>9}{'p50 ms':>8}{'p99 ms':>8}"
    f"{'usual /s':>10}{'p50 ms':>8}{'p99 ms':>8}{'ratio':>7}{'plain /s':>10}{'ratio':>7}\n"
)
LEGEND = (
    "hub: this project. usual: synchronous FastAPI handlers in the thread pool around the same\n"
    "environments, by the same loop and parser (uvloop, httptools). plain: the same by what\n"
    "`pip install uvicorn` brings. One process each, keep-alive clients on the other core.\n"
)


def run_suite(out: TextIO) -> int:
    """Measure the hub beside the usual way to serve; return 1 when a promise is not kept.

    Takes about two minutes.
    """
    with (
        hub_process(ENVS) as hub,
        module_process(REFERENCE) as usual,
        module_process(REFERENCE, environ={"LONGSTRIDE_BENCH_PLAIN": "1"}) as plain,
    ):
        servers = (hub, usual, plain)
        out.write(LEGEND + COLUMNS)
        promised: Measured | None = None
        for env in ENVS:
            for num_clients in NUM_CLIENTS:
                row = _row(out, servers, env, "step", num_clients)
                if env == "textcraft" and num_clients == max(NUM_CLIENTS):
                    promised = row
            _row(out, servers, env, "open", NUM_OPENED)
            _row(out, (hub,), env, "batch", NUM_BATCHED)
            _row(out, (hub,), env, "batch_open", NUM_OPENED)
    assert promised is not None
    return _judge(out, promised)


def _row(
    out: TextIO, servers: tuple[Service, ...], env: str, kind: str, num_clients: int
) -> Measured:
    """Measure one load on each server, write the row, return the hub's figures.

    The servers take turns in several short rounds, so that other work on the machine, which comes
    and goes, weighs on all of them alike.
    """
    jobs = [
        Job(
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
    hub = figures[0]
    cells = f"{env:<12}{_label(kind, num_clients):<24}{hub.per_s:>9.0f}{_latencies(hub)}"
    if len(figures) > 1:
        usual, plain = figures[1:]
        cells += f"{usual.per_s:>10.0f}{_latencies(usual)}{hub.per_s / usual.per_s:>7.2f}"
        cells += f"{plain.per_s:>10.0f}{hub.per_s / plain.per_s:>7.2f}"
    out.write(cells + "\n")
    out.flush()
    return hub


def _joined(rounds: list[Measured]) -> Measured:
    return Measured(
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


def _latencies(measured: Measured) -> str:
    return f"{measured.percentile_ms(0.5):>8.2f}{measured.percentile_ms(0.99):>8.2f}"


def _judge(out: TextIO, measured: Measured) -> int:
    table = BenchTable(out=out)
    name = f"TextCraft, {max(NUM_CLIENTS)} clients"
    table.at_least(f"{name}: steps", measured.per_s, "/s", MIN_STEPS_PER_S)
    table.at_most(f"{name}: p99 of a step", measured.percentile_ms(0.99), "ms", MAX_P99_MS)
    return table.finish()


SUITES: dict[str, Callable[[TextIO], int]] = {
    "envhub": run_suite,
    "soak": soak.run_suite,
    "solve": solve.run_suite,
}
