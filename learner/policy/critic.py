"""The critic of PPO: values of states, advantages and targets over turns.

The state of a sampled token is all that came before it, so its value is read where the token is
predicted. Observation tokens have no value of their own: from one turn to the next, or from one
sampled token to the next, they are passed through.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from common.config.learning import (
    AlgorithmSection,
    CriticKind,
    CriticSection,
    CriticTargets,
    Timestep,
)
from common.wire.messages import EndReason, Trajectory
from learner.batch.batching import Sample, TokenBatch
from learner.batch.credit import turn_rewards
from learner.batch.returns import gae, vtrace
from learner.policy.model import flat_hidden

CUT_SHORT = (EndReason.HORIZON, EndReason.CONTEXT_FULL)  # the task would have gone on


class Critic(nn.Module):
    """A value head, on the policy's trunk or on a trunk of its own. Starts at zero everywhere."""

    def __init__(self, hidden_size: int, trunk: PreTrainedModel | None) -> None:
        """Make the head; `trunk` is None for a head on the policy."""
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Return [rows] float32 values of hidden states [rows, hidden]."""
        return self.head(hidden.float()).squeeze(-1)

    def hidden(self, tokens: TokenBatch, policy_hidden: Tensor | None, *, autocast: bool) -> Tensor:
        """Return the hidden states [batch * seq, hidden] that the head reads.

        Args:
            policy_hidden: the policy's own; used if the head sits on its trunk.
        """
        if self.trunk is not None:
            return flat_hidden(self.trunk, tokens, autocast=autocast)
        assert policy_hidden is not None
        return policy_hidden


def make_critic(cfg: CriticSection, policy: PreTrainedModel, *, policy_path: str) -> Critic:
    """Return a critic on the policy's device, its trunk loaded by path if it has its own.

    Args:
        policy_path: the checkpoint that a trunk without a path starts from.
    """
    trunk = None
    if cfg.kind is CriticKind.MODEL:
        path = cfg.path or policy_path
        trunk = AutoModel.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        )
        trunk.train()
    critic = Critic(policy.config.hidden_size, trunk)
    return critic.to(next(policy.parameters()).device)


def with_advantages(
    sample: Sample,
    *,
    values: np.ndarray,
    bootstrap: float,
    log_ratios: np.ndarray | None,
    algorithm: AlgorithmSection,
    critic: CriticSection,
) -> Sample:
    """Return the sample with the advantages and value targets of its sampled tokens.

    Args:
        values: [tokens] float32 of the states before each sampled token.
        bootstrap: value of the state at the very end; used only if the episode was cut short.
        log_ratios: [tokens] nats of pi / mu, needed by V-trace.

    Raises:
        ValueError: V-trace without log_ratios.
    """
    trajectory = sample.trajectory
    steps = timesteps(trajectory, critic.timestep)  # [tokens] index of each token's timestep
    first = np.flatnonzero(np.diff(steps, prepend=-1))  # [step] the token a timestep begins with
    rewards = torch.from_numpy(step_rewards(trajectory, algorithm, critic.timestep)).double()
    states = torch.from_numpy(values[first]).double()
    ending = bootstrap if trajectory.end_reason in CUT_SHORT else 0.0
    is_turn = critic.timestep is Timestep.TURN
    discount = algorithm.turn_discount if is_turn else 1.0
    if critic.targets is CriticTargets.VTRACE:
        if log_ratios is None:
            raise ValueError("V-trace needs log_ratios")
        summed = np.bincount(steps, weights=log_ratios.astype(np.float64))  # [step]
        targets, advantages = vtrace(
            rewards,
            states,
            torch.from_numpy(summed),
            discount=discount,
            trace=critic.gae_lambda,
            max_rho=critic.vtrace_rho,
            max_c=critic.vtrace_c,
            bootstrap=ending,
        )
    else:
        advantages = gae(
            rewards, states, discount=discount, trace=critic.gae_lambda, bootstrap=ending
        )
        targets = advantages + states
    return replace(
        sample,
        own_advantages=advantages.numpy().astype(np.float32)[steps],
        value_targets=targets.numpy().astype(np.float32)[steps],
        values=values.astype(np.float32),
        state_marks=(np.diff(steps, prepend=-1) != 0).astype(np.float32),
    )


def timesteps(trajectory: Trajectory, kind: Timestep) -> np.ndarray:
    """Return the 0-based timestep of every sampled token, [tokens] int64."""
    if kind is Timestep.TOKEN:
        return np.arange(int(trajectory.loss_mask.sum()))
    turns = trajectory.turn_ids[trajectory.loss_mask]
    return np.unique(turns, return_inverse=True)[1].astype(np.int64)


def step_rewards(trajectory: Trajectory, algorithm: AlgorithmSection, kind: Timestep) -> np.ndarray:
    """Return what every timestep was paid, [step] float32.

    A turn's pay lies on its last sampled token: on an action, whatever follows it. A turn in which
    nothing was sampled passes its pay on to the last turn before it, else after it, that did.
    """
    per_turn = turn_rewards(trajectory, algorithm)
    turns = trajectory.turn_ids[trajectory.loss_mask]  # [tokens]
    present, last_from_end = np.unique(turns[::-1], return_index=True)
    last = len(turns) - 1 - last_from_end  # [turn present] last sampled token of it
    owner = np.maximum(np.searchsorted(present, np.arange(len(per_turn)), side="right") - 1, 0)
    paid = np.bincount(owner, weights=per_turn, minlength=len(present)).astype(np.float32)
    if kind is Timestep.TURN:
        return paid
    rewards = np.zeros(len(turns), dtype=np.float32)
    rewards[last] = paid
    return rewards
