"""The suite `envhub`: steps per second of a hub, and of AgentGym's routes beside its server."""

import os
from functools import partial
from urllib.parse import urlsplit

from benchmarks.envhub.hub import ServiceProcess, ServiceTarget, hub_process
from benchmarks.envhub.load import Job, Measured, measure
from benchmarks.suite import Suite

ENVS = ("textcraft", "babyai")
NUM_CLIENTS = (1, 32, 128)
NUM_ROUNDS = 3
BASE = "/agentgym/textcraft"
MIN_STEPS_PER_S = 1500.0  # With TextCraft and 128 clients.
MAX_P99_MS = 250.0
MIN_OF_AGENTGYM = 3.0
# Variable with the URL of AgentGym's own TextCraft server, if one runs.
PEER = "LONGSTRIDE_BENCH_PEER"


def run_suite(suite: Suite) -> None:
    """Measure a hub of one process with keep-alive clients in another, in half a minute."""
    with hub_process(ENVS) as hub:
        for env in ENVS:
            for num in NUM_CLIENTS:
                job = Job(target=hub.target, env=env, num_clients=num)
                done = in_turn(suite, {env: job})[env]
                note = f"p50 {done.percentile_ms(0.5):.2f} ms"
                name = f"{env}, steps of {num} clients"
                if env == "textcraft" and num == max(NUM_CLIENTS):
                    judge(suite, name, done)
                else:
                    suite.figure(name, done.per_s, "/s", note)
        add_agentgym(suite, hub, peer=os.environ.get(PEER, ""))


def judge(suite: Suite, name: str, done: Measured) -> None:
    """Write the figures that have bounds."""
    suite.at_least(name, done.per_s, "/s", MIN_STEPS_PER_S)
    suite.at_most(f"{name}, p99", done.percentile_ms(0.99), "ms", MAX_P99_MS)


def add_agentgym(suite: Suite, hub: ServiceProcess, *, peer: str) -> None:
    """Measure steps on AgentGym's routes, compared with its server if one runs."""
    name = "textcraft, AgentGym's routes, 128 clients"
    jobs = {"hub": Job(target=hub.target, base=BASE)}
    if not peer:
        suite.figure(name, in_turn(suite, jobs)["hub"].per_s, "/s")
        suite.note("AgentGym's server", f"not measured: name the URL of its TextCraft in {PEER}")
        return
    jobs["peer"] = Job(target=ServiceTarget(url=peer), base=urlsplit(peer).path.rstrip("/"))
    hub_per_s, peer_per_s = (measured.per_s for measured in in_turn(suite, jobs).values())
    suite.compare(
        name, hub_per_s, peer_per_s, "/s", against="AgentGym's server", at_least=MIN_OF_AGENTGYM
    )


def in_turn(suite: Suite, jobs: dict[str, Job]) -> dict[str, Measured]:
    """Return the measurements of all jobs, each joined from several short rounds."""
    measured = suite.in_turn(
        {name: partial(measure, job) for name, job in jobs.items()}, num_rounds=NUM_ROUNDS
    )
    return {
        name: Measured(
            duration_s=sum(part.duration_s for part in rounds),
            latencies_ms=[latency for part in rounds for latency in part.latencies_ms],
        )
        for name, rounds in measured.items()
    }
