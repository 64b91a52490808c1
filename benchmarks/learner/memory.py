"""Peak memory of chunked scoring with a large vocabulary, compared with a whole log-softmax."""

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
    """Peak allocations of forward and backward pass, in addition to weights and gradients."""

    chunked_bytes: int
    whole_bytes: int
    mean_difference: float  # In nats, between the log-probabilities of the two.

    @property
    def frac(self) -> float:
        return self.chunked_bytes / self.whole_bytes


def measure_scoring(
    model: PreTrainedModel, *, num_sequences: int, num_seq_tokens: int, chunk_tokens: int
) -> ScoringPeaks:
    """Return the peaks of a forward and backward pass in bf16 over all tokens of one block.

    Every token but the first of a sequence is scored. This is the worst case for the chunks: they
    skip tokens that are not scored, and the whole log-softmax does not.

    Args:
        model: with its head; copied, and its gradients are allocated beforehand.
        chunk_tokens: number of rows of the vocabulary projection in memory at once.
    """
    device = next(model.parameters()).device
    tokens = random_tokens(model, num_sequences, num_seq_tokens)
    how = Scoring(chunk_tokens=chunk_tokens, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    chunked_bytes, chunked = _peak_of(lambda: token_logprobs(model, tokens, how), device)
    whole_bytes, whole = _peak_of(
        lambda: whole_logprobs(model, tokens, dtype=torch.bfloat16), device
    )
    return ScoringPeaks(
        chunked_bytes=chunked_bytes,
        whole_bytes=whole_bytes,
        mean_difference=(chunked - whole).abs().mean().item(),
    )


def random_tokens(model: PreTrainedModel, num_sequences: int, num_seq_tokens: int) -> TokenBatch:
    """Return a block of random tokens, of which all but the first of a sequence are scored."""
    size = (num_sequences, num_seq_tokens)
    sequences = list(np.random.default_rng(0).integers(0, vocabulary_size(model), size=size))
    masks = [np.arange(num_seq_tokens) > 0] * num_sequences
    return collate_tokens(sequences, masks, device=next(model.parameters()).device)


def _peak_of(score: Callable[[], Tensor], device: torch.device) -> tuple[int, Tensor]:
    """Return the peak memory of scoring with its gradient."""
    scored: list[Tensor] = []

    def run() -> None:
        logprobs = score()
        scored.append(logprobs.detach())
        (-logprobs.mean()).backward()

    return peak_bytes(run, device), scored[0]


def whole_logprobs(model: PreTrainedModel, tokens: TokenBatch, *, dtype: torch.dtype) -> Tensor:
    """Return log-probabilities [tokens] by one fp32 log-softmax over [batch, seq, vocab]."""
    head = model.get_output_embeddings()
    assert head is not None  # Every causal language model has a head.
    device_type = tokens.token_ids.device.type
    hidden = flat_hidden(model.base_model, tokens, dtype=dtype)
    with torch.autocast(device_type, dtype=dtype, enabled=dtype is not torch.float32):
        logits = head(hidden)  # [batch * seq, vocab]
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    return log_softmax[tokens.source_rows, tokens.target_ids]


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Return the peak of allocated bytes during `run`, minus the bytes allocated before.

    On CUDA the allocator counts. On a CPU the profiler records every allocation and release of
    torch's allocator, in order. Unlike the process's resident memory this is independent of the C
    library's own caching, and it counts reused blocks.
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
    profiler: Any = profile.profiler  # The profiler's results have no type annotations.
    events = [event for event in profiler.kineto_results.events() if event.name() == MEMORY_EVENT]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
