"""The load-balancing loss of a mixture of experts, by transformers' own function.

Source: Switch Transformer, arXiv:2101.03961, equations 4 to 6, over the tokens of all layers.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from learner.batch.batching import TokenBatch

FUNCTION = "load_balancing_loss_func"
# Names of the number of chosen experts in configurations.
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k")

BalanceLoss = Callable[[tuple[Tensor, ...], TokenBatch], Tensor]


def balance_loss_of(model: PreTrainedModel) -> BalanceLoss:
    """Return a function of (logits [batch * seq, expert] of each layer, block) -> scalar loss.

    Padding and filling do not count. The loss is at least the number of chosen experts, which it
    has if all experts get equally many tokens.

    Raises: ConfigError: transformers has no such loss for this family.
    """
    compute: Any = getattr(sys.modules[type(model).__module__], FUNCTION, None)
    config = model.config
    chosen = next((getattr(config, each) for each in CHOSEN if hasattr(config, each)), None)
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    if compute is None or chosen is None or "router_logits" not in recorded:
        raise ConfigError(
            f"algorithm.router_aux_coef: transformers has no load-balancing loss for"
            f" {type(model).__name__}. Set algorithm.router_aux_coef=0."
        )

    def balance_loss(logits: tuple[Tensor, ...], tokens: TokenBatch) -> Tensor:
        assert tokens.is_real is not None
        mask = tokens.is_real.view(tokens.token_ids.shape)
        return compute(logits, logits[0].shape[-1], chosen, mask)

    return balance_loss
