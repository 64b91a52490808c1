"""Names of groups, episodes and items."""

import re

_FAR = re.compile(r"(?P<subset>.+)@(?P<low>[0-9]{1,6})\.\.(?P<high>[0-9]{1,6})")


def episode_id_of(group_id: str, member: int) -> str:
    """Return the id of a member of a group."""
    return f"{group_id}/{member}"


def split_episode_id(episode_id: str) -> tuple[str, int]:
    """Return (group id, member); member -1 if the id is none of ours."""
    group_id, _, member = episode_id.rpartition("/")
    return group_id, int(member) if member.isascii() and member.isdigit() else -1


def subset_of(item_id: str) -> str:
    """Return the subset of an item id: "GoToLocal" of "GoToLocal-train-17"."""
    return item_id.rsplit("-", 2)[0]


def subset_at(subset: str, low: int, high: int) -> str:
    """Return the name of a subset's items whose expert needs so many turns: "GoTo@4..8"."""
    return f"{subset}@{low}..{high}"


def distance_of(subset: str) -> tuple[str, int, int] | None:
    """Return (subset, least, most turns) of what `subset_at` named; None for any other name."""
    match = _FAR.fullmatch(subset)
    return (match["subset"], int(match["low"]), int(match["high"])) if match else None


def training_number(name: str) -> int | None:
    """Return the number of a training group, or of an episode's group; None for any other name.

    Groups are numbered in the order in which the scheduler opens them.

    Example: "g0000012", "g0000012/3" -> 12; "eval-before-model/3" -> None.
    """
    digits = name.partition("/")[0][1:]
    is_number = name.startswith("g") and digits.isascii() and digits.isdigit()
    return int(digits) if is_number else None


def is_below(group_id: str, number: int) -> bool:
    """True for a training group that was opened before number `number`."""
    own = training_number(group_id)
    return own is not None and own < number
