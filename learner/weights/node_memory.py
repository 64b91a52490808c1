"""The newest version in memory of the learner that engines of its node map."""

import logging
import weakref
from collections.abc import Callable, Sequence

from torch import Tensor

from common.errors import WeightSyncError
from common.weights.messages import WeightsOffer
from common.weights.node_copy import NodeCopy, node_id
from common.weights.transport import WeightGroup
from learner.weights.snapshot import PublishedWeights

logger = logging.getLogger(__name__)


class NodeMemory:
    """Holds one version for the engines of the learner's node. For the publisher's thread.

    Example: reserve(v3); write(v3) copies the weights, which may change from then on; place is the
    text by which engines find the copy. An engine that joins later maps it, too. reserve(v4) takes
    the same memory, unless an engine still reads v3. Then v4 gets new memory.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self.node = node_id()
        self.place = ""
        self._copy: NodeCopy | None = None
        self._version = -1
        self._source: weakref.ref[object] | None = None  # The source of the version in the copy.

    def has(self, weights: PublishedWeights) -> bool:
        """Return whether the copy is this version."""
        is_same = self._source is not None and self._source() is weights.source
        return is_same and self._version == weights.version

    def reserve(self, weights: PublishedWeights) -> bool:
        """Take memory for a version; return False, with a warning, if there is too little."""
        num_bytes = weights.source.total_bytes
        copy = self._copy
        self._copy = None
        self._source = None
        if copy is None or copy.buffer.numel() != num_bytes or not copy.claim():
            copy = None  # The old memory is freed first.
            try:
                copy = NodeCopy(num_bytes)
            except WeightSyncError as error:
                logger.warning(
                    "engines of this node receive over gloo version=%d reason=%s",
                    weights.version,
                    error,
                )
                return False
        self._copy = copy
        return True

    def write(
        self,
        weights: PublishedWeights,
        group: WeightGroup,
        slots: Sequence[Tensor],
        offer: WeightsOffer,
        *,
        is_cancelled: Callable[[], bool],
    ) -> float:
        """Copy a version to the reserved memory; return the seconds it took.

        Args:
            slots: as for `write_buckets`.

        Raises: LongstrideError: as `WeightGroup.write`, or `fill` of the source.
        """
        copy = self._copy
        assert copy is not None, "memory was reserved"
        self._copy = None  # A cancelled thread may still write to this memory.
        copy.version = -1
        source = weights.source
        digest, seconds = group.write(
            copy.buffer, slots, source.read, offer, check=source.check, is_cancelled=is_cancelled
        )
        copy.version = weights.version
        self.place = copy.show(digest)
        self._copy = copy
        self._version = weights.version
        self._source = weakref.ref(weights.source)
        return seconds
