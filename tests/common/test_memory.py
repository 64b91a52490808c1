"""Laws of giving memory back."""

import psutil
import torch

from common.memory import trim_heap


def test_trimming_returns_what_was_freed() -> None:
    process = psutil.Process()
    # Small enough for the heap, large together; the last one keeps the heap's end in use.
    blocks = [torch.ones(4_000) for _ in range(5_000)]
    keep = torch.ones(4_000)
    used = process.memory_info().rss
    del blocks
    if trim_heap():
        assert used - process.memory_info().rss > 40_000_000
    assert keep.sum() == 4_000
