"""The suite `agents`: episodes per second of external agents, compared with our own loop.

One engine and one hub serve all. The quickstart's policy plays its tasks alternately with our own
loop and with long-lived agents that sample the same tokens. The agents are
`docs/examples/agent_many.py`, which uses the standard library only, and `docs/examples/agent.py`,
which uses the package `openai`.
"""

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop
from transformers import AutoTokenizer

from actor.agents.agents import Agents
from actor.engine.engine import Engine
from actor.play.engine_player import player_of
from actor.play.own_process import make_job
from actor.play.play import EpisodePlayer, PlayJob, play
from actor.rollout.render import Renderer
from benchmarks.table import BenchTable
from common.checks.machine import gpus
from common.config.evaluation import AgentLifetime
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.cpu import family_cpu_s
from common.evaluation.planned import PlannedEpisode
from common.launch.hub import serve_hub
from common.launch.roles import ONE_THREAD
from common.repository import ROOT
from common.store.journal import read_journal
from common.store.run_dir import RunDir

NUM_ROUNDS = 2  # Rounds of each, in turn. One warm-up round before them is not counted.
NUM_EPISODES = 384
HORIZON = 6  # Number of turns, as at the start of the quickstart.
MIN_RATIO = 0.90
OWN = "our own loop"
AGENTS = {"plain": ["agent_many.py", "128"], "openai": ["agent.py"]}


def run_suite(table: BenchTable) -> None:
    """Play with each loop in turn, in a few minutes."""
    table.title(f"quickstart's policy and tasks, {NUM_ROUNDS} x {NUM_EPISODES} episodes of each")
    with tempfile.TemporaryDirectory(prefix="longstride-agents-") as folder:
        table.attempt("agents", lambda: add_agents(table, Path(folder)))


def add_agents(table: BenchTable, folder: Path) -> None:
    if not gpus():
        os.environ.update(ONE_THREAD)  # Thread settings of the engine, as in a run.
    cfg = load_config("quickstart", [f"run.dir={folder}", "run.name=hub"], root=ROOT)
    with serve_hub(cfg, RunDir(root=folder / "hub"), root=ROOT) as (url, token):
        done = uvloop.run(_measure(cfg, make_job(cfg, [], url, token, folder / "journal")))
    own = done.pop(OWN)
    for name, by_agent in done.items():
        add_agent(table, name, by_agent, own)


def add_agent(table: BenchTable, name: str, by_agent: Counter[str], own: Counter[str]) -> None:
    table.compare(
        f"episodes of a long-lived agent, {name}",
        by_agent["episodes"] / by_agent["time_s"],
        own["episodes"] / own["time_s"],
        "/s",
        against=OWN,
        at_least=MIN_RATIO if name == "plain" else None,
    )
    table.compare(
        f"the same, {name}, all processes",
        1e3 * by_agent["cpu_s"] / by_agent["episodes"],
        1e3 * own["cpu_s"] / own["episodes"],
        "cpu ms/episode",
        against=OWN,
        note=f"{by_agent['turns'] / by_agent['episodes']:.2f} and"
        f" {own['turns'] / own['episodes']:.2f} turns",
    )


async def _measure(cfg: RunConfig, job: PlayJob) -> dict[str, Counter[str]]:
    renderer = Renderer(AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True))
    engine = await Engine.start(
        cfg.model, cfg.actor, end_of_turn_ids=renderer.end_of_turn_ids, seed=cfg.run.seed
    )
    engine.version = 0
    agents = {name: _agents(cfg, command, renderer) for name, command in AGENTS.items()}
    players = {
        name: replace(player_of(engine, renderer, cfg.actor), agents=each)
        for name, each in {OWN: None, **agents}.items()
    }
    done = {name: Counter[str]() for name in players}
    try:
        for number in range(NUM_ROUNDS + 1):
            for name, player in players.items():
                plans = _plans(cfg, f"{name}/{number}")
                found = await _timed(replace(job, plans=plans, max_failed=0), player)
                if number:
                    done[name].update(found)
    finally:
        for each in agents.values():
            await each.close()
        engine.shut_down()
    return done


def _agents(cfg: RunConfig, command: Sequence[str], renderer: Renderer) -> Agents:
    program, *words = command
    argv = [sys.executable, str(ROOT / "docs" / "examples" / program), *words]
    how = {"endpoint": True, "agent": argv, "agent_lifetime": AgentLifetime.RUN}
    return Agents(replace(cfg.actor, **how), actor="bench", renderer=renderer)


def _plans(cfg: RunConfig, prefix: str) -> list[PlannedEpisode]:
    """Return the same episodes for every player, with ids of their own."""
    plans: list[PlannedEpisode] = []
    for number in range(NUM_EPISODES):
        task = cfg.tasks[number % len(cfg.tasks)]
        plans.append(
            PlannedEpisode(
                episode_id=f"{prefix}/{number}",
                env=task.env,
                item_id=f"{task.subset}-train-{number}",
                seed=0,
                horizon=HORIZON,
            )
        )
    return plans


async def _timed(job: PlayJob, player: EpisodePlayer) -> dict[str, float]:
    """Return episodes, turns, seconds, and processor seconds of all processes.

    Raises: LongstrideError: an episode failed.
    """
    shutil.rmtree(job.journal, ignore_errors=True)
    started = time.monotonic()
    before = family_cpu_s()
    await play(job, player)
    took_s = time.monotonic() - started
    cpu_s = family_cpu_s() - before
    episodes = [each for _, each in read_journal(job.journal)]
    turns = sum(each.num_turns for each in episodes)
    return {"episodes": len(episodes), "turns": turns, "time_s": took_s, "cpu_s": cpu_s}
