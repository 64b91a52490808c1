"""The command line: parse it, look the command up, carry it out. Each lives with its package."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path

try:
    from common.config.command_line import Request, parse
    from common.config.run_config import RunConfig
    from common.errors import ConfigError
    from common.launch import commands
    from common.launch.commands import load_joined, load_named
    from common.log import configure_logging
    from common.repository import ROOT
    from common.store.run_dir import RunDir
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed for {sys.executable}; `make setup` installs all "
        "that is needed, then it is .venv/bin/python run.py, or source .venv/bin/activate first"
    )

# Only the module of the role that is asked for is imported.
ROLES = {
    "envhub": "envhub.main",
    "scheduler": "learner.scheduler.main",
    "learner": "learner.main",
    "actor": "actor.main",
}

_name, _join = partial(load_named, root=ROOT), partial(load_joined, root=ROOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word of the command line that acts on a run's configuration."""

    run: Callable[[RunConfig, RunDir], int]  # returns the exit code
    load: Callable[[Request], RunConfig] = _name
    check: Callable[[RunConfig], None] = lambda _: None  # raises what would stop it later
    has_plan: bool = False  # a dry run shows where the memory goes
    logs_as: str = ""  # the log's name; "": the command logs nothing, or sees to it itself


def _missing(cfg: RunConfig) -> list[str]:
    from envhub.command import missing_for

    return missing_for(cfg)


def _check_training(cfg: RunConfig) -> None:
    from common.checks.preflight import check

    check(cfg, ROOT, missing=_missing(cfg))


def _check_demonstrations(cfg: RunConfig) -> None:
    from common.checks.preflight import check_sft

    check_sft(cfg, ROOT, missing=_missing(cfg))


def _check_pairs(cfg: RunConfig) -> None:
    from common.checks.preflight import check_model

    check_model(cfg.model.path, ROOT)


def _load_evaluation(request: Request) -> RunConfig:
    from actor.play.settings import load_evaluation

    return load_evaluation(request, root=ROOT)


def _check_evaluation(cfg: RunConfig) -> None:
    from actor.play.settings import check_evaluation

    check_evaluation(cfg, ROOT, missing=_missing(cfg))


def _make_policy(cfg: RunConfig, run_dir: RunDir) -> int:
    from actor.play.commands import collect_demonstrations
    from learner.offline.commands import make_policy

    return make_policy(cfg, run_dir, root=ROOT, collect=collect_demonstrations)


def _prefer(cfg: RunConfig, _: RunDir) -> int:
    from learner.offline.commands import prefer

    return prefer(cfg)


def _evolve(cfg: RunConfig, run_dir: RunDir) -> int:
    from actor.play.commands import play_given
    from learner.offline.commands import play_and_imitate

    return play_and_imitate(cfg, run_dir, root=ROOT, play=play_given)


def _evaluate(cfg: RunConfig, run_dir: RunDir) -> int:
    from actor.play.commands import evaluate
    from learner.offline.commands import choose_held_out

    return evaluate(cfg, run_dir, root=ROOT, choose_items=choose_held_out)


def _simulate(cfg: RunConfig, _: RunDir) -> int:
    from learner.simulator.main import run

    return run(cfg, sys.stdout)


def _be_role(name: str, cfg: RunConfig, run_dir: RunDir) -> int:
    return commands.be_role(name, import_module(ROLES[name]).run, cfg, run_dir)


COMMANDS = {
    "train": Command(
        run=partial(commands.train, root=ROOT),
        check=_check_training,
        has_plan=True,
        logs_as="launcher",
    ),
    "sft": Command(run=_make_policy, check=_check_demonstrations, logs_as="sft"),
    "dpo": Command(run=_prefer, check=_check_pairs, logs_as="dpo"),
    "evolve": Command(run=_evolve, check=_check_training, logs_as="evolve"),
    "eval": Command(run=_evaluate, load=_load_evaluation, check=_check_evaluation, logs_as="eval"),
    "simulate": Command(run=_simulate),
    "status": Command(run=commands.status, load=_join),
    **{name: Command(run=partial(_be_role, name), load=_join) for name in ROLES},
}


def _doctor(request: Request) -> int:
    from common.checks.doctor import doctor
    from envhub.command import examine_environments, missing_for

    return doctor(
        request, root=ROOT, missing_for=missing_for, examine_environments=examine_environments
    )


def _list_environments(request: Request) -> int:
    from envhub.command import list_environments

    return list_environments(request.overrides, root=ROOT, say=print)


def _bench(request: Request) -> int:
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


def _help(request: Request) -> int:
    from common.config.help import help_text

    print(help_text(request.overrides), end="")
    return 0


def _serve_environments(request: Request) -> int:
    from envhub.command import run_hub

    say = partial(print, flush=True)
    return run_hub(request.overrides, root=ROOT, is_dry=request.is_dry, say=say)


# Of no run: these read the request themselves.
STANDALONE = {"doctor": _doctor, "envs": _list_environments, "bench": _bench, "help": _help}


def dispatch(request: Request) -> int:
    """Carry out a request; return the exit code."""
    if request.command in STANDALONE:
        return STANDALONE[request.command](request)
    if request.command == "envhub" and not request.is_dry:
        from envhub.hosting.process_memory import use_system_allocator

        use_system_allocator()
    if request.command == "envhub" and commands.belongs_to_no_run(request):
        return _serve_environments(request)
    command = COMMANDS[request.command]
    cfg = command.load(request)
    command.check(cfg)
    if request.is_dry:
        return _show(cfg, has_plan=command.has_plan)
    if command.logs_as:
        configure_logging(command.logs_as, cfg.log.level)
    return command.run(cfg, RunDir(root=ROOT / cfg.run.dir / cfg.run.name))


def _show(cfg: RunConfig, *, has_plan: bool) -> int:
    from common.checks.memory_plan import plan_here, plan_lines
    from learner.objective.describe import dead_knobs, objective_text

    warnings = [f"warning: {line}" for line in dead_knobs(cfg.algorithm, cfg.learner)]
    objective = f"objective: {objective_text(cfg.algorithm, cfg.learner)}"
    plan = plan_lines(plan_here(cfg, ROOT)) if has_plan else []
    return commands.show(cfg, [*plan, objective, *warnings])


def main(argv: list[str]) -> int:
    """Return the exit code of the command line."""
    try:
        request = parse(argv, root=ROOT)
        if request.config is not None and Path(request.config).is_file():
            request = replace(request, config=str(Path(request.config).resolve()))
        os.chdir(ROOT)
        return dispatch(request)
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except Exception:  # the log, not the terminal, tells what happened to a role
        logging.exception("ended by an error")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
