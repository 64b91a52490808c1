"""Checks of the actors' and the learner's settings before a run starts. The roles repeat them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from actor.engine.arguments import check_engine_args
from actor.formats.checks import check_rendering
from common.config.algorithm import Advantage
from common.config.learner import Attention, CriticKind, Layout, LearnerSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from common.segments import RoutingShape
from common.user_code import load_function
from common.wire.access.bounds import MAX_FRAME_BYTES
from learner.algorithms import table
from learner.algorithms.trees import formula as tree_formula
from learner.ingest.group_rewards import check_group_rewards, load_group_rewards
from learner.policy.model_kind import is_composite_in
from scheduler.curriculum.user_functions import check_user_functions, user_functions


def check_actor(cfg: RunConfig) -> None:
    """Check the prompts of the policy and the arguments of its engine.

    Raises: ConfigError: the chat template, `actor.max_model_len` or `actor.engine_args` cannot be
        used.
    """
    check_rendering(cfg)
    check_engine_args(cfg.actor.engine_args)


def check_functions(cfg: RunConfig) -> None:
    """Load the user's functions of the curriculum, the filter and the rewards of groups.

    Raises: ConfigError: one cannot be loaded or called, returns a wrong value, or lacks a package.
    """
    check_user_functions(cfg)
    if cfg.groups.filter:
        from learner.algorithms.user_functions import user_filter  # It imports torch.

        user_filter(cfg.groups)
    check_group_rewards(cfg.groups)


def function_lines(cfg: RunConfig) -> list[str]:
    """Return the lines of the printed objective about the user's other functions."""
    functions = user_functions(cfg)
    if cfg.groups.filter:
        functions.append(load_function("groups.filter", cfg.groups.filter))
    functions += [load_function("log.to", name) for name in cfg.log.to if ":" in name]
    rewards = load_group_rewards(cfg.groups)
    formulas = [rewards.formula] if rewards is not None else []
    if cfg.groups.forks:
        formulas.append(tree_formula(cfg.groups))
    return [f"objective: {text}" for text in (*formulas, *(user.note for user in functions))]


def check_networks(cfg: RunConfig, *, is_offline: bool = False) -> None:
    """Check that the networks support the settings that the configuration sets explicitly.

    The networks are built without weights, and only if there is such a setting or a model for more
    than text: importing torch takes seconds.

    Args:
        is_offline: the run loads no separate critic or reference.

    Raises: ConfigError: a model does not support a setting; names the key and the remedy.
    """
    if not is_offline:
        table.check(cfg.algorithm, min_size=cfg.groups.min_size)
    has_routers = not is_offline and bool(
        cfg.algorithm.routing_replay or cfg.algorithm.router_aux_coef
    )
    is_mixed = any(is_composite_in(ROOT / path) for path in _paths(cfg, is_offline=is_offline))
    if not (has_routers or is_mixed or _has_own_settings(cfg.learner)):
        return
    from learner.policy.expert_ranks import check_expert_ranks
    from learner.policy.kernels.attention import check_attention, check_sequence_ranks
    from learner.policy.kernels.compiling import check_parts
    from learner.policy.lora import add_adapters
    from learner.policy.model import make_bare

    networks = [make_bare(str(ROOT / path)) for path in _paths(cfg, is_offline=is_offline)]
    check_attention(networks, cfg.learner.layout, cfg.learner.attention)
    if cfg.learner.sequence_ranks > 1 and not is_offline:
        check_sequence_ranks(networks, cfg.learner.sequence_ranks)
    if cfg.learner.expert_ranks > 1 and not is_offline:
        check_expert_ranks(networks, cfg.learner.expert_ranks)
    if cfg.learner.compile:
        check_parts(networks)
    if has_routers:
        _check_routers(cfg, networks[0])
    if cfg.learner.lora.rank:
        add_adapters(networks[0], cfg.learner.lora, base_path=cfg.model.path)


def _check_routers(cfg: RunConfig, policy: Any) -> None:
    """Check that the policy has routers for the algorithm. Raises: ConfigError."""
    from learner.policy.expert_routing import balance_loss_of, install
    from learner.policy.kernels.head import trunk_of

    if cfg.algorithm.router_aux_coef:
        balance_loss_of(policy)
    if cfg.algorithm.routing_replay:
        trunk = trunk_of(policy)
        routing = install(trunk).shape
        # Configurations of some models do not have the number. Each token has at least one.
        num_chosen = getattr(trunk.config, "num_experts_per_tok", 1)
        check_record(replace(routing, num_chosen=num_chosen), cfg.actor.max_model_len)


def check_record(routing: RoutingShape, max_model_len: int) -> None:
    """Check that a message can hold the experts of a full context. Raises: ConfigError."""
    bytes_per_id = 1 if routing.num_experts <= 256 else 2
    bytes_per_token = routing.num_layers * routing.num_chosen * bytes_per_id
    max_tokens = MAX_FRAME_BYTES // bytes_per_token
    if max_model_len > max_tokens:
        raise ConfigError(
            f"actor.max_model_len={max_model_len}: with algorithm.routing_replay=true the experts"
            f" of a token take {bytes_per_token:,} bytes, and a message to the learner holds those"
            f" of {max_tokens} tokens. Use at most actor.max_model_len={max_tokens}, or"
            " algorithm.routing_replay=false."
        )


def _has_own_settings(learner: LearnerSection) -> bool:
    """Return whether the configuration sets a layout, ranks, kernels or adapters explicitly."""
    is_kernel_chosen = learner.attention is not Attention.AUTO
    is_packed = learner.layout is Layout.PACKED or learner.sequence_ranks > 1
    is_divided = is_packed or learner.expert_ranks > 1
    return is_divided or is_kernel_chosen or learner.compile or bool(learner.lora.rank)


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
