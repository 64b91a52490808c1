"""Divides a packed row over several ranks: each computes adjacent tokens of it.

All parts have the same number of positions. The last ones may end with filling beyond the row.
"""
# torch's type stubs lack numpy's element types:
# pyright: reportUnknownMemberType=false

from dataclasses import dataclass, field

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from learner.batch.batching import PADDING_ID, TokenBatch
from learner.batch.device_copy import placed
from learner.batch.experts import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """The order of entries that several ranks have computed."""

    most: int  # Number of entries of the rank with most, at least 1.
    # [entry] int64 into [rank * most]: the entries of each rank, filled to `most`
    at: Tensor = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """The part of a packed row that one rank computes."""

    tokens: TokenBatch  # The positions of the part, with the packing of the whole row.
    scored: Places  # Order of the scored tokens in the whole row.
    ends: Places  # Order of the sequences' last tokens.


def row_part(tokens: TokenBatch, group: ProcessGroup) -> RowPart:
    """Return this rank's part of a packed row.

    Args:
        group: the ranks that compute the parts, in their order.
    """
    num_parts = group.size()
    index = group.rank()
    assert tokens.host_rows is not None
    assert tokens.position_ids is not None
    width = -(-tokens.token_ids.shape[1] // num_parts)  # Positions of each part.
    first = index * width
    arrays: dict[str, np.ndarray] = {}
    most: dict[str, int] = {}
    for name, rows in zip(("scored", "ends"), tokens.host_rows, strict=True):
        owners = rows // width
        own = np.flatnonzero(owners == index)
        arrays[f"{name}_own"] = own
        arrays[f"{name}_rows"] = rows[own] - first
        arrays[name], most[name] = _places(owners, num_parts)
    moved = placed(arrays, tokens.token_ids.device)

    def cut(column: Tensor, filling: int = 0) -> Tensor:
        """Return the entries of this part, of a column [position, ...]."""
        own = column[first : first + width]
        missing = width - len(own)
        return F.pad(own, (0, 0) * (own.ndim - 1) + (0, missing), value=filling) if missing else own

    routes = tokens.routes
    support = tokens.support_ids
    part = TokenBatch(
        token_ids=cut(tokens.token_ids[0], PADDING_ID)[None],
        source_rows=moved["scored_rows"],
        target_ids=tokens.target_ids[moved["scored_own"]],
        last_rows=moved["ends_rows"],
        position_ids=cut(tokens.position_ids[0])[None],
        packing=tokens.packing,
        routes=None if routes is None else Routes(cut(routes.ids), cut(routes.mask)),
        sequence_group=group,
        support_ids=None if support is None else support[moved["scored_own"]],
    )
    places = {name: Places(most=most[name], at=moved[name]) for name in most}
    return RowPart(tokens=part, **places)


def _places(owners: np.ndarray, num_parts: int) -> tuple[np.ndarray, int]:
    """Return the place of each entry among those of all parts, and the largest number of a part.

    Args:
        owners: [entry] int64, the part that has the entry. A part keeps its entries in order.
    """
    counts = np.bincount(owners, minlength=num_parts)
    most = max(1, int(counts.max()))
    places = np.empty(len(owners), dtype=np.int64)
    by_owner = np.argsort(owners, kind="stable")
    starts = np.cumsum(counts) - counts  # First entry of each part in that order.
    ordered = owners[by_owner]
    places[by_owner] = ordered * most + np.arange(len(owners)) - starts[ordered]
    return places, most
