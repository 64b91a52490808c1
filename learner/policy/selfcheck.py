"""The start check: compares the learner's log-probabilities with the network's own.

A few fixed sequences are scored in four ways: by the network's plain forward pass with its own
formula of attention, one by one; by the learner's path, one by one; by the same path in one block;
and in that block a second time. All four scores must agree within rounding. The check needs no list
of model families. It detects random numbers in a pass, logits that change after the head, kernels
of attention that omit a part of the formula, and sequences that attend to each other within a
block.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from common.errors import ConfigError
from common.formats.sense_tokens import sense_tokens
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.composite import source_of, text_config
from learner.policy.model import Scoring

LENGTHS = (24, 44, 33, 37)  # Tokens of the scored sequences.
SHARED = (0, 0, 6, 12)  # First tokens that each sequence shares with the one before.
READ_FRAC = 0.5  # Fraction of a sequence, at its end, that is scored; the rest is only read.

# Largest difference of two fp32 scores, as a fraction of their mean size.
MAX_FP32 = 2e-4
# Mean difference of two scores in 16 bits, as a fraction of their mean size.
MAX_MEAN = {torch.bfloat16: 2e-2, torch.float16: 2.5e-3}

Score = Callable[[TokenBatch], Tensor]  # [tokens] nats or [tokens, hidden] states


class ScoresDiffer(ConfigError):
    """The learner's scores differ from the network's; a restart would find the same difference."""


class NeighboursDiffer(ScoresDiffer):
    """The score of a sequence changes in a block of several."""


class PackingRefused(ConfigError):
    """A kernel of packed sequences does not support the arguments of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The sequences of a check, and their layout."""

    name: str  # Class name of the network.
    sequences: Sequence[np.ndarray] = field(repr=False)  # each [seq] int64 token ids
    device: torch.device
    is_packed: bool
    shares_prefix: bool = False  # In the packed layout sequences share their common tokens.
    dtype: torch.dtype  # Dtype of the pass.

    def alone(self, index: int, *, is_packed: bool) -> TokenBatch:
        """Return a block of one sequence."""
        sequence = self.sequences[index]
        masks = [_mask(sequence)]
        return collate_tokens([sequence], masks, device=self.device, is_packed=is_packed)

    def together(self) -> TokenBatch:
        """Return one block of all sequences."""
        return collate_tokens(
            self.sequences,
            [_mask(each) for each in self.sequences],
            device=self.device,
            is_packed=self.is_packed,
            shared=SHARED if self.is_packed and self.shares_prefix else (),
        )


def _mask(sequence: np.ndarray) -> np.ndarray:
    """Return which tokens of a sequence the check scores."""
    return np.arange(len(sequence)) >= max(1, int(len(sequence) * READ_FRAC))


def make_probe(
    model: PreTrainedModel,
    device: torch.device,
    *,
    vocab_size: int,
    is_packed: bool,
    dtype: torch.dtype,
    shares_prefix: bool = False,
) -> Probe:
    """Return fixed random sequences of a vocabulary, none longer than the network allows.

    Tokens that stand for images or sound are left out.
    """
    config = text_config(model.config)
    most = getattr(config, "max_position_embeddings", None) or max(LENGTHS)
    scale = min(1.0, most / max(LENGTHS))
    draw = np.random.default_rng(0)
    others = list(sense_tokens(vars(model.config)))
    words = np.setdiff1d(np.arange(vocab_size), others)
    sequences = [draw.choice(words, max(4, int(n * scale))) for n in LENGTHS]
    for index, num in enumerate(SHARED):
        size = min(num, len(sequences[index]), len(sequences[index - 1]))
        sequences[index][:size] = sequences[index - 1][:size]
    return Probe(
        name=type(model).__name__,
        sequences=sequences,
        device=device,
        is_packed=is_packed,
        dtype=dtype,
        shares_prefix=shares_prefix and min(map(len, sequences)) > max(SHARED),
    )


def arithmetics(network: nn.Module, scoring: Scoring) -> list[Scoring]:
    """Return the scoring settings of a check: fp32 if the weights allow it, and as configured."""
    configured = replace(scoring, temperature=1.0)
    weights = list(network.parameters())
    is_fp32 = all(each.dtype == torch.float32 for each in weights)
    is_sharded = any(isinstance(each, DTensor) for each in weights)
    if configured.dtype is not torch.float32 and is_fp32 and not is_sharded:
        return [replace(configured, dtype=torch.float32), configured]
    return [configured]


@torch.no_grad()
def check_scores(probe: Probe, score: Score, plain: Score) -> None:
    """Compare the learner's scores with the network's.

    Args:
        own: scores a block by the learner's path.
        plain: scores a padded block of one sequence by the network's forward pass.

    Raises:
        ScoresDiffer: two scorings of one block differ, or the scores of a single sequence differ.
        NeighboursDiffer: scores differ only in a block of several sequences.
    """
    with torch.compiler.set_stance("force_eager"):
        expected = [plain(probe.alone(i, is_packed=False)) for i in range(len(probe.sequences))]
    block = probe.together()
    together = score(block)
    difference = _difference(score(block), together, probe)
    if difference:
        raise ScoresDiffer(
            f"{probe.name} scores the same tokens differently in two forward passes: {difference}."
            " A module draws random numbers in its forward pass, such as dropout. Set its rate to 0"
            " in the model's config.json."
        )
    difference = _difference(score(probe.alone(0, is_packed=probe.is_packed)), expected[0], probe)
    if difference:
        raise ScoresDiffer(
            f"The learner's scores of {probe.name} differ from those of the network's own forward"
            f" pass: {difference}. The learner does not support this family. Choose another"
            " model.path."
        )
    difference = _difference(together, torch.cat(expected), probe)
    if difference and probe.is_packed:
        raise NeighboursDiffer(
            f"learner.layout=packed: packed sequences of {probe.name} attend to each other: a"
            f" token scores {difference} (packed, and alone). Use learner.layout=padded."
        )
    if difference:
        raise NeighboursDiffer(
            f"learner.layout=padded: the scores of {probe.name} depend on the other sequences of a"
            f" forward pass: a token scores {difference} (with others, and alone). Choose another"
            " model.path."
        )


@torch.no_grad()
def packing_difference(probe: Probe, packed: Score, padded: Score) -> str:
    """Return the two scores with the largest packed-to-padded difference; "" if all agree.

    Args:
        packed: scores the packed block of all sequences.
        padded: scores a padded block of one sequence.
    """
    expected = [padded(probe.alone(i, is_packed=False)) for i in range(len(probe.sequences))]
    return _difference(packed(probe.together()), torch.cat(expected), probe)


def _difference(scores: Tensor, expected: Tensor, probe: Probe) -> str:
    """Return the two scores that differ most; "" if all agree within rounding."""
    ours = scores.double().flatten()
    theirs = expected.double().flatten()
    gaps = (ours - theirs).abs().nan_to_num(0.0, posinf=0.0)  # Other checks detect NaN.
    size = theirs.nan_to_num(0.0, posinf=0.0, neginf=0.0).abs().mean().item()
    is_fp32 = probe.dtype is torch.float32
    gap = (gaps.max() if is_fp32 else gaps.mean()).item()
    if gap <= size * (MAX_FP32 if is_fp32 else MAX_MEAN[probe.dtype]):
        return ""
    at = int(gaps.argmax())
    unit = " nats" if expected.ndim == 1 else ""
    return f"{ours[at].item():.4f} and {theirs[at].item():.4f}{unit}"


def plain_logprobs(model: PreTrainedModel, tokens: TokenBatch, *, dtype: torch.dtype) -> Tensor:
    """Return the [tokens] float32 nats of a padded block by the network's own forward pass."""
    device_type = tokens.token_ids.device.type
    is_cast = dtype is not torch.float32
    with own_attention(model), torch.autocast(device_type, dtype=dtype, enabled=is_cast):
        try:
            logits = model(input_ids=tokens.token_ids, use_cache=False).logits
        except AttributeError as error:
            if source_of(model) is None:
                raise
            raise ConfigError(
                f"model.path: transformers' {type(model).__name__} computes no text without its"
                f" modules for other input ({error}). Choose another model"
            ) from error
    rows = logits.flatten(0, 1)[tokens.source_rows].float()
    return F.log_softmax(rows, dim=-1).gather(1, tokens.target_ids[:, None]).squeeze(1)


@contextmanager
def own_attention(network: nn.Module) -> Iterator[None]:
    """Use the network's own formula of attention, "eager", within the context.

    Fused kernels of transformers ignore additions that they lack, so they are checked against it.
    """
    models = [each for each in network.modules() if isinstance(each, PreTrainedModel)]
    before = [each.config._attn_implementation for each in models]
    for model in models:
        model.config._attn_implementation = "eager"
    try:
        yield
    finally:
        for model, name in zip(models, before, strict=True):
            model.config._attn_implementation = name
