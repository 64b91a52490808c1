"""Peak memory of scoring tokens of a large vocabulary, beside the whole log-softmax at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.model import Scoring, flat_hidden, token_logprobs, vocabulary_size

MAX_FRAC = 0.25
MEMORY_EVENT = "[memory]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringPeaks:
    """What forward and backward pass allocated at most, above weights and gradients."""

    chunked_bytes: int
    whole_bytes: int
    mean_difference: float  # nats, between the log-probabilities of the two

    @property
    def frac(self) -> float:
        return self.chunked_bytes / self.whole_bytes


def measure_scoring(
    model: PreTrainedModel, *, num_sequences: int, num_seq_tokens: int, chunk_tokens: int
) -> ScoringPeaks:
    """Return the peaks of a forward and backward pass in bf16 over all tokens of one block.

    Every token but the first of a sequence is scored, which is the worst case for the chunks:
    they leave out what is not scored, and the whole log-softmax does not.

    Args:
        model: with its head; copied, and its gradients are allocated beforehand.
        chunk_tokens: rows of the vocabulary projection that are alive at once.
    """
    device = next(model.parameters()).device
    rng = np.random.default_rng(0)
    sequences = list(rng.integers(0, vocabulary_size(model), size=(num_sequences, num_seq_tokens)))
    masks = [np.arange(num_seq_tokens) > 0] * num_sequences
    tokens = collate_tokens(sequences, masks, device=device)
    how = Scoring(chunk_tokens=chunk_tokens, autocast=True)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chunked_bytes, chunked = _peak_of(lambda: token_logprobs(model, tokens, how), device)
    whole_bytes, whole = _peak_of(lambda: whole_logprobs(model, tokens, autocast=True), device)
    return ScoringPeaks(
        chunked_bytes=chunked_bytes,
        whole_bytes=whole_bytes,
        mean_difference=(chunked - whole).abs().mean().item(),
    )


def _peak_of(score: Callable[[], Tensor], device: torch.device) -> tuple[int, Tensor]:
    scored: list[Tensor] = []

    def run() -> None:
        logprobs = score()
        scored.append(logprobs.detach())
        (-logprobs.mean()).backward()

    return peak_bytes(run, device), scored[0]


def whole_logprobs(model: PreTrainedModel, tokens: TokenBatch, *, autocast: bool) -> Tensor:
    """Return log-probabilities [tokens] by one fp32 log-softmax over [batch, seq, vocab]."""
    head = model.get_output_embeddings()
    assert head is not None  # every causal language model has one
    device_type = tokens.token_ids.device.type
    hidden = flat_hidden(model.base_model, tokens, autocast=autocast)
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
        logits = head(hidden)  # [batch * seq, vocab]
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    return log_softmax[tokens.source_rows, tokens.target_ids]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that were allocated at once during `run`, above those before it.

    On CUDA the allocator counts. On CPU the profiler hears of every allocation and release of
    torch's allocator, in order; unlike the process's resident memory this does not depend on
    what the C library keeps, and a freed block that is used again is not overlooked.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    profiler: Any = profile.profiler  # what it heard has no types
    events = [event for event in profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
