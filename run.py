"""The command line: parse the command and the overrides, then start roles or be one."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

try:
    from common.config.command_line import Request, parse
    from common.config.load import (
        config_as_yaml,
        find_config,
        load_config,
        override_value,
        save_config,
    )
    from common.config.run_config import RunConfig
    from common.errors import ConfigError
    from common.log import configure_logging
    from common.store.run_dir import RunDir
except ModuleNotFoundError as e:
    sys.exit(
        f"error: {e.name} is not installed for {sys.executable}; `make setup` installs everything "
        "that is needed, then it is .venv/bin/python run.py, or source .venv/bin/activate first"
    )

ROOT = Path(__file__).resolve().parent
DEFAULT_CONFIG = "quickstart"
ROLES = ("envhub", "scheduler", "learner", "actor")


def belongs_to_no_run(request: Request) -> bool:
    """Return whether neither a config nor a run is named."""
    keys = ("run.name", "run.dir")
    named = [key for key in keys if override_value(request.overrides, key) is not None]
    return request.config is None and not named


def load(request: Request) -> RunConfig:
    """Return the config of the request; whoever joins a run gets that run's own config."""
    directory = override_value(request.overrides, "run.dir") or "runs"
    name = override_value(request.overrides, "run.name")
    overrides = request.overrides
    if request.command == "eval" and override_value(overrides, "policy.url"):
        overrides = ["model.path=unset", *overrides]  # no checkpoint plays
    is_by_task = request.command == "eval" and override_value(overrides, "eval.items") == "tasks"
    if is_by_task and override_value(overrides, "eval.num_items") is None:
        overrides = ["eval.num_items=-1", *overrides]  # the whole lists
    joins = request.command in (*ROLES, "status")
    if name is None and request.config is not None and joins:
        name = find_config(request.config, root=ROOT).stem
    if name is None and request.command == "status":
        latest = ROOT / directory / "latest"
        name = latest.resolve().name if latest.exists() else DEFAULT_CONFIG
    own = ROOT / directory / (name or DEFAULT_CONFIG) / "config.yaml"
    if own.is_file() and (joins or (request.config is None and name is not None)):
        return load_config(str(own), overrides, root=ROOT)
    if request.command == "status":
        raise ConfigError(f"run.name={name}: no such run below {directory}/")
    return load_config(request.config or DEFAULT_CONFIG, overrides, root=ROOT)


def train(cfg: RunConfig, run_dir: RunDir) -> int:
    """Start all roles, wait for the end, write the report; return the exit code."""
    from common.dashboard.run_state import stop_line
    from common.launch.lock import hold_run
    from common.launch.preflight import check, has_cuda
    from common.launch.roles import make_role_specs
    from common.launch.supervise import supervise
    from common.store.run_start import prepare
    from common.wire.security import create_keys
    from envhub.command import missing_for

    check(cfg, ROOT, missing=missing_for(cfg))
    started = time.monotonic()
    with hold_run(run_dir.root, name=cfg.run.name):
        prepare(cfg, run_dir)
        run_dir.root.mkdir(parents=True, exist_ok=True)
        for role in (*ROLES, "weights"):
            run_dir.forget_address(role)
        create_keys(run_dir.keys)
        save_config(cfg, run_dir.config)
        _point_latest(run_dir)
        specs = make_role_specs(cfg, run_dir, root=ROOT, has_cuda=has_cuda())
        ending, peak_memory_bytes = supervise(cfg, run_dir, specs)
    if ending.is_interrupted:
        print(f"{cfg.run.name}: {stop_line(run_dir, cfg)}", file=sys.stderr)
    elif ending.exit_code != 0:
        print(f"error: {ending.reason}", file=sys.stderr)
    if ending.exit_code != 0:
        return ending.exit_code
    wall_s = time.monotonic() - started
    _report(cfg, run_dir, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
    return 0


def _report(cfg: RunConfig, run_dir: RunDir, *, wall_s: float, peak_memory_bytes: int) -> None:
    from common.dashboard.run_state import state_line
    from common.report.write import summary, write_report
    from common.store.run_start import mark_finished

    report = write_report(run_dir, cfg, wall_s=wall_s, peak_memory_bytes=peak_memory_bytes)
    mark_finished(run_dir, version=cfg.train.num_steps, result=summary(report))
    print(f"{cfg.run.name}: {state_line(run_dir, cfg)}")
    print(f"report: {run_dir.root / 'report.html'}")


def _point_latest(run_dir: RunDir) -> None:
    latest = run_dir.root.parent / "latest"
    if latest.is_symlink() or not latest.exists():
        latest.unlink(missing_ok=True)
        latest.symlink_to(run_dir.root.name)


def find_role(name: str) -> Callable[[RunConfig, RunDir], None]:
    """Return the blocking entry point of a role; only its own packages are imported."""
    if name == "envhub":
        from envhub.main import run
    elif name == "scheduler":
        from learner.scheduler.main import run
    elif name == "learner":
        from learner.main import run
    else:
        from actor.main import run
    return run


def make_policy(cfg: RunConfig, run_dir: RunDir) -> int:
    """Collect demonstrations unless some are given, train on them; return the exit code."""
    from actor.play.demonstrate import demonstrate
    from common.launch.hub import serve_hub
    from common.wire.security import create_keys
    from envhub.command import missing_for
    from learner.offline import sft

    missing = missing_for(cfg)
    if missing:
        raise ConfigError("; ".join(missing))
    path = Path(cfg.sft.demonstrations)
    if not cfg.sft.demonstrations:
        path = run_dir.root / "demonstrations.jsonl"
        token = create_keys(run_dir.keys).hub_token
        save_config(cfg, run_dir.config)
        with serve_hub(cfg, run_dir, root=ROOT) as url:
            asyncio.run(demonstrate(cfg, hub_url=url, token=token, path=path))
    print(f"policy: {sft.run(cfg, path)}")
    return 0


def prefer(cfg: RunConfig) -> int:
    """Train on pairs of episodes; return the exit code."""
    from common.launch.preflight import check_model
    from learner.offline import dpo

    check_model(cfg.model.path, ROOT)
    print(f"policy: {dpo.run(cfg)}")
    return 0


def evolve(cfg: RunConfig, run_dir: RunDir) -> int:
    """Play and imitate what succeeded, again and again; return the exit code."""
    from actor.play.play import Plan, play_into_journal
    from common.launch.hub import serve_hub
    from common.launch.preflight import check
    from common.wire.security import create_keys
    from envhub.command import missing_for
    from learner.offline import evolve as agent_evol
    from learner.scheduler.curriculum.catalogue import fetch_catalogue

    check(cfg, ROOT, missing=missing_for(cfg))
    token = create_keys(run_dir.keys).hub_token
    save_config(cfg, run_dir.config)
    with serve_hub(cfg, run_dir, root=ROOT) as url:
        catalogue = fetch_catalogue(url, token=token, timeout_s=cfg.actor.env_timeout_s)

        def play(now: RunConfig, iteration: int, folder: Path) -> None:
            plans = [Plan(**asdict(t)) for t in agent_evol.turnouts(now, catalogue, iteration)]
            play_into_journal(now, plans, hub_url=url, token=token, folder=folder)

        policy = agent_evol.run(cfg, run_dir.root, play=play)
    print(f"policy: {policy}")
    return 0


def evaluate(cfg: RunConfig, run_dir: RunDir) -> int:
    """Play held-out items with one policy, write and print the tables; return the exit code."""
    from actor.play.evaluate import check_policy
    from common.launch.hub import serve_hub
    from common.launch.lock import hold_run
    from common.wire.security import create_keys
    from envhub.command import missing_for

    missing = missing_for(cfg)
    if missing:
        raise ConfigError("; ".join(missing))
    check_policy(cfg, ROOT)
    # The hub's own files are apart, so that a run which is being trained can be evaluated.
    hub_cfg = replace(cfg, run=replace(cfg.run, dir=f"{cfg.run.dir}/{cfg.run.name}", name="eval"))
    hub_dir = RunDir(root=run_dir.root / "eval")
    with hold_run(hub_dir.root, name="eval"):
        token = create_keys(hub_dir.keys).hub_token
        token = cfg.envhub.token if cfg.envhub.url and cfg.envhub.token else token
        save_config(hub_cfg, hub_dir.config)
        with serve_hub(hub_cfg, hub_dir, root=ROOT) as url:
            return _evaluate_at(url, token, cfg, run_dir)


def _evaluate_at(url: str, token: str, cfg: RunConfig, run_dir: RunDir) -> int:
    from actor.play.evaluate import fetch_task_lists, run
    from common.config.evaluation import EvalItems
    from learner.scheduler.curriculum.catalogue import fetch_catalogue, validate_tasks
    from learner.scheduler.evaluation.heldout import choose_items

    catalogue = fetch_catalogue(url, token=token, timeout_s=cfg.actor.env_timeout_s)
    validate_tasks(cfg.tasks, catalogue)
    by_task = cfg.eval.items is EvalItems.TASKS
    lists = fetch_task_lists(cfg, hub_url=url, token=token) if by_task else {}
    items = choose_items(cfg, catalogue, lists)
    return run(cfg, run_dir, items, hub_url=url, token=token, say=print)


def be_role(name: str, cfg: RunConfig, run_dir: RunDir) -> int:
    """Run one role in this process until it ends; return the exit code."""
    from common.wire.security import create_keys

    configure_logging(name, cfg.log.level)
    create_keys(run_dir.keys)
    if not run_dir.config.exists():
        save_config(cfg, run_dir.config)
    find_role(name)(cfg, run_dir)
    return 0


def doctor(request: Request) -> int:
    """Print what this machine has and lacks; 1 if anything is lacking."""
    from common.launch.preflight import examine, format_checks
    from envhub.command import examine_environments, missing_for

    config = request.config or DEFAULT_CONFIG
    cfg = load_config(config, ["model.path=unset", *request.overrides], root=ROOT)
    environments = examine_environments(cfg)
    checks = examine(ROOT, config=config, missing=missing_for(cfg), environments=environments)
    print(format_checks(checks))
    return 1 if any(each.remedy and not each.is_optional for each in checks) else 0


def status(cfg: RunConfig, run_dir: RunDir) -> int:
    """Print how a run is doing."""
    from common.dashboard.run_state import state_line

    print(f"{run_dir.root}: {state_line(run_dir, cfg)}")
    return 0


def objective_comment(cfg: RunConfig) -> str:
    """Return what the learner would optimise, as lines of comment below the config."""
    from learner.objective.describe import dead_knobs, objective_text

    lines = [f"objective: {objective_text(cfg.algorithm, cfg.learner)}"]
    lines += [f"warning: {line}" for line in dead_knobs(cfg.algorithm, cfg.learner)]
    return "".join(f"# {line}\n" for line in lines)


def bench(request: Request) -> int:
    """Measure this machine; return 0 if every bound holds."""
    from envhub.bench.suite import SUITES as HUB_SUITES
    from learner.bench.gpu import run_suite as measure_gpu
    from learner.bench.studies import SUITES as STUDIES
    from learner.bench.suite import run_suite as measure_learner
    from learner.scheduler.bench.suite import run_suite as measure_scheduler
    from learner.simulator.bench_tail import run_suite as measure_tail

    suites = {**HUB_SUITES, "learner": measure_learner, "gpu": measure_gpu, **STUDIES}
    suites |= {"scheduler": measure_scheduler, "tail": measure_tail}
    if request.suite not in suites:
        raise ConfigError(f"--suite={request.suite}: one of {', '.join(suites)}")
    configure_logging("bench", "INFO")
    return suites[request.suite](sys.stdout)


def dispatch(request: Request) -> int:
    """Carry out a request; return the exit code."""
    if request.command == "doctor":
        return doctor(request)
    if request.command == "envhub" and not request.is_dry:
        from envhub.hosting.process_memory import use_system_allocator

        use_system_allocator()
    if request.command == "bench":
        return bench(request)
    if request.command == "envs":
        from envhub.command import list_environments

        return list_environments(request.overrides, root=ROOT, say=print)
    if request.command == "envhub" and belongs_to_no_run(request):
        from envhub.command import run_hub

        say = partial(print, flush=True)
        return run_hub(request.overrides, root=ROOT, is_dry=request.is_dry, say=say)
    cfg = load(request)
    if request.is_dry:
        print(f"{config_as_yaml(cfg)}{objective_comment(cfg)}", end="")
        return 0
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    if request.command == "status":
        return status(cfg, run_dir)
    if request.command == "train":
        configure_logging("launcher", cfg.log.level)
        return train(cfg, run_dir)
    if request.command == "sft":
        configure_logging("sft", cfg.log.level)
        return make_policy(cfg, run_dir)
    if request.command == "simulate":
        from learner.simulator.main import run as simulate

        return simulate(cfg, sys.stdout)
    if request.command == "dpo":
        configure_logging("dpo", cfg.log.level)
        return prefer(cfg)
    if request.command == "eval":
        configure_logging("eval", cfg.log.level)
        return evaluate(cfg, run_dir)
    if request.command == "evolve":
        configure_logging("evolve", cfg.log.level)
        return evolve(cfg, run_dir)
    return be_role(request.command, cfg, run_dir)


def main(argv: list[str]) -> int:
    """Return the exit code of the command line."""
    try:
        request = parse(argv, root=ROOT)
        if request.config is not None and Path(request.config).is_file():
            request = Request(
                command=request.command,
                config=str(Path(request.config).resolve()),
                overrides=request.overrides,
                is_dry=request.is_dry,
                suite=request.suite,
            )
        os.chdir(ROOT)
        return dispatch(request)
    except ConfigError as e:
        print(f"error: {' '.join(str(e).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:  # the log, not the terminal, tells what happened to a role
        logging.exception("ended by an error")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
