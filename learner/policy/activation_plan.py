"""The memory of a row's activations: which layers store theirs, and the formula of the peak.

A layer that stores its activations keeps all tensors which its backward pass reads. Another layer
keeps only its input and computes the rest again, its feed-forward part in chunks of the row. The
last layers store first: the backward pass frees them before it recomputes the others.
"""

from typing import NamedTuple

from common.config.learner import Activations, LearnerSection, Offload
from common.errors import ConfigError
from common.host.machine import GIB
from learner.policy.model_shape import ModelShape

FP32_BYTES = 4  # Norms compute in fp32 in both precisions.


class RowSizes(NamedTuple):
    """The sizes of a row that determine the memory of its activations."""

    tokens: int  # Tokens of one rank.
    width: int  # Bytes of a number in matrix products.
    wide: int  # Bytes of a number between the layers.
    is_adapted: bool  # Only adapters are trained.
    rank: int  # Rank of the adapters; 0 without.
    is_cuda: bool  # A GPU, whose flash attention needs no copy of its result.


class StoredLayers(NamedTuple):
    """The treatment of the layers of a network."""

    num_stored: int  # Last layers that store their activations.
    is_offloaded: bool  # The inputs of the others are in host memory.


class ActivationBytes(NamedTuple):
    """The peak of a row's activations."""

    num_bytes: int  # On the device.
    host_bytes: int  # Inputs of layers that wait in host memory.
    head_bytes: int  # On the device while the head computes.
    formula: str


def layer_bytes(shape: ModelShape, row: RowSizes) -> tuple[int, int]:
    """Return the bytes per token that a layer stores, without and with its feed-forward units.

    The count follows the layers of Llama, Qwen 2 and Qwen 3. A norm stores its input in fp32 and,
    if it is trained, its normalised rows. In fp32 the products of a norm share one input. In bf16
    each product has a copy of its own. Attention stores queries, keys, values, its result, and on
    a CPU the result in the order of the tokens. The gated units store four vectors.
    """
    hidden = shape.hidden
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    num_norms = 1 if row.is_adapted else 2
    per_norm = num_norms * hidden * FP32_BYTES
    is_cast = row.width < FP32_BYTES
    # Inputs of queries, keys and values.
    inputs = 3 * hidden * row.width if is_cast else hidden * row.width
    num_results = 2 if row.is_cuda else 3
    attention = (num_results * queries + 2 * keys) * row.width + shape.heads * FP32_BYTES
    if shape.has_head_norms:
        normed = FP32_BYTES + (0 if row.is_adapted else row.width)
        attention += (queries + keys) * normed
    adapters = 4 * row.rank * row.width
    without = 2 * per_norm + inputs + attention + adapters
    gated = 2 * hidden * row.width if is_cast else hidden * row.width
    units = 4 * shape.intermediate * row.width + 3 * row.rank * row.width
    return without, without + gated + units


def activation_bytes(
    shape: ModelShape, row: RowSizes, layers: StoredLayers, *, mlp_chunk_tokens: int
) -> ActivationBytes:
    """Return the peak of a row's activations without the logits.

    Args:
        mlp_chunk_tokens: tokens of a chunk of the feed-forward parts; 0: no chunks.
    """
    tokens = row.tokens
    without, stored = layer_bytes(shape, row)
    num_again = shape.layers - layers.num_stored
    vector = shape.hidden * FP32_BYTES
    per_input = shape.hidden * row.wide
    waiting = num_again * per_input
    on_device = waiting
    if layers.is_offloaded:  # The host of a CPU is its device.
        on_device = min(num_again, 2) * per_input if row.is_cuda else 0
    units = 2 * shape.intermediate * row.width + per_input  # Gradients within a layer.
    # The last norm, the rows of the head, and the sums of their gradients. A GPU's are narrower.
    top = (6 if row.is_adapted else 7) * vector - (3 * vector if row.is_cuda else 0)
    # Experts choose their tokens among all of a row.
    chunk = tokens if shape.experts else min(tokens, mlp_chunk_tokens or tokens)
    storing = tokens * (layers.num_stored * stored + max(top, units * (layers.num_stored > 0)))
    again = 0
    if num_again:
        shared = per_input if row.wide == FP32_BYTES else 0  # The first norm stores the input.
        if chunk < tokens:
            # States of the chunks, their gradient, and that of the layer's result.
            around = 2 * vector + per_input
            around += shape.hidden * (FP32_BYTES + row.width) if row.width < FP32_BYTES else 0
            again = tokens * (without - shared + around)
            again += chunk * (6 * shape.intermediate + 2 * shape.hidden) * row.width
            if not row.is_adapted:  # Gradients of the weights: of a chunk, and their sum.
                again += 2 * 3 * shape.hidden * shape.intermediate * FP32_BYTES
        else:
            again = tokens * (stored - shared + units)
    num_bytes = tokens * on_device + max(storing, again)
    place = " in host memory" if layers.is_offloaded else ""
    terms = [f"{num_again} inputs x {per_input:,} B{place}"] if num_again else []
    if storing >= again:
        rest = storing // tokens - layers.num_stored * stored
        terms.append(f"{layers.num_stored} layers x {stored:,} B + {rest:,} B")
    elif chunk < tokens:
        rest = again // tokens - without
        terms.append(f"one layer x {without:,} B + {rest:,} B with chunks of {chunk:,}")
    else:
        terms.append(f"one layer x {stored:,} B + {again // tokens - stored:,} B")
    text = f"{tokens:,} tokens x ({' + '.join(terms)})"
    head_bytes = tokens * (on_device + layers.num_stored * stored + top)
    return ActivationBytes(num_bytes, tokens * waiting * layers.is_offloaded, head_bytes, text)


def logit_bytes(
    row: RowSizes, peak: ActivationBytes, *, vocab: int, chunk_tokens: int, width: int
) -> int:
    """Return the bytes of a chunk's logits, as far as they exceed the peak of the layers.

    A CPU has one buffer of them. A GPU has the products, the logits in fp32, and their gradient. No
    layer is computed again at the same time.

    Args:
        width: bytes of a logit on a CPU.
    """
    per_word = row.width + 2 * FP32_BYTES if row.is_cuda else width
    num_bytes = min(row.tokens, chunk_tokens) * vocab * per_word
    return max(0, num_bytes - (peak.num_bytes - peak.head_bytes))


def row_of(
    learner: LearnerSection, longest_tokens: int, *, is_cuda: bool, is_16_bit: bool
) -> RowSizes:
    """Return the largest row of a learner's rank.

    Args:
        longest_tokens: tokens of the longest episode; 0: shorter than a microbatch.
        is_16_bit: passes compute in bf16 or in fp16.
    """
    width = 2 if is_16_bit else 4
    rank = learner.lora.rank
    # Embeddings in 16 bits: gathered ones, and frozen ones of a GPU.
    is_narrow = (
        is_16_bit
        and is_cuda
        and (rank > 0 or learner.num_ranks > 1 or learner.offload is Offload.OPTIMIZER)
    )
    longest = -(-longest_tokens // learner.sequence_ranks)
    return RowSizes(
        tokens=max(learner.max_tokens_per_microbatch, longest),
        width=width,
        wide=2 if is_narrow else FP32_BYTES,
        is_adapted=rank > 0,
        rank=rank,
        is_cuda=is_cuda,
    )


def choose_layers(
    learner: LearnerSection, shape: ModelShape | None, row: RowSizes, *, num_layers: int
) -> StoredLayers:
    """Return the treatment of the layers by `learner.activations` and its budget.

    Args:
        shape: sizes of the policy; None: there is no budget, or no folder to read them from.

    Raises: ConfigError: the budget is too small.
    """
    mode = learner.activations
    budget = int(learner.activation_gib * GIB)
    if not budget or shape is None:
        keeps = mode in (Activations.KEEP, Activations.AUTO)
        return StoredLayers(num_layers if keeps else 0, mode is Activations.OFFLOAD)
    is_offloaded = mode is Activations.OFFLOAD
    ways = [StoredLayers(number, is_offloaded) for number in range(num_layers, -1, -1)]
    if mode is Activations.AUTO:
        ways.append(StoredLayers(0, True))
    needs = [
        activation_bytes(shape, row, each, mlp_chunk_tokens=learner.mlp_chunk_tokens).num_bytes
        for each in ways
    ]
    chosen = next((way for way, need in zip(ways, needs, strict=True) if need <= budget), None)
    if chosen is not None:
        return chosen
    if mode is Activations.AUTO:  # The check of the memory plan refuses what has no room.
        return ways[-1]
    raise ConfigError(
        f"learner.activation_gib={learner.activation_gib:g}: a row of {row.tokens:,} tokens needs"
        f" at least {min(needs) / GIB:.2f} GiB with learner.activations={mode.value}. Raise it,"
        " lower learner.max_tokens_per_microbatch or learner.mlp_chunk_tokens, or divide rows"
        " (learner.sequence_ranks)"
    )
