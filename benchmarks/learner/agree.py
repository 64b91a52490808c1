"""Differences between computations that should agree: precisions, repetitions, chunk sizes."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.learner.memory import peak_bytes
from benchmarks.learner.step import clock_of, make_trainer
from common.config.learning import AlgorithmSection, LearnerSection
from learner.batch.batching import Sample, TokenBatch
from learner.policy.model import Scoring, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """The difference of two steps from the same weights on the same batch."""

    distance: float  # The value |update one - update two| / |update one|; 0 if nothing differs.
    is_identical: bool  # All bits are equal.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Cost of the forward and backward pass at one chunk size."""

    chunk_tokens: int
    tokens_per_s: float
    peak_bytes: int
    mean_difference: float  # In nats, compared with a single chunk.


def canary_delta(
    known: Sequence[Sequence[float]],
    engine_model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
) -> float:
    """Return the mean |difference| in nats between given scores and a plain forward pass.

    Args:
        known: [canary, seq-1] the trainer's scores: fp32 master weights, bf16 compute.
        engine_model: the same weights in bf16, as an engine has them.
        sequences: [canary, seq] token ids.
    """
    deltas: list[Tensor] = []
    for token_ids, scores in zip(sequences, known, strict=True):
        ids = torch.tensor([token_ids], device=engine_model.device)  # [1, seq]
        with torch.no_grad():
            logits = engine_model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        theirs = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)  # [seq - 1]
        deltas.append((theirs.cpu() - torch.tensor(scores)).abs())
    return torch.cat(deltas).mean().item()


def repeat_step(
    cfg: LearnerSection,
    algorithm: AlgorithmSection,
    model: PreTrainedModel,
    samples: list[Sample],
    *,
    engine_dtype: str,
) -> Repetition:
    """Return the difference of two steps that should be equal. `model` is not changed."""
    first, second = (_updated(cfg, algorithm, model, samples, engine_dtype) for _ in range(2))
    apart = moved = 0.0
    is_identical = True
    before = model.state_dict()
    for name, weights in first.items():
        apart += (weights - second[name]).double().square().sum().item()
        moved += (weights - before[name].cpu()).double().square().sum().item()
        is_identical = is_identical and torch.equal(weights, second[name])
    if moved == 0.0:
        raise ValueError("the step changed nothing, so there is nothing to compare")
    return Repetition(distance=(apart / moved) ** 0.5, is_identical=is_identical)


def _updated(
    cfg: LearnerSection,
    algorithm: AlgorithmSection,
    model: PreTrainedModel,
    samples: list[Sample],
    engine_dtype: str,
) -> dict[str, Tensor]:
    own = copy.deepcopy(model)
    cfg = replace(cfg, warmup_steps=0)
    trainer = make_trainer(cfg, algorithm, own, engine_dtype=engine_dtype)
    trainer.train_on(samples, version=0, must_train=True)
    return {name: tensor.detach().cpu() for name, tensor in own.state_dict().items()}


def chunk_costs(
    model: PreTrainedModel, tokens: TokenBatch, sizes: Sequence[int], *, autocast: bool
) -> list[ChunkCost]:
    """Return speed, memory and agreement of scoring a block in chunks of each of `sizes`."""
    num_tokens = tokens.target_ids.numel()
    reference = _score(model, tokens, num_tokens, autocast=autocast)
    clock = clock_of(tokens.token_ids.device)
    costs: list[ChunkCost] = []
    for size in sizes:
        score = partial(_score, model, tokens, size, autocast=autocast)
        logprobs = score()
        started = clock()
        score()
        took_s = clock() - started
        costs.append(
            ChunkCost(
                chunk_tokens=size,
                tokens_per_s=num_tokens / max(took_s, 1e-9),
                peak_bytes=peak_bytes(score, tokens.token_ids.device),
                mean_difference=(logprobs - reference).abs().mean().item(),
            )
        )
    return costs


def _score(model: PreTrainedModel, tokens: TokenBatch, size: int, *, autocast: bool) -> Tensor:
    """Run a forward and backward pass; return the log-probabilities [tokens]."""
    logprobs = token_logprobs(model, tokens, Scoring(chunk_tokens=size, autocast=autocast))
    (-logprobs.mean()).backward()
    model.zero_grad()
    return logprobs.detach()
