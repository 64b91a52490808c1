"""Checks of the learner's networks before a run starts. The learner repeats them."""

from collections.abc import Iterator
from pathlib import Path

from common.config.compute import Attention, CriticKind, Layout
from common.config.learning import Advantage, LearnerSection
from common.config.run_config import RunConfig
from common.errors import ConfigError


def check_networks(cfg: RunConfig, root: Path, *, is_offline: bool = False) -> None:
    """Check that the networks support the settings that the configuration sets explicitly.

    The networks are built without weights, and only if there is such a setting: importing torch
    takes seconds.

    Args:
        is_offline: the run loads no separate critic or reference.

    Raises: ConfigError: a model does not support a setting; names the key and the remedy.
    """
    if not _asks_for_something(cfg.learner):
        return
    from learner.policy.kernels.attention import check_attention
    from learner.policy.kernels.compiling import check_parts
    from learner.policy.lora import add_adapters
    from learner.policy.model import make_bare

    networks = [make_bare(str(root / path)) for path in _paths(cfg, is_offline=is_offline)]
    check_attention(networks, cfg.learner.layout, cfg.learner.attention)
    if cfg.learner.compile:
        check_parts(networks)
    if cfg.learner.lora.rank:
        add_adapters(networks[0], cfg.learner.lora, base_path=cfg.model.path)


def _asks_for_something(learner: LearnerSection) -> bool:
    is_kernel_chosen = learner.attention is not Attention.AUTO
    is_packed = learner.layout is Layout.PACKED
    return is_packed or is_kernel_chosen or learner.compile or bool(learner.lora.rank)


def _paths(cfg: RunConfig, *, is_offline: bool) -> Iterator[str]:
    """Yield the folders of the distinct networks, the policy's first."""
    yield cfg.model.path
    if is_offline:
        return
    if cfg.algorithm.kl_coef and cfg.algorithm.reference_path:
        yield cfg.algorithm.reference_path
    has_critic = cfg.algorithm.advantage is Advantage.PPO
    if has_critic and cfg.learner.critic.kind is CriticKind.MODEL and cfg.learner.critic.path:
        yield cfg.learner.critic.path


def check_sft(cfg: RunConfig, root: Path) -> None:
    """Check that `sft` can train. Raises: ConfigError: as `check_networks`."""
    if not cfg.sft.from_scratch:
        check_networks(cfg, root, is_offline=True)
    elif cfg.learner.lora.rank:
        raise ConfigError(
            f"learner.lora.rank={cfg.learner.lora.rank}: sft.from_scratch=true makes a policy"
            " without a base model for adapters. Set learner.lora.rank=0 or sft.from_scratch=false."
        )


def check_offline(cfg: RunConfig, root: Path) -> None:
    """Check that `dpo` or `evolve` can train. Raises: ConfigError: as `check_networks`."""
    check_networks(cfg, root, is_offline=True)
