"""The command line: parse it, look the command up, carry it out. Each lives with its package."""

import gc
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# The libraries make a million objects that stay: to look for cycles among them as often as Python
# does by itself (700) is a fifth of a start, in this process and in those that it spawns.
gc.set_threshold(10_000)
# Where nothing compiled may be kept, each of a run's processes compiles the product for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

try:
    from common.config.command_line import STUDIES, Request, parse, version_text
    from common.config.load import config_as_yaml, without_secrets
    from common.config.run_config import RunConfig
    from common.errors import ConfigError
    from common.launch import commands
    from common.log import configure_logging
    from common.repository import ROOT
    from common.store.run_dir import RunDir
    from common.text import log_text
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed for {sys.executable}; `make setup` installs all "
        "that is needed, then it is .venv/bin/python run.py, or source .venv/bin/activate first"
    )


@dataclass(frozen=True, slots=True)
class Later:
    """A function "module:name" that is imported when it is called: --help loads nothing."""

    where: str

    def find(self) -> Any:
        """Return the function itself, or whatever else has the name."""
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)

    def given(self, **named: Any) -> Callable[..., Any]:
        """Return it with arguments by name, the project's folder as `root` among them."""
        return partial(self, root=ROOT, **named)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.find()(*args, **named)


NAMED, JOINED = (partial(f, root=ROOT) for f in (commands.load_named, commands.load_joined))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One word of the command line that acts on a run's configuration."""

    run: Callable[[RunConfig, RunDir], int]  # returns the exit code
    load: Callable[[Request], RunConfig] = NAMED
    check: Callable[[RunConfig], None] = lambda _: None  # raises what would stop it later
    check_dry: Callable[[RunConfig], None] | None = None  # before a dry run, if it is another
    has_plan: bool = False  # a dry run shows where the memory goes
    logs_as: str = ""  # the log's name; "": the command logs nothing, or sees to it itself


missing_for = Later("envhub.command:missing_for")


def checked_by(where: str, *, is_to_train: bool = True) -> Callable[[RunConfig], None]:
    """Return a check that is also told what the environments lack."""
    return lambda cfg: Later(where)(cfg, ROOT, missing=missing_for(cfg, is_to_train=is_to_train))


def role(where: str) -> Command:
    """Return the command of a process that joins a run."""
    name = where.split(".")[-2]
    run = partial(commands.be_role, name, Later(where))
    return Command(run=run, load=JOINED)


COMMANDS = {
    "train": Command(
        run=partial(commands.train, root=ROOT),
        check=checked_by("common.checks.preflight:check"),
        check_dry=checked_by("common.checks.preflight:check_dry"),
        has_plan=True,
        logs_as="launcher",
    ),
    "sft": Command(
        run=Later("learner.offline.commands:make_policy").given(
            collect=Later("actor.play.demonstrate:demonstrate")
        ),
        check=checked_by("common.checks.preflight:check_sft"),
        logs_as="sft",
    ),
    "dpo": Command(
        run=Later("learner.offline.commands:prefer"),
        check=lambda cfg: Later("common.checks.preflight:check_dpo")(cfg, ROOT),
        logs_as="dpo",
    ),
    "evolve": Command(
        run=Later("learner.offline.commands:play_and_imitate").given(
            play=Later("actor.play.own_process:play_given")
        ),
        check=checked_by("common.checks.preflight:check_evolve"),
        logs_as="evolve",
    ),
    "merge": Command(run=Later("learner.offline.commands:merge"), load=JOINED, logs_as="merge"),
    "eval": Command(
        run=Later("actor.play.evaluate:evaluate").given(
            choose_items=Later("learner.offline.commands:choose_held_out")
        ),
        load=Later("actor.play.settings:load_evaluation").given(),
        check=checked_by("actor.play.settings:check_evaluation", is_to_train=False),
        logs_as="eval",
    ),
    "serve": Command(
        run=Later("actor.play.serve:serve"),
        check=lambda _: Later("common.checks.preflight:check_engine")(),
        logs_as="serve",
    ),
    "simulate": Command(run=lambda cfg, _: Later("learner.simulator.main:run")(cfg, sys.stdout)),
    "status": Command(
        run=commands.status,
        load=Later("common.dashboard.terminal.any_version:load_of_any_version").given(say=print),
    ),
    "envhub": role("envhub.main:run"),
    "scheduler": role("learner.scheduler.main:run"),
    "learner": role("learner.main:run"),
    "actor": role("actor.main:run"),
}


# Those that join from another machine, without the run's directory.
JOINED_ROLES = {"actor": Later("actor.main:run_joined"), "envhub": Later("envhub.main:run_joined")}


in_process: dict[str, Any] = {
    "make_player": Later("actor.bench.in_process:InProcessPlayer"),
    "make_registry": Later("envhub.catalogue.registry:Registry"),
    "make_distances": Later("envhub.catalogue.distances:Distances"),
}
study = Later("learner.bench.study.command:measure").given(**in_process)
peer = Later("learner.bench.study.command:measure_peer").given(**in_process)


def bench(request: Request) -> int:
    """Measure this machine, write the figures as JSON too; return 0 if every bound holds."""
    suites: dict[str, Callable[[Any], None]] = {  # each adds its figures to a BenchTable
        **Later("envhub.bench.suite:SUITES").find(),
        "learner": Later("learner.bench.suite:run_suite"),
        "scheduler": Later("learner.scheduler.bench.suite:run_suite"),
        "transport": Later("learner.ingest.bench.suite:run_suite"),
        "weights": Later("learner.weights.bench.suite:run_suite"),
        "tail": Later("learner.bench.tail:run_suite"),
        "actor": Later("actor.bench.suite:run_suite"),
        "agents": Later("actor.bench.agents:run_suite"),
        "end2end": Later("common.bench.end_to_end:run_suite"),
        "chaos": Later("common.bench.chaos.suite:run_suite"),
        "chaos-short": Later("common.bench.chaos.suite:run_short"),
        "chaos-long": Later("common.bench.chaos.suite:run_long"),
        "hostile": Later("common.bench.hostile.suite:run_suite"),
        "soak-run": Later("common.bench.soak:run_suite"),
        "soak-run-long": Later("common.bench.soak:run_long"),
        "verdict": Later("learner.bench.verdict:run_suite"),
        "dashboard": Later("learner.bench.checks.page:run_suite"),
        "gpu": Later("learner.bench.gpu:run_suite"),
        **{name: partial(study, name, request) for name in STUDIES},
        "peer": partial(peer, request),
    }
    if request.suite not in suites:
        raise ConfigError(f"--suite={request.suite}: one of {', '.join(suites)}")
    path = Path(request.json or ROOT / "runs" / "bench" / f"{request.suite}.json")
    if request.suite not in STUDIES and (request.overrides or request.is_dry):
        asked = " ".join([*request.overrides, *["--dry-run"] * request.is_dry])
        raise ConfigError(f"{asked}: only studies take it ({', '.join(STUDIES)})")
    above = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not (above.is_dir() and os.access(above, os.W_OK)):
        raise ConfigError(f"--json={path}: no file can be written there")
    configure_logging("bench", "INFO")
    table = Later("common.report.bench_table:BenchTable")(out=sys.stdout)
    suites[request.suite](table)
    if request.is_dry:
        return 0
    code: int = table.finish()
    table.save(path, suite=request.suite, product=version_text(ROOT))
    print(f"as JSON: {path}")
    return code


def recompute(request: Request) -> int:
    """Run the command `recompute`; its libraries are told to be quiet before they load."""
    configure_logging("recompute", "WARNING")
    return Later("learner.recompute.command:recompute").given(say=say_now)(request)


say_now = partial(print, flush=True)
# Of no run: these read the request themselves.
STANDALONE: dict[str, Callable[[Request], int]] = {
    "bench": bench,
    "doctor": Later("common.checks.doctor:doctor").given(
        missing_for=missing_for, examine_environments=Later("envhub.command:examine_environments")
    ),
    "recompute": recompute,
    "journal": Later("common.store.journal_command:journal").given(say=print),
    "dashboard": Later("common.dashboard.web.server:dashboard").given(
        say=say_now, make_table=Later("actor.play.table.seats:Table")
    ),
    "show": Later("common.dashboard.terminal.commands:show").given(say=print),
    "report": Later("common.report.command:report").given(say=print),
    "replay": Later("common.dashboard.terminal.commands:replay").given(say=print),
    "envs": lambda request: Later("envhub.command:list_environments")(
        request.overrides, root=ROOT, say=print
    ),
    "new-env": Later("envhub.author.scaffold:new_env").given(say=print),
    "check-env": Later("envhub.author.check_env:check_env").given(say=say_now),
    "play": Later("envhub.author.play:play").given(say=say_now, lines=sys.stdin),
    "revoke": Later("common.launch.keys:revoke_key").given(load=JOINED, say=print),
    "help": lambda request: commands.say(Later("common.config.help:help_text")(request.overrides)),
}


def dispatch(request: Request) -> int:
    """Carry out a request; return the exit code."""
    if request.command in STANDALONE:
        return STANDALONE[request.command](request)
    if request.command == "envhub" and not request.is_dry:
        Later("common.memory:use_system_allocator")()
    if request.command == "learner":  # before it imports torch
        Later("common.memory:take_pinned_memory_exactly")()
    if request.join is not None:
        return commands.join_run(request, JOINED_ROLES[request.command], root=ROOT)
    if request.command == "envhub" and commands.belongs_to_no_run(request):
        serve = Later("envhub.command:run_hub")
        return serve(request.overrides, root=ROOT, is_dry=request.is_dry, say=say_now)
    command = COMMANDS[request.command]
    cfg = command.load(request)
    check = command.check_dry if request.is_dry and command.check_dry else command.check
    check(cfg)
    if request.is_dry:
        return show(cfg, has_plan=command.has_plan)
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    if request.probe is not None:
        return commands.probe(cfg, run_dir, request.probe)
    if command.logs_as:
        configure_logging(command.logs_as, cfg.log.level)
    return command.run(cfg, run_dir)


def show(cfg: RunConfig, *, has_plan: bool) -> int:
    """Print the resolved configuration, the memory plan and the objective; return the exit code."""
    lines: list[str] = []
    if has_plan:
        here = Later("common.checks.preflight:on_this_machine")(cfg)
        lines += Later("common.checks.memory_plan:lines_here")(here, ROOT)
    if has_plan and cfg.launcher == "ray":
        lines += Later("common.launch.ray.cluster:placement_lines")(cfg)
    lines += Later("learner.objective.dead_settings:summary_lines")(cfg.algorithm, cfg.learner)
    lines += cfg.curriculum.warnings(cfg.horizon)
    return commands.say(
        config_as_yaml(without_secrets(cfg)) + "".join(f"# {line}\n" for line in lines)
    )


def main(argv: list[str]) -> int:
    """Return the exit code of the command line."""
    try:
        request = parse(argv, root=ROOT)
        if request.config is not None and os.path.isfile(request.config):
            request = replace(request, config=str(Path(request.config).resolve()))
        if request.key is not None:
            request = replace(request, key=str(Path(request.key).absolute()))
        os.chdir(ROOT)
        return dispatch(request)
    except ConfigError as error:
        print(f"error: {log_text(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception:  # the log, not the terminal, tells what happened to a role
        logging.exception("ended by an error")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
