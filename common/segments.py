"""Segments and forks: the parts of an episode, and episodes that begin with another's turns.

A segment is a training row with its own context and the shared outcome of its episode.

Segments are consecutive in an episode's arrays. Each begins with the context of its first turn.
That context is masked from the loss, so every sampled token is trained in exactly one segment.
The last segment may be the prompt of a turn that was not played, for a critic (`split_end`).
`segment_starts` holds the index of each segment's first token; the first is 0.

Two segments may begin with the same tokens, as the conversations of an agent that asks twice. Only
the earlier one holds them. `segment_prefixes` has, for each segment, an earlier segment and how
many tokens of its row come first. In the later row they are masked from the loss.

Example: starts [0, 4], prefixes [0, 0, 0, 2], tokens [p a q b r c]: the rows are [p a q b] and
[p a r c]. If a and b are sampled in the first row, only c is trained in the second.

A fork continues the episode of another member of its group, its trunk. It has the trunk's tokens up
to its first own turn. They are context there, so each sampled token is trained once: in the trunk.

Example (two shared turns): the trunk is [p a q b r c], of which a, b and c are sampled. Its fork is
[p a q b r d s e], of which d and e are sampled.

A part is a fork of its own episode: turns that were trained before, or are stale, are context.
"""

import hashlib
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from common.wire.messages import Trajectory

TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", "turn_ids")
EXPERT_DTYPES = (np.dtype("uint8"), np.dtype("int16"))
EXPERT_COLUMNS = ("expert_ids", "expert_mask")  # Empty if the engine records no experts.


@dataclass(frozen=True, slots=True)
class RoutingShape:
    """The sizes of a mixture of experts."""

    num_layers: int  # All layers of the network, with and without experts.
    num_chosen: int  # Experts of a token in one layer.
    num_experts: int


class Aside(IntEnum):
    """Kinds of answers that are not sent to the environment."""

    SUMMARY = 0
    PLAN = 1
    REFLECTION = 2
    BRANCH = 3
    RETURN = 4


_WHOLE = np.zeros(0, dtype=np.int32)


def segments_of(trajectory: Trajectory) -> list[slice]:
    """Return the slice of each segment in the token arrays; one slice if there is one segment."""
    num_tokens = len(trajectory.token_ids)
    starts: list[int] = trajectory.segment_starts.tolist() or [0]
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)]


def prefixes_of(trajectory: Trajectory) -> list[tuple[int, int]]:
    """Return (earlier segment, number of its row's first tokens) for each segment."""
    pairs: list[list[int]] = trajectory.segment_prefixes.reshape(-1, 2).tolist()
    return [(row, num) for row, num in pairs] or [(0, 0)] * len(segments_of(trajectory))


def row_lengths(trajectory: Trajectory) -> list[int]:
    """Return the number of tokens of each row, with its prefix."""
    parts = zip(segments_of(trajectory), prefixes_of(trajectory), strict=True)
    return [num + part.stop - part.start for part, (_, num) in parts]


def num_rows(trajectory: Trajectory) -> int:
    """Return the number of training rows; the prompt after the last turn is none of them."""
    parts = segments_of(trajectory)
    has_end = len(parts) > 1 and not trajectory.loss_mask[parts[-1]].any()
    return len(parts) - has_end


def as_rows(trajectory: Trajectory) -> list[Trajectory]:
    """Return each segment as a one-segment trajectory. Fields of the episode are unchanged.

    The prompt after the last turn is left out, see `split_end`.
    """
    return split_end(trajectory)[0]


def split_end(trajectory: Trajectory) -> tuple[list[Trajectory], Trajectory | None]:
    """Return the training rows, and the segment of the prompt after the last turn, or None.

    An episode that was cut short for a critic may end with a segment that has no sampled token: the
    prompt of the next turn, where the critic reads the value of the end.
    """
    parts = _parts(trajectory)
    if len(parts) > 1 and not parts[-1].loss_mask.any():
        return parts[:-1], parts[-1]
    return parts, None


def _parts(trajectory: Trajectory) -> list[Trajectory]:
    """Return each segment as a one-segment trajectory, with its prefix."""
    if len(trajectory.segment_starts) < 2:
        return [trajectory]
    names = _columns_of(trajectory)
    rows: list[Trajectory] = []
    for part, (earlier, num) in zip(segments_of(trajectory), prefixes_of(trajectory), strict=True):
        columns = {name: getattr(trajectory, name)[part] for name in names}
        if num:
            before = as_context({name: getattr(rows[earlier], name)[:num] for name in names})
            columns = {name: np.concatenate([before[name], columns[name]]) for name in names}
        moved = [(first + num, end + num, kind) for first, end, kind in asides_of(trajectory, part)]
        rows.append(
            replace(
                trajectory,
                segment_starts=_WHOLE,
                segment_prefixes=_WHOLE,
                asides=np.array(moved, np.int32).ravel(),
                **columns,
            )
        )
    return rows


def as_context(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return columns of tokens in which none is sampled."""
    return {
        **columns,
        "loss_mask": np.zeros_like(columns["loss_mask"]),
        "logprobs": np.zeros_like(columns["logprobs"]),
        "versions": np.full_like(columns["versions"], -1),
    }


def without_prefixes(trajectory: Trajectory) -> Trajectory:
    """Return the episode with whole rows as its segments, as older versions read it."""
    return joined(_parts(trajectory)) if trajectory.segment_prefixes.size else trajectory


def joined(rows: list[Trajectory]) -> Trajectory:
    """Return the episode that consists of these segments in order."""
    if len(rows) == 1:
        return rows[0]
    starts = np.cumsum([0, *(len(row.token_ids) for row in rows[:-1])])
    names = _columns_of(rows[0])
    columns = {name: np.concatenate([getattr(r, name) for r in rows]) for name in names}
    moved = [
        (first + start, end + start, kind)
        for row, start in zip(rows, starts.tolist(), strict=True)
        for first, end, kind in asides_of(row)
    ]
    asides = np.array(moved, dtype=np.int32).ravel()
    return replace(rows[0], segment_starts=starts.astype(np.int32), asides=asides, **columns)


def _columns_of(trajectory: Trajectory) -> tuple[str, ...]:
    has_experts = trajectory.expert_mask.size > 0
    return (*TOKEN_COLUMNS, *EXPERT_COLUMNS) if has_experts else TOKEN_COLUMNS


def asides_of(trajectory: Trajectory, part: slice | None = None) -> list[tuple[int, int, int]]:
    """Return (first token, end, `Aside`) of the answers that are not sent to the environment.

    Args:
        part: only answers in this slice, with indices relative to its start.
    """
    start, stop = (part.start, part.stop) if part else (0, len(trajectory.token_ids))
    spans = trajectory.asides.reshape(-1, 3)
    first, end = np.searchsorted(spans[:, 0], (start, stop))
    asides: list[list[int]] = spans[first:end].tolist()
    return [(a - start, b - start, kind) for a, b, kind in asides]


def refusal_of_starts(trajectory: Trajectory) -> str:
    """Return why `segment_starts` is invalid; "" if it is valid."""
    starts = trajectory.segment_starts
    num_tokens = len(trajectory.token_ids)
    if starts.dtype != np.int32 or starts.ndim != 1:
        return f"segment_starts is {starts.dtype.name} {starts.shape}, not [num_segments] int32"
    if starts.size and (starts[0] != 0 or not (np.diff(starts, append=num_tokens) > 0).all()):
        return (
            f"segment_starts {starts.tolist()[:16]} must start at 0 and increase up to"
            f" {num_tokens} tokens"
        )
    return ""


def refusal_of_prefixes(trajectory: Trajectory) -> str:
    """Return why `segment_prefixes` is invalid beside valid `segment_starts`; "" if it is valid."""
    prefixes = trajectory.segment_prefixes
    num_segments = len(segments_of(trajectory))
    if prefixes.dtype != np.int32 or prefixes.shape not in ((0,), (2 * num_segments,)):
        return (
            f"segment_prefixes is {prefixes.dtype.name} {prefixes.shape}, not [0] int32 or"
            f" [{2 * num_segments}] int32"
        )
    lengths = row_lengths(trajectory)
    for number, (earlier, num) in enumerate(prefixes_of(trajectory)):
        is_earlier = 0 <= earlier < number and 0 <= num <= lengths[earlier]
        if not (is_earlier or (number == earlier == num == 0)):
            return (
                f"segment {number} begins with {num} tokens of segment {earlier}; it must be an"
                " earlier one with so many tokens"
            )
    return ""


def refusal_of_asides(trajectory: Trajectory) -> str:
    """Return why `asides` is invalid; "" if it is valid."""
    asides = trajectory.asides
    num_tokens = len(trajectory.token_ids)
    if asides.dtype != np.int32 or asides.ndim != 1 or asides.size % 3:
        return f"asides is {asides.dtype.name} {asides.shape}, not [3 * num] int32"
    firsts, ends, kinds = asides.reshape(-1, 3).T
    edges = asides.reshape(-1, 3)[:, :2].ravel()
    is_ordered = (firsts < ends).all() and (np.diff(edges) >= 0).all()
    if asides.size and not (is_ordered and edges[0] >= 0 and edges[-1] <= num_tokens):
        return f"asides {asides.tolist()[:16]} must be ordered spans within {num_tokens} tokens"
    if not set(kinds.tolist()) <= set(Aside):
        return f"asides have unknown kinds: {sorted(set(kinds.tolist()))[:16]}"
    return ""


def refusal_of_segments(trajectory: Trajectory) -> str:
    """Return why the segments cannot be trained as rows; "" if they can."""
    parts = segments_of(trajectory)
    prefixes = prefixes_of(trajectory)
    for number, part in enumerate(parts):
        mask = trajectory.loss_mask[part]
        is_end = 0 < number == len(parts) - 1  # `split_end` returns it.
        has_context = not mask[0] or prefixes[number][1] > 0
        if not has_context or not (mask.any() or is_end):
            what = "has no sampled token" if has_context else "begins with a sampled token"
            return f"segment {number} {what}"
    return ""


def refusal_of_experts(trajectory: Trajectory, shape: RoutingShape | None) -> str:
    """Return why the recorded experts are invalid; "" if they are valid or absent.

    Args:
        shape: sizes of the policy; None: not known, so ids and sizes are not checked.
    """
    ids = trajectory.expert_ids
    mask = trajectory.expert_mask
    num_tokens = len(trajectory.token_ids)
    if mask.dtype != np.bool_ or ids.dtype not in EXPERT_DTYPES:
        return (
            f"expert_ids has dtype {ids.dtype.name} and expert_mask has dtype {mask.dtype.name},"
            " expected uint8 or int16, and bool"
        )
    if not mask.size and ids.shape == (0,):
        return ""
    if mask.shape != (num_tokens,) or ids.ndim != 3 or len(ids) != num_tokens:
        return (
            f"expert_ids has shape {ids.shape} and expert_mask has shape {mask.shape}, but"
            f" token_ids has {num_tokens} tokens"
        )
    if shape is None:
        return ""
    sizes = (shape.num_layers, shape.num_chosen)
    if ids.shape[1:] != sizes:
        return f"expert_ids has shape {ids.shape}, but the policy has [layer, chosen] = {sizes}"
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < shape.num_experts:
        return (
            f"expert_ids has ids {ids.min()}..{ids.max()}, but the policy has"
            f" {shape.num_experts} experts"
        )
    return ""


def shared_digest(trajectory: Trajectory, num_turns: int) -> int:
    """Return a digest of 63 bits of the sampled tokens of an episode's first turns."""
    is_shared = trajectory.loss_mask & (trajectory.turn_ids < num_turns)
    return token_digest(trajectory.token_ids[is_shared])


def token_digest(token_ids: np.ndarray) -> int:
    """Return a digest of 63 bits of tokens, [num] int32."""
    digest = hashlib.blake2b(token_ids.tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def as_fork(trajectory: Trajectory, *, trunk: int, num_shared_turns: int) -> Trajectory:
    """Return an episode whose first turns are those of its trunk, as the fork that is trained.

    Rows without a token of its own are left out.

    Args:
        trunk: member number of the trunk.
        num_shared_turns: fewer than the turns of the episode.
    """
    return replace(
        from_turn(trajectory, num_shared_turns),
        trunk=trunk,
        num_shared_turns=num_shared_turns,
        shared_digest=shared_digest(trajectory, num_shared_turns),
    )


def from_turn(trajectory: Trajectory, num_turns: int) -> Trajectory:
    """Return an episode whose first turns are context. Rows without another turn are left out."""
    whole, end = split_end(trajectory)
    rows = [_forked(row, num_turns) for row in whole]
    rows = [row for row in rows if row.loss_mask.any()] or rows[-1:]
    return joined([*rows, end] if end is not None else rows)


def _forked(row: Trajectory, num_shared_turns: int) -> Trajectory:
    """Return a row in which the tokens of the shared turns are context."""
    is_shared = row.turn_ids < num_shared_turns
    columns = as_context(
        {name: getattr(row, name) for name in ("loss_mask", "logprobs", "versions")}
    )
    parted = {
        name: np.where(is_shared, column, getattr(row, name)) for name, column in columns.items()
    }
    return replace(row, **parted)


def part_of(trajectory: Trajectory, first_turn: int) -> Trajectory:
    """Return an episode whose turns before `first_turn` are context; itself if there are none."""
    if not first_turn:
        return trajectory
    part = from_turn(trajectory, first_turn)
    return replace(part, trunk=trajectory.member, num_shared_turns=first_turn)


def first_fresh_turn(trajectory: Trajectory, *, least_version: int) -> int:
    """Return the turn after the last one that has a token of a version below `least_version`."""
    is_stale = trajectory.loss_mask & (trajectory.versions < least_version)
    return int(trajectory.turn_ids[is_stale].max()) + 1 if is_stale.any() else 0
