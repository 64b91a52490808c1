"""Measures steps: operations against the device's own rate, profiles, snapshots of its memory."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from learner.policy.quantised_base import quantised_layers

logger = logging.getLogger(__name__)

PRODUCT_SIZES = {"cpu": 2048, "cuda": 8192}  # Rows and columns of the multiplied matrices.
SMALL_SIZE = 512  # Size in fp16 on a CPU, which multiplies it 20 times slower than fp32.
NUM_ROUNDS = 3  # The best round counts, since other processes can only slow one down.
MAX_EVENTS = 100_000  # Allocations of a memory snapshot.


def matrix_rate(
    device: torch.device, dtype: torch.dtype, *, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the FLOP/s of a matrix product on a device, with this process's threads.

    The first product, which allocates and loads kernels, is not measured.

    Args:
        clock: returns seconds; the rate is one of this clock.
    """
    size = PRODUCT_SIZES.get(device.type, PRODUCT_SIZES["cpu"])
    if device.type == "cpu" and dtype is torch.float16:
        size = SMALL_SIZE
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    best_s = float("inf")
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        for round_number in range(NUM_ROUNDS + 1):
            _wait_for(device)
            began_s = clock()
            torch.mm(left, right)
            _wait_for(device)
            if round_number:
                best_s = min(best_s, clock() - began_s)
    return 2 * size**3 / best_s


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_flops(
    model: nn.Module, lengths: Sequence[int], num_scored: int, repeated: Sequence[int] = ()
) -> float:
    """Return the least floating-point operations of a forward and backward pass.

    The forward pass needs two operations per weight and token. The backward pass needs two for the
    gradient of the inputs and, for trained weights, two for that of the weights. Experts count by
    the share that a token uses. The head is counted for scored tokens only, the embedding not at
    all, and attention for causal pairs. Recomputation (checkpointing, chunks of the head) is not
    counted, and neither are reference, critic and optimizer.

    Args:
        lengths: tokens of each sequence.
        num_scored: sampled tokens, whose logits are needed.
        repeated: first tokens of sequences that are needed once, but belong to another one as well.
    """
    policy: Any = model
    config = policy.config.get_text_config()
    tables = {policy.get_input_embeddings(), policy.get_output_embeddings()}
    of_tables = {p for table in tables if table is not None for p in table.parameters()}
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = getattr(config, "num_experts_per_tok", None) or 0
    expert_share = used / num_experts if num_experts and used else 1.0
    per_token = 0.0
    for name, parameter in model.named_parameters():
        if parameter in of_tables or parameter.ndim < 2:
            continue
        share = expert_share if ".experts." in name else 1.0
        per_token += share * parameter.numel() * (6 if parameter.requires_grad else 4)
    per_token += sum(4 * layer.weight.numel() for _, layer in quantised_layers(model))
    head = policy.get_output_embeddings()
    assert head is not None  # Every causal language model has a head.
    of_head = head.weight.numel() * num_scored * (6 if head.weight.requires_grad else 4)
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    pairs -= sum(length * (length + 1) / 2 for length in repeated)
    num_heads = getattr(config, "num_attention_heads", None) or 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(1, num_heads)
    of_pair = 2 * 2 * num_heads * head_dim  # Scores and weighted values.
    of_attention = 3 * config.num_hidden_layers * of_pair * pairs
    return float(per_token * (sum(lengths) - sum(repeated)) + of_head + of_attention)


class StepProfiler:
    """Writes a torch profile of some steps, and a snapshot of CUDA's memory, into a folder.

    Example (steps [3, 4]): `step(3)` starts the profiler before step 3, and the end of `step(4)`
    writes `steps-3-4.json.gz`. A learner that restarts at step 4 writes `steps-4-4.json.gz`.
    """

    def __init__(self, steps: Sequence[int], folder: Path | None, *, has_memory: bool) -> None:
        """Profile the steps from the first to the last number; [] or no folder: none."""
        self._first, self._last = steps if steps and folder is not None else (1, 0)
        self._folder = folder or Path()
        self._has_memory = has_memory
        self._profile: profile | None = None
        self._began_at = 0

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Run a step inside, with the profiler if it is one of the steps.

        A step that raises an error ends the profiler without files.
        """
        is_profiled = self._first <= number <= self._last
        if is_profiled and self._profile is None:
            self._start(number)
        try:
            yield
        except BaseException:
            self._stop()
            raise
        if is_profiled and number == self._last:
            self._write()

    def _start(self, number: int) -> None:
        """Start the profiler and the record of allocations."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        if self._has_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        self._began_at = number
        self._profile = profile(activities=activities)
        self._profile.start()

    def _stop(self) -> profile | None:
        """Stop the profiler; return it, or None if it does not run."""
        recorded = self._profile
        self._profile = None
        if recorded is not None:
            recorded.stop()
            if self._has_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        return recorded

    def _write(self) -> None:
        """Stop the profiler and write its files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._began_at}-{self._last}"
        if self._has_memory:
            snapshot = self._folder / f"{name}-memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            logger.info("wrote snapshot of the memory path=%s", snapshot)
        recorded = self._stop()
        assert recorded is not None
        path = self._folder / f"{name}.json.gz"
        recorded.export_chrome_trace(str(path))
        logger.info("wrote profile path=%s", path)
