"""The command `train`: it checks a run, starts all roles and supervises them."""

import logging
from dataclasses import replace

from common.config.run_config import RunConfig
from common.errors import TrialFailed
from common.log import configure_logging, kept_in
from tools.cli import requested
from tools.cli.command_line import Command, ParsedCommand

logger = logging.getLogger(__name__)


def run(request: ParsedCommand) -> int:
    cfg = requested.load_with_model(request)
    if request.is_dry:
        _check_dry(cfg)
        return requested.show_config(cfg, request.command, has_plan=True)
    cfg = _checked(cfg)
    run_dir = requested.directory_of(cfg)
    configure_logging("launcher", cfg.log.level)
    loggers = (__name__, requested.__name__, "actor.formats", "tools.author")
    with kept_in(run_dir.logs / "launcher.log", *loggers):
        requested.log_weights(cfg)
        try:
            _try_episodes(cfg)
        except TrialFailed as error:
            logger.error("the run does not start: %s", error)
            raise
    from tools.launch.train import train

    return train(cfg, run_dir)


def _checked(cfg: RunConfig) -> RunConfig:
    """Check a run; return its config with the memory for activations on this machine."""
    from tools.checks import memory_plan, preflight
    from tools.checks.environments import missing_for

    preflight.check(cfg, missing=missing_for(cfg))
    _check_roles(cfg)
    budget = memory_plan.settle_activations(preflight.on_this_machine(cfg)).learner.activation_gib
    return replace(cfg, learner=replace(cfg.learner, activation_gib=budget))


def _check_dry(cfg: RunConfig) -> None:
    """Check a run that may be for another machine: ignore the requirements that this one lacks."""
    from tools.checks import preflight
    from tools.checks.environments import examine

    lacking, mistakes = examine(cfg)
    preflight.check_dry(cfg, missing=lacking, mistakes=mistakes)
    _check_roles(cfg)
    _try_episodes(cfg)


def _check_roles(cfg: RunConfig) -> None:
    """Run the start checks of an actor and of the learner before these roles start."""
    from tools.checks.environments import check_prompts
    from tools.checks.role_starts import check_actor, check_functions, check_networks

    check_functions(cfg)
    check_actor(cfg)
    check_prompts(cfg)
    check_networks(cfg)


def _try_episodes(cfg: RunConfig) -> None:
    """Play the begin of an episode of each task, and render its first prompt.

    Raises: TrialFailed: an episode failed. ConfigError: the chat template refuses a prompt.
    """
    from actor.formats import checks
    from tools.author.trial import try_episodes

    checks.check_prompts(cfg, try_episodes(cfg))


COMMAND = Command(
    run=run,
    text="train (the default command): start and supervise all roles, write the report",
    sections="run train model tasks horizon groups algorithm learner actor scheduler envhub"
    " log ray",
    example="--config quickstart run.name=a train.num_steps=20 learner.lr=3e-4",
)
