"""The command line: parse it, find the command, and run it.

Each command is a plain function here. It imports its implementation when it is called, so that
`--help` loads no heavy library.
"""

import gc
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Libraries allocate a million lasting objects. Python's own threshold (700) slows a start by 20 %.
gc.set_threshold(10_000)

try:
    from common.config.load import config_as_yaml, without_secrets
    from common.config.run_config import Launcher, RunConfig
    from common.errors import ConfigError, NotStarted, TrialFailed
    from common.host.loopback import keep_loopback_direct
    from common.host.process_settings import complete_process_settings, start_with_plain_settings
    from common.log import configure_logging, kept_in
    from common.memory import choose_allocators
    from common.repository import ROOT
    from common.store.run_dir import RunDir
    from common.text import log_text
    from tools.cli import requested
    from tools.cli.command_line import ParsedCommand, parse
    from tools.launch import commands
    from tools.launch.base import EXIT_FAILED, EXIT_NOT_STARTED
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed for {sys.executable}. `make setup` installs all"
        " requirements. Then use .venv/bin/python run.py, or run source .venv/bin/activate first."
    )

if TYPE_CHECKING:
    from actor.policy import PolicyConfig
    from common.join.enrol import Joined
    from tools.evaluate.config import EvalConfig
    from tools.launch.base import RoleStarter
    from tools.offline.config import DpoConfig, EvolveConfig, SftConfig
    from tools.simulator.config import SimulatorConfig

EXIT_OUTPUT_CLOSED = 141  # The code of a program that SIGPIPE ends.

logger = logging.getLogger(__name__)
print_now = partial(print, flush=True)
load_without_model = requested.load_named
load_named = commands.load_with_model
load_joined = requested.load_joined


# Commands that work on a run's configuration and directory.


def start_roles(cfg: RunConfig, run_dir: RunDir) -> AbstractContextManager["RoleStarter"]:
    if cfg.launcher is Launcher.RAY:
        from tools.launch.ray.cluster import start_on_ray

        return start_on_ray(cfg, run_dir)
    from tools.launch.local import start_here

    return start_here(run_dir)


def train(cfg: RunConfig, run_dir: RunDir) -> int:
    from tools.dashboard.terminal.training import TerminalObserver

    with kept_in(run_dir.logs / "launcher.log", __name__, "actor.formats", "tools.author"):
        try:
            try_episodes(cfg)
        except TrialFailed as error:
            logger.error("the run does not start: %s", error)
            raise
    observer = TerminalObserver(cfg, run_dir)
    return commands.train(cfg, run_dir, start_roles=start_roles, observer=observer)


def status(cfg: RunConfig, run_dir: RunDir) -> int:
    from tools.dashboard.terminal import training

    return training.status(cfg, run_dir)


def sft(cfg: "SftConfig", run_dir: RunDir) -> int:
    from tools.offline.commands import make_policy
    from tools.offline.demonstrate import demonstrate

    return make_policy(cfg, run_dir, collect=demonstrate)


def dpo(cfg: "DpoConfig", run_dir: RunDir) -> int:
    from tools.offline.commands import prefer

    return prefer(cfg, run_dir)


def evolve(cfg: "EvolveConfig", run_dir: RunDir) -> int:
    from tools.evaluate.own_process import play_given
    from tools.offline.commands import play_and_imitate

    return play_and_imitate(cfg, run_dir, play=play_given)


def merge(cfg: RunConfig, run_dir: RunDir) -> int:
    from tools.offline import commands as offline

    return offline.merge(cfg, run_dir)


def evaluate(cfg: "EvalConfig", run_dir: RunDir) -> int:
    from tools.evaluate import evaluate as player
    from tools.offline.commands import choose_held_out

    return player.evaluate(cfg, run_dir, choose_items=choose_held_out)


def serve(cfg: "PolicyConfig", run_dir: RunDir) -> int:
    from actor.api import serve as server

    return server.serve(cfg, run_dir)


def simulate(cfg: "SimulatorConfig", run_dir: RunDir) -> int:
    from tools.simulator.main import run

    return run(cfg, sys.stdout)


# Roles that join a run.


def run_envhub(cfg: RunConfig, run_dir: RunDir) -> None:
    from envhub.main import run

    run(cfg, run_dir)


def run_scheduler(cfg: RunConfig, run_dir: RunDir) -> None:
    from scheduler.main import run

    run(cfg, run_dir)


def run_learner(cfg: RunConfig, run_dir: RunDir) -> None:
    from learner.main import run
    from tools.report.wandb_views import make_sink

    run(cfg, run_dir, make_sink=make_sink)


def run_actor(cfg: RunConfig, run_dir: RunDir) -> None:
    from actor.main import run

    run(cfg, run_dir)


def join_actor(cfg: RunConfig, joined: "Joined") -> None:
    from actor.main import run_joined

    run_joined(cfg, joined)


def join_envhub(cfg: RunConfig, joined: "Joined") -> None:
    from envhub.main import run_joined

    run_joined(cfg, joined)


def join_learner(cfg: RunConfig, joined: "Joined") -> None:
    from learner.node import run_joined

    run_joined(cfg, joined)


# A role imports its libraries after its checks, inside the guard that classifies a failed start.
JOINED_ROLES = {"actor": join_actor, "envhub": join_envhub, "learner": join_learner}


# Checks that a command makes before anything starts.


def missing_for(cfg: RunConfig, *, is_to_train: bool = True) -> list[str]:
    from tools.checks import environments as command

    return command.missing_for(cfg, is_to_train=is_to_train)


def check_train(cfg: RunConfig) -> None:
    from tools.checks import preflight

    preflight.check(cfg, missing=missing_for(cfg))
    check_roles(cfg)


def check_roles(cfg: RunConfig) -> None:
    """Run the start checks of an actor and of the learner before these roles start."""
    from tools.checks.actor_start import check_actor
    from tools.checks.learner_start import check_networks

    check_actor(cfg)
    check_prompts(cfg)
    check_networks(cfg)


def check_prompts(cfg: RunConfig) -> str:
    """Check that first prompts fit into the context; return a sentence about their lengths."""
    from actor.formats import checks
    from tools.checks.environments import first_prompts

    return checks.check_prompts(cfg, first_prompts(cfg))


def try_episodes(cfg: RunConfig) -> None:
    """Play the begin of an episode of each task, and render its first prompt.

    Raises: TrialFailed: an episode failed. ConfigError: the chat template refuses a prompt.
    """
    from actor.formats import checks
    from tools.author.trial import try_episodes

    checks.check_prompts(cfg, try_episodes(cfg))


def check_train_dry(cfg: RunConfig) -> None:
    """Check a run that may be for another machine: ignore the requirements that this one lacks."""
    from tools.checks import preflight
    from tools.checks.environments import examine

    lacking, mistakes = examine(cfg)
    preflight.check_dry(cfg, missing=lacking, mistakes=mistakes)
    check_roles(cfg)
    try_episodes(cfg)


def check_sft(cfg: "SftConfig") -> None:
    from tools.offline import checks

    checks.check_sft(cfg, missing=missing_for(cfg))


def check_dpo(cfg: "DpoConfig") -> None:
    from tools.offline import checks

    checks.check_dpo(cfg)


def check_evolve(cfg: "EvolveConfig") -> None:
    from tools.checks.actor_start import check_actor
    from tools.offline import checks

    checks.check_evolve(cfg, missing=missing_for(cfg))
    check_actor(cfg)
    check_prompts(cfg)


def check_evaluation(cfg: "EvalConfig") -> None:
    from tools.checks import preflight
    from tools.evaluate import settings

    settings.check_evaluation(cfg, missing=missing_for(cfg, is_to_train=False))
    preflight.warn_of_unread_keys(cfg)
    if not cfg.policy.url:
        check_prompts(cfg)


def check_engine(cfg: "PolicyConfig") -> None:
    from tools.evaluate.settings import check_own_engine

    check_own_engine(cfg)


def load_evaluation(request: ParsedCommand) -> RunConfig:
    from tools.evaluate import settings

    return settings.load_evaluation(request)


def load_sft(request: ParsedCommand) -> "SftConfig":
    from tools.offline.checks import check_model_is_used

    cfg: SftConfig = load_named(request)
    check_model_is_used(request, cfg)
    return cfg


def load_any_version(request: ParsedCommand) -> RunConfig:
    from tools.dashboard.terminal.any_version import load_of_any_version

    return load_of_any_version(request, echo=print)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that works on a run's configuration and directory."""

    run: Callable[[Any, RunDir], int]  # It returns the exit code.
    load: Callable[[ParsedCommand], RunConfig] = load_named
    check: Callable[[Any], None] | None = None  # It raises ConfigError before the start.
    check_dry: Callable[[RunConfig], None] | None = None  # The check of `--dry-run`, if different.
    has_plan: bool = False  # `--dry-run` prints the memory plan.
    log_name: str = ""  # Name in the log; empty for a command that configures its own logging.
    # Whether the run directory stores the date in all prompts. None: the command sets no date.
    keeps_date: bool | None = None


COMMANDS = {
    "train": Command(
        run=train, check=check_train, check_dry=check_train_dry, has_plan=True, log_name="launcher"
    ),
    "sft": Command(run=sft, load=load_sft, check=check_sft, log_name="sft", keeps_date=True),
    "dpo": Command(run=dpo, check=check_dpo, log_name="dpo", keeps_date=False),
    "evolve": Command(run=evolve, check=check_evolve, log_name="evolve", keeps_date=True),
    "merge": Command(run=merge, load=load_joined, log_name="merge"),
    "eval": Command(
        run=evaluate, load=load_evaluation, check=check_evaluation, log_name="eval", keeps_date=True
    ),
    "serve": Command(run=serve, check=check_engine, log_name="serve", keeps_date=False),
    "simulate": Command(run=simulate, load=load_without_model),
    "status": Command(run=status, load=load_any_version),
    "envhub": Command(run=partial(commands.be_role, "envhub", run_envhub), load=load_joined),
    "scheduler": Command(
        run=partial(commands.be_role, "scheduler", run_scheduler), load=load_joined
    ),
    "learner": Command(run=partial(commands.be_role, "learner", run_learner), load=load_joined),
    "actor": Command(run=partial(commands.be_role, "actor", run_actor), load=load_joined),
}


# Commands that read the request themselves, because they belong to no run or to many.


def bench(request: ParsedCommand) -> int:
    if not (ROOT / "benchmarks").is_dir():
        raise ConfigError(
            f"bench: {ROOT / 'benchmarks'} is missing. The benchmarks are not part of an"
            " installation. Run this command from a checkout of the repository."
        )
    from benchmarks import command

    return command.bench(request)


def doctor(request: ParsedCommand) -> int:
    from tools.checks.environments import examine_environments
    from tools.checks.preview import preview_lines
    from tools.cli import doctor as checks

    own = {"missing_for": missing_for, "examine_environments": examine_environments}
    return checks.doctor(request, preview=preview_lines, **own)


def recompute(request: ParsedCommand) -> int:
    configure_logging("recompute", "WARNING")  # Libraries read the level when they are imported.
    from tools.recompute import command

    return command.recompute(request, echo=print_now)


def journal(request: ParsedCommand) -> int:
    from tools.cli import journal as journal_command

    return journal_command.journal(request, echo=print)


def dashboard(request: ParsedCommand) -> int:
    from tools.dashboard.interactive import InteractiveEpisodes
    from tools.dashboard.web import server

    return server.dashboard(request, echo=print_now, make_table=InteractiveEpisodes)


def show_or_replay(request: ParsedCommand) -> int:
    from tools.dashboard.terminal import commands as terminal

    command = terminal.show if request.command == "show" else terminal.replay
    return command(request, echo=print)


def report(request: ParsedCommand) -> int:
    from tools.report import command

    return command.report(request, echo=print)


def envs(request: ParsedCommand) -> int:
    from tools.cli.envs import list_environments

    return list_environments(request.overrides, echo=print)


def author(request: ParsedCommand) -> int:
    from tools.author import check_env, play, scaffold

    if request.command == "new-env":
        return scaffold.new_env(request, echo=print)
    if request.command == "check-env":
        return check_env.check_env(request, echo=print_now, check_prompts=check_prompts)
    return play.play(request, echo=print_now, lines=sys.stdin)


def gather(request: ParsedCommand) -> int:
    from tools.offline import gather as gathering

    return gathering.gather(request, load=load_joined, echo=print_now)


def set_or_revoke(request: ParsedCommand) -> int:
    from tools.cli.revoke import revoke_key
    from tools.cli.set import set_keys

    command = set_keys if request.command == "set" else revoke_key
    return command(request, load=load_joined, echo=print_now)


def help_on(request: ParsedCommand) -> int:
    from tools.cli.help import help_text

    return commands.echo(help_text(request.overrides))


STANDALONE: dict[str, Callable[[ParsedCommand], int]] = {
    "bench": bench,
    "doctor": doctor,
    "recompute": recompute,
    "journal": journal,
    "dashboard": dashboard,
    "show": show_or_replay,
    "report": report,
    "replay": show_or_replay,
    "envs": envs,
    "new-env": author,
    "check-env": author,
    "play": author,
    "gather": gather,
    "set": set_or_revoke,
    "revoke": set_or_revoke,
    "help": help_on,
}


def dispatch(request: ParsedCommand) -> int:
    """Run the command of a request and return the exit code."""
    if request.command in STANDALONE:
        return STANDALONE[request.command](request)
    choose_allocators(request.command, is_dry=request.is_dry)
    if request.join is not None:
        return commands.join_run(request, JOINED_ROLES[request.command])
    if request.command == "envhub" and requested.belongs_to_no_run(request):
        from tools.checks.environments import run_hub

        return run_hub(request.overrides, is_dry=request.is_dry, echo=print_now)
    return run_command(COMMANDS[request.command], request)


def run_command(command: Command, request: ParsedCommand) -> int:
    """Load the configuration, check it, and run the command or show it; return the exit code."""
    cfg = commands.on_loopback(command.load(request))
    check = command.check_dry if request.is_dry and command.check_dry else command.check
    if check is not None:
        check(cfg)
    if request.is_dry:
        return show_config(cfg, request.command, has_plan=command.has_plan)
    run_dir = RunDir(root=ROOT / cfg.run.dir / cfg.run.name)
    if request.probe is not None:
        from tools.dashboard.terminal.training import probe

        return probe(cfg, run_dir, request.probe)
    if command.log_name:
        configure_logging(command.log_name, cfg.log.level)
    if command.keeps_date is not None:
        return commands.with_date(command.run, cfg, run_dir, is_kept=command.keeps_date)
    return command.run(cfg, run_dir)


def show_config(cfg: RunConfig, command: str, *, has_plan: bool) -> int:
    """Print the resolved configuration, memory plan, precision and objective; return exit code."""
    from learner.objective.description import summary_lines
    from tools.offline.checks import rate_lines

    lines = memory_lines(cfg) if has_plan else []
    lines += rate_lines(command, cfg)
    if command not in ("sft", "dpo", "evolve"):  # They have objectives of their own.
        lines += summary_lines(cfg.algorithm, cfg.learner)
        lines += cfg.curriculum.warnings(cfg.horizon)
    return commands.echo(
        config_as_yaml(without_secrets(cfg)) + "".join(f"# {line}\n" for line in lines)
    )


def memory_lines(cfg: RunConfig) -> list[str]:
    """Return the memory plan of a run, its placement on a Ray cluster, and a conversation."""
    from tools.checks import memory_plan, preflight
    from tools.checks.preview import preview_lines

    lines = memory_plan.lines_here(preflight.on_this_machine(cfg))
    if cfg.launcher == "ray":
        from tools.launch.ray.cluster import placement_lines

        lines += placement_lines(cfg)
    return [*lines, *preview_lines(cfg)]


def has_lost_output() -> bool:
    """Return whether the reader of the output, such as `head`, has ended; drop further output."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    if not any(events & select.POLLERR for _, events in poller.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def main(argv: list[str]) -> int:
    """Return the exit code of the command line."""
    try:
        request = parse(argv)
        if request.config is not None and os.path.isfile(request.config):
            request = replace(request, config=str(Path(request.config).resolve()))
        if request.key is not None:
            request = replace(request, key=str(Path(request.key).absolute()))
        complete_process_settings(os.environ)
        os.chdir(ROOT)
        keep_loopback_direct()
        return dispatch(request)
    except ConfigError as error:
        print(f"error: {log_text(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except TrialFailed as error:
        print(f"error: {log_text(' '.join(str(error).split()))}", file=sys.stderr)
        return EXIT_FAILED
    except NotStarted as error:
        logging.exception("the process ended before its start was complete")
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NOT_STARTED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not has_lost_output():
            logging.exception("the process ended with an error")
            return EXIT_FAILED
        return EXIT_OUTPUT_CLOSED
    except Exception:  # The only broad handler of a role: its log holds the traceback.
        logging.exception("the process ended with an error")
        return 1


if __name__ == "__main__":
    start_with_plain_settings()
    exit_code = main(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        exit_code = EXIT_OUTPUT_CLOSED if has_lost_output() else EXIT_FAILED
    sys.exit(exit_code)
