"""Checks of computations that should agree: precisions, repetitions, chunk sizes."""

import copy
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.learner.checks.bench import DeviceBench, canary_delta
from benchmarks.learner.memory import peak_bytes, random_tokens
from benchmarks.learner.step import clock_of
from common.config.learner import LearnerSection
from learner.batch.batching import TokenBatch
from learner.policy.model import Scoring, token_logprobs

MAX_CANARY_DELTA = LearnerSection().max_canary_delta
MAX_CHUNK_DIFFERENCE = 0.005  # In nats; bf16 logits are rounded differently with other tilings.
MAX_REPETITION = 0.01  # On CUDA the order of additions in attention's backward pass varies.


def check_canary(bench: DeviceBench) -> None:
    """Compare the trainer's scores (fp32 master weights) with a forward pass in bf16."""
    model = bench.model()
    sequences = bench.canaries(model)
    known = bench.trainer(model).score(sequences)
    # This changes the trainer's own model in place, so its scores are computed before.
    nn.Module.to(model, torch.bfloat16)
    name = "canary: fp32 masters under autocast against bf16 weights"
    bench.suite.at_most(name, canary_delta(known, model, sequences), "nats", MAX_CANARY_DELTA)


def check_repetition(bench: DeviceBench) -> None:
    """Compare the updates of two steps that should be equal."""
    model = bench.model()
    before = model.state_dict()
    updated: list[dict[str, Tensor]] = []
    for _ in range(2):
        copied = copy.deepcopy(model)
        bench.trainer(copied).train_on(bench.samples(model), version=0, must_train=True)
        updated.append(dict(copied.state_dict()))
    first, second = updated
    apart = moved = 0.0
    for name, weights in first.items():
        apart += (weights - second[name]).double().square().sum().item()
        moved += (weights - before[name]).double().square().sum().item()
    if moved == 0.0:
        raise ValueError("the step changed nothing, so there is nothing to compare")
    is_identical = all(torch.equal(weights, second[name]) for name, weights in first.items())
    note = "bit for bit" if is_identical else "not bit for bit"
    bound = MAX_REPETITION if bench.is_cuda else 0.0
    name = "repetition: |update one - update two| / |update one|"
    bench.suite.at_most(name, (apart / moved) ** 0.5, "", bound, note)


def check_chunks(bench: DeviceBench) -> None:
    """Compare scores in chunks of each size with those in one chunk, and their cost."""
    sizes = bench.sizes
    model = bench.model(num_hidden_layers=2)
    tokens = random_tokens(model, sizes.memory_sequences, sizes.memory_seq_tokens)
    num_tokens = tokens.target_ids.numel()
    reference = score(model, tokens, num_tokens, dtype=torch.bfloat16)
    clock = clock_of(bench.device)
    for size in sizes.chunk_sizes:
        run = partial(score, model, tokens, size, dtype=torch.bfloat16)
        difference = (run() - reference).abs().mean().item()
        started = clock()
        run()
        speed = num_tokens / max(clock() - started, 1e-9)
        peak = peak_bytes(run, bench.device)
        note = f"{speed:.0f} tokens/s, {peak / 1e6:.0f} MB"
        name = f"chunks of {size}: difference from one chunk"
        bench.suite.at_most(name, difference, "nats", MAX_CHUNK_DIFFERENCE, note)


def score(model: PreTrainedModel, tokens: TokenBatch, size: int, *, dtype: torch.dtype) -> Tensor:
    """Run a forward and backward pass in chunks; return the log-probabilities [tokens]."""
    logprobs = token_logprobs(model, tokens, Scoring(chunk_tokens=size, dtype=dtype))
    (-logprobs.mean()).backward()
    model.zero_grad()
    return logprobs.detach()
