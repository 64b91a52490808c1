"""The suites of studies: plan, runs, tables and pictures."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.study.outcome import NO_INTERVAL, SeedResult
from benchmarks.study.pictures import pictures_of
from benchmarks.study.plan import CONFIG, Does, Run, Study, merged, read_study
from benchmarks.study.queue import Queue
from benchmarks.study.tables import TABLES
from benchmarks.table import BenchTable
from common.config.command_line import ParsedCommand
from common.config.curriculum import subsets_in_use
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import LongstrideError
from common.store.run_dir import write_atomically

NUM_SHOWN = 5  # Number of error messages to show of failed runs.


def measure(name: str, request: ParsedCommand, table: BenchTable, *, root: Path) -> None:
    """Run the study `name` and add its figures and tables; a dry run prints the plan.

    Raises: ConfigError: an override is wrong, or the folder holds results of other settings.
    """
    cfg = load_config(CONFIG, request.overrides, root=root)
    queue = make_queue(name, cfg, request.overrides, root=root)
    for run, *_ in queue.study.chunks(queue.study.runs()):
        if run.arm.does is not Does.COMMANDS and run.seed == queue.study.seeds[0]:
            # Every arm is checked before the first run starts.
            load_config(CONFIG, run.overrides, root=root)
    table.title(plan_text(queue))
    if request.is_dry:
        return
    if any(arm.does is Does.IN_PROCESS for arm in queue.study.arms):
        queue.perform[Does.IN_PROCESS] = partial(_in_process, root, _starts(queue))
    queue.perform[Does.COMMANDS] = partial(_commands, queue)
    with contextlib.ExitStack() as stack:
        if cfg.study.on_ray and queue.todo():
            from common.launch.ray.cluster import open_cluster  # The import of Ray takes seconds.

            stack.enter_context(open_cluster(cfg.ray, num_cpus=cfg.study.workers))
        queue.work()
    tell(queue, table)


def heldout_success(cfg: RunConfig, policy: Path) -> float:
    """Return the success of a policy on the held-out items."""
    from benchmarks.study.in_process import InProcessRun  # The import of torch takes seconds.
    from learner.policy.model import load_policy

    model = load_policy(str(policy), device="cpu", gradient_checkpointing=False)
    played = InProcessRun(cfg, make_playing).evaluate(model.state_dict())
    return sum(each.is_success for each in played) / len(played)


def make_queue(name: str, cfg: RunConfig, overrides: Sequence[str], *, root: Path) -> Queue:
    """Return the queue of a study, in the configured folder."""
    study = read_study(name, cfg.study, overrides)
    size = "" if cfg.study.size == 1 else f"-x{cfg.study.size:g}"
    folder = root / cfg.run.dir / (cfg.study.folder or f"study-{name}{size}")
    timeout_s = cfg.ray.place_timeout_s
    return Queue(study=study, folder=folder, section=cfg.study, place_timeout_s=timeout_s)


def plan_text(queue: Queue) -> str:
    """Return the number of runs, of completed runs, and the time of the others."""
    study = queue.study
    runs = study.runs()
    firsts = study.firsts()
    todo = queue.todo()
    found = [queue.outcome_of(run) for run in runs if firsts[run.name] == run.name]
    done = [each for each in found if each is not None]
    taken = [each.cpu_s for each in done if each.cpu_s and not each.same_as]
    each_s = sum(taken) / len(taken) if taken else study.cpu_s * study.size
    known = "measured" if taken else "estimated"
    total_h = each_s * len(todo) / 3600
    lines = [
        f"study {study.name}: {len(study.arms)} arms x {len(study.seeds)} seeds in {queue.folder}",
        f"{len(runs)} runs, of which {len(runs) - len(found)} are the same as others;"
        f" {len(done)} done, {len(todo)} to do" + (" (study.only)" if queue.section.only else ""),
        f"{known}: {each_s:.0f} CPU seconds a run, {total_h:.1f} CPU hours in all,"
        f" {total_h / 2:.1f} h of two cores, at most",
    ]
    if num := sum(bool(run.arm.twin) for run in todo):
        lines.append(f"up to {num} of them fall away: those whose controller never acts")
    return "\n".join(lines)


def tell(queue: Queue, table: BenchTable) -> None:
    """Add the figures, tables and pictures of all completed runs."""
    study = queue.study
    found = {run.name: queue.outcome_of(run) for run in study.runs()}
    outcomes = [each for each in found.values() if each is not None]
    for each in outcomes:
        taken = f"{each.cpu_s:.0f} CPU s" if each.cpu_s else "CPU not measured"
        note = f"seed {each.seed}, {taken}"
        table.figure(f"{each.arm}, seed {each.seed}: success after", each.after, "", note)
    for name, why in list(queue.failed.items())[:NUM_SHOWN]:
        table.fail(name, why)
    missing = [name for name, each in found.items() if each is None]
    if missing and not queue.section.only and not queue.failed:
        table.fail(f"{len(missing)} runs", f"not done: {', '.join(missing[:NUM_SHOWN])} ...")
    arms = [arm.name for arm in study.arms]
    outcomes.sort(key=lambda each: arms.index(each.arm))
    # A worker process gets single runs in `study.only`, and writes no table.
    if not outcomes or not set(queue.section.only) <= {*arms}:
        return
    text = TABLES[study.name](outcomes).rstrip()
    write_atomically(queue.folder / "table.md", f"{text}\n")
    for name, picture in pictures_of(study.name, outcomes).items():
        write_atomically(queue.folder / f"{name}.svg", picture)
    table.title(text)
    if missing:
        table.title(f"of some arms alone: {len(missing)} of {len(found)} runs are not in it")
    total_h = sum(each.cpu_s for each in outcomes if not each.same_as) / 3600
    table.title(f"{total_h:.1f} CPU hours; table and pictures: {queue.folder}")


def make_playing(cfg: RunConfig) -> tuple[Any, dict[str, Any]]:
    """Return a player of episodes in this process, and the catalogue as a hub would return it."""
    from benchmarks.actor.in_process import InProcessPlayer  # The import of torch takes seconds.
    from envhub.catalogue.distances import Distances
    from envhub.catalogue.registry import Registry

    registry = Registry(sorted({task.env for task in cfg.tasks}), cfg.envs, cfg.env)
    specs = {name: registry.spec(name) for name in registry.names}
    distances = Distances(registry)
    offered = asyncio.run(distances.catalogue(subsets_in_use(cfg.curriculum, cfg.tasks)))
    return InProcessPlayer(cfg, specs, plain=distances.plain), offered


def _starts(queue: Queue) -> dict[str, list[str]]:
    """Return for each arm the overrides that name its initial policy; make missing policies.

    Raises: LongstrideError: a command that makes one failed.
    """
    study = queue.study
    todo = {run.arm.name for run in queue.todo()}
    if any(each.startswith("model.path=") for each in study.given):
        return {arm.name: [] for arm in study.arms}
    found: dict[str, list[str]] = {}
    for arm in study.arms:
        recipe = study.starts[arm.start] if arm.start else study.start
        name = f"start-{arm.start}" if arm.start else "start"
        policy = queue.folder / name / "policy"
        if recipe and arm.name in todo and not (policy / "config.json").exists():
            queue.folder.mkdir(parents=True, exist_ok=True)
            command, *overrides = recipe
            own = [f"run.dir={queue.folder}", f"run.name={name}"]
            words = merged(_policy(study), overrides)
            queue.run_command(name, [command, "--config", CONFIG, *own, *words])
        found[arm.name] = [f"model.path={policy}"] if recipe else []
    return found


def _policy(study: Study) -> list[str]:
    """Return the override with the initial policy of a study."""
    return [each for each in study.overrides if each.startswith("model.path=")]


def _in_process(
    root: Path, starts: dict[str, list[str]], run: Run, _: Path
) -> tuple[SeedResult, bool]:
    from benchmarks.study.in_process import InProcessRun  # The import of torch takes seconds.

    cfg = load_config(CONFIG, merged(run.overrides, starts[run.arm.name]), root=root)
    return InProcessRun(cfg, make_playing).run(arm=run.arm.name)


def _commands(queue: Queue, run: Run, folder: Path) -> tuple[SeedResult, bool]:
    """Run an arm's commands in turn, evaluate their policy, and compare it to the initial policy.

    Raises: LongstrideError: a command failed, or the run with the required data is missing.
    """
    data = folder / f"data-seed{run.seed}"
    known = queue.outcome_of(replace(run, arm=queue.study.arms[0]))
    if known is None:
        raise LongstrideError(f"{data.name}, whose journal {run.name} needs, is not done")
    names = {"run": str(folder / run.name), "data": str(data)}
    own = [f"run.dir={folder}", f"run.name={run.name}", f"run.seed={run.seed}"]
    policy = _policy(queue.study)
    scored = [f"eval.num_items={known.num_after}", f"model.path={names['run']}/policy"]
    for command, *own_words in [*run.arm.commands, ("eval", *scored)]:
        words = [each.format(**names) for each in merged([*policy, *queue.study.given], own_words)]
        queue.run_command(run.name, [command, "--config", CONFIG, *own, *words])
    path = folder / run.name / "eval.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        found = entries[-1]["overall"]["success"]
        after, low, high = found["mean"], *found["ci95"]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise LongstrideError(f"{path}: no evaluation ({error!r})") from error
    own_outcome = replace(
        known,
        arm=run.arm.name,
        after=after,
        after_ci95=(low, high),
        gain=after - known.before,
        gain_ci95=NO_INTERVAL,
        points=(),
        same_as="",
        cpu_s=0.0,
    )
    return own_outcome, True
