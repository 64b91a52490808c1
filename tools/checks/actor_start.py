"""Checks of an actor's settings before a run starts. The actor repeats them."""

from actor.engine.arguments import check_engine_args
from actor.formats.checks import check_rendering
from common.config.run_config import RunConfig


def check_actor(cfg: RunConfig) -> None:
    """Check the prompts of the policy and the arguments of its engine.

    Raises: ConfigError: the chat template, `actor.max_model_len` or `actor.engine_args` cannot be
        used.
    """
    check_rendering(cfg)
    check_engine_args(cfg.actor.engine_args)
