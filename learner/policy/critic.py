"""The critic of PPO: the value of a state is read at the token that predicts the next one."""

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from common.config.learner import CriticKind, CriticSection
from learner.batch.batching import TokenBatch
from learner.policy.loading import is_unloaded, load_network
from learner.policy.model import flat_hidden


class Critic(nn.Module):
    """A value head on the policy's trunk or on its own trunk. All values start at zero."""

    def __init__(self, hidden_size: int, trunk: PreTrainedModel | None) -> None:
        """Make the head; `trunk` is None for a head on the policy."""
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def of_hidden(self, hidden: Tensor) -> Tensor:
        """Return [rows] float32 values of hidden states [rows, hidden]."""
        return self.head(hidden.float()).sum(-1)  # The sum has one entry; FSDP warns about views.

    def hidden(self, tokens: TokenBatch, policy_hidden: Tensor, *, autocast: bool) -> Tensor:
        """Return the head's input states [batch * seq, hidden], of the policy or of its trunk."""
        if self.trunk is None:
            return policy_hidden
        return flat_hidden(self.trunk, tokens, autocast=autocast)


def make_critic(
    cfg: CriticSection, policy: PreTrainedModel, *, policy_path: str, max_tokens: int | None = None
) -> Critic:
    """Return a critic on the policy's device; a trunk without a path starts as `policy_path`.

    If the policy's weights have no memory yet, the trunk's have none either.

    Args:
        max_tokens: length of the longest sequence that an engine may produce; None: the model's own
            limit.
    """
    trunk = None
    if cfg.kind is CriticKind.MODEL:
        trunk = load_network(
            AutoModel,
            cfg.path or policy_path,
            is_skeleton=is_unloaded(policy),
            dtype=torch.float32,
            max_tokens=max_tokens,
        )
    critic = Critic(policy.config.hidden_size, trunk)
    return critic if is_unloaded(policy) else critic.to(next(policy.parameters()).device)
