"""Laws of unread rows."""

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from common.config.compute import Attention, Layout
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.kernels.attention import use_attention
from learner.policy.kernels.last_layer import skip_unread_rows
from learner.policy.model import flat_hidden
from tests.learner.builders import VOCAB, make_model

LENGTHS, NUM_SCORED = (12, 7, 9), 2  # The last two tokens of each sequence are scored.


def batch() -> TokenBatch:
    sequences = [np.arange(length) * 5 % VOCAB for length in LENGTHS]
    masks = [np.arange(length) >= length - NUM_SCORED for length in LENGTHS]
    return collate_tokens(sequences, masks, device="cpu", is_packed=True)


def rows_computed(part: nn.Module) -> list[int]:
    """Return a list that receives the number of rows of each call of a module."""
    seen: list[int] = []
    part.register_forward_hook(lambda _, args, found: seen.append(found.shape[1]))
    return seen


def test_last_feed_forward_part_computes_only_read_rows() -> None:
    model = make_model()
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    first, last = (rows_computed(layer.mlp.down_proj) for layer in cast(Any, model.model.layers))
    flat_hidden(model.base_model, batch(), autocast=False)
    # Two positions predict a scored token; the end of a sequence is read by a critic.
    assert (first, last) == ([sum(LENGTHS)], [len(LENGTHS) * (NUM_SCORED + 1)])


def test_skipping_unread_rows_changes_no_output_or_gradient() -> None:
    found: list[tuple[Tensor, list[Tensor | None]]] = []
    for is_whole in (True, False):
        model, tokens = make_model(), batch()
        use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
        if is_whole:
            assert tokens.packing is not None
            tokens = replace(tokens, packing=replace(tokens.packing, read_rows=None))
        hidden = flat_hidden(model.base_model, tokens, autocast=False)[tokens.source_rows]
        hidden.square().sum().backward()
        found.append((hidden, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1])


def test_mixture_of_experts_routes_rows_unchanged() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts))
    use_attention([model], "cpu", Layout.PACKED, Attention.PRODUCTS)
    tokens = batch()
    assert tokens.packing is not None
    whole = replace(tokens, packing=replace(tokens.packing, read_rows=None))
    states = [
        flat_hidden(model.base_model, each, autocast=False)[tokens.source_rows]
        for each in (tokens, whole)
    ]
    torch.testing.assert_close(states[0], states[1], atol=1e-6, rtol=0)


def test_prepared_or_unknown_network_is_unchanged() -> None:
    plain = nn.Linear(2, 2)
    model = make_model()
    model.base_model.layers = nn.ModuleList([plain])
    skip_unread_rows(model)
    assert not plain._forward_pre_hooks
    again = make_model()
    for _ in range(2):
        skip_unread_rows(again)
    assert len(cast(Any, again.model.layers)[-1].mlp._forward_hooks) == 1
