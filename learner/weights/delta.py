"""Versions as changes: a copy of the newest version, and its changes since the one before."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from common.weights.buckets import word_sums
from common.weights.delta import ChangePacker, sums_text
from learner.weights.snapshot import PublishedWeights
from learner.weights.source import CopiedWeights, WeightSource

READ_BYTES = 16 << 20  # Bytes that are read from the live weights at a time.
MAX_FRAC = 0.5  # Changes above this share of the version's bytes are not sent.


class KeptVersion(NamedTuple):
    """A version that is sent from the copy."""

    whole: PublishedWeights
    changes: PublishedWeights | None  # None: they are too many, or there is no version before.
    changed_frac: float | None  # Share of the compared entries that changed; None without a copy.


class VersionKeeper:
    """Keeps the newest version in host memory. For the publisher's thread.

    Example: keep(v3) copies the live weights, which may change from then on. The whole v3 is sent
    from the copy. keep(v4) compares v4 with the copy, part by part, and updates the copy. The
    changes are sent to the engines that hold v3, and the whole v4 to all others.
    """

    def __init__(self) -> None:
        """Start without a copy, as after a restart of the learner: the first version is whole."""
        self._copy: CopiedWeights | None = None
        self._version = -1
        self._sums = torch.zeros(2, dtype=torch.int64)  # Those of the copy; see `word_sums`.
        self._part = torch.zeros(0, dtype=torch.uint8)

    def keep(self, weights: PublishedWeights) -> KeptVersion:
        """Copy a version. Its source may change afterwards.

        Raises: LongstrideError: as `fill` of the source. No version can be kept after that.
        """
        source = weights.source
        base = self._version
        copy = self._copy_for(weights)
        packer = ChangePacker(source.total_bytes, max_bytes=int(MAX_FRAC * source.total_bytes))
        for start in range(0, source.total_bytes, READ_BYTES):
            kept = copy.buffer[start : start + READ_BYTES]
            if base < 0:
                source.fill(start, kept)
            else:
                part = self._part_of(source)[: kept.numel()]
                source.fill(start, part)
                packer.add(part, kept)
        has_changes = base >= 0 and not packer.is_dense
        self._sums = packer.sums_after(self._sums) if has_changes else word_sums(copy.buffer)
        self._version = weights.version
        whole = replace(weights, source=copy, digest=sums_text(self._sums))
        changes = None
        if has_changes:
            sent = CopiedWeights(source.specs, packer.packed())
            sent.device = copy.device
            changes = replace(whole, source=sent, base=base)
        return KeptVersion(whole, changes, packer.changed_frac if base >= 0 else None)

    def _copy_for(self, weights: PublishedWeights) -> CopiedWeights:
        """Return the copy. Engines on GPUs are reached from the device of the live weights."""
        if self._copy is None:
            buffer = torch.zeros(weights.source.total_bytes, dtype=torch.uint8)
            self._copy = CopiedWeights(weights.tensors, buffer)
            self._copy.device = weights.source.device
        self._version = -1  # The copy is of no version until it is complete.
        return self._copy

    def _part_of(self, source: WeightSource) -> Tensor:
        """Return the buffer for reading a source in parts."""
        if not self._part.numel():
            is_pinned = source.device.type == "cuda"
            size = min(READ_BYTES, source.total_bytes)
            self._part = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        return self._part
