"""The arithmetic of a training step, and the rate of matrix products on a device."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from benchmarks.learner.step import clock_of

NUM_PRODUCTS = 20


def step_flops(model: PreTrainedModel, lengths: Sequence[int], num_scored: int) -> float:
    """Return the minimum floating-point operations of a forward and backward pass.

    The forward pass needs two operations per weight and token. The backward pass needs two for the
    gradient of the inputs and, for trained weights, two for that of the weights. The head is
    counted for scored tokens only, the embedding not at all, and attention for causal pairs.
    Recomputation (checkpointing, chunks of the head) is not counted.

    Args:
        lengths: tokens of each sequence.
        num_scored: tokens that are projected to the vocabulary.
    """
    tables = {model.get_input_embeddings(), model.get_output_embeddings()}
    of_tables = {p for table in tables if table is not None for p in table.parameters()}
    frozen = trained = 0
    for parameter in model.parameters():
        if parameter in of_tables or parameter.ndim < 2:
            continue
        trained += parameter.numel() * parameter.requires_grad
        frozen += parameter.numel() * (not parameter.requires_grad)
    num_tokens = sum(lengths)
    head = model.get_output_embeddings()
    assert head is not None  # Every causal language model has a head.
    weight = head.weight
    of_head = weight.numel() * num_scored * (6 if weight.requires_grad else 4)  # pyright: ignore
    config = model.config
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    of_pair = 2 * 2 * config.num_attention_heads * config.head_dim  # Scores and weighted values.
    of_attention = 3 * config.num_hidden_layers * of_pair * pairs
    return float((6 * trained + 4 * frozen) * num_tokens + of_head + of_attention)


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of a product of two [size, size] matrices, the best of 3."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    clock = clock_of(device)
    best_s = float("inf")
    for _ in range(4):  # The first run loads the kernels.
        started = clock()
        for _ in range(NUM_PRODUCTS):
            torch.mm(left, right)
        best_s = min(best_s, clock() - started)
    return NUM_PRODUCTS * 2 * size**3 / best_s
