"""Ids of groups, episodes and items, and the names of engines."""

import re
from collections.abc import Iterable

ENGINE_MARK = "~"  # Character between the name of an actor process and the number of an engine.
_ENGINE = re.compile(rf"(?P<process>.+){ENGINE_MARK}[1-9][0-9]{{0,3}}")
_AFTER = re.compile(r"eval-after(?:-(?P<number>[1-9][0-9]{0,6}))?-model")
_FAR = re.compile(r"(?P<subset>.+)@(?P<low>[0-9]{1,6})\.\.(?P<high>[0-9]{1,6})")


def episode_id_of(group_id: str, member: int) -> str:
    """Return the episode id of a group's member."""
    return f"{group_id}/{member}"


def engine_names(process: str, num_engines: int) -> list[str]:
    """Return the names under which the engines of an actor process take part in a run.

    Example: ("actor-0", 3) -> ["actor-0", "actor-0~1", "actor-0~2"].
    """
    return [process, *(f"{process}{ENGINE_MARK}{i}" for i in range(1, num_engines))]


def process_of(engine: str) -> str:
    """Return the name of an engine's process: "actor-0" of "actor-0~2" and of "actor-0"."""
    match = _ENGINE.fullmatch(engine)
    return match["process"] if match else engine


def split_episode_id(episode_id: str) -> tuple[str, int]:
    """Return (group id, member). The member is -1 if the id has no valid member number."""
    group_id, _, member = episode_id.rpartition("/")
    return group_id, int(member) if member.isascii() and member.isdigit() else -1


def last_after(group_ids: Iterable[str]) -> str | None:
    """Return the newest evaluation of the model after training; None without one.

    A run that was continued after its end has several.

    Example: ["eval-before-model", "eval-after-model", "eval-after-2-model"] -> the last one.
    """
    matches = {group_id: match for group_id in group_ids if (match := _AFTER.fullmatch(group_id))}
    return max(matches, key=lambda group_id: int(matches[group_id]["number"] or 1), default=None)


def subset_of(item_id: str) -> str:
    """Return the subset of an item id: "GoToLocal" of "GoToLocal-train-17"."""
    return item_id.rsplit("-", 2)[0]


def is_training_item(item_id: str) -> bool:
    """Return whether an item id has the split "train": True for "my-test-set-train-17"."""
    return item_id.rsplit("-", 2)[1:-1] == ["train"]


def subset_at(subset: str, low: int, high: int) -> str:
    """Return the name for a subset's items at a distance of `low` to `high` turns: "GoTo@4..8"."""
    return f"{subset}@{low}..{high}"


def distance_of(subset: str) -> tuple[str, int, int] | None:
    """Return (subset, low, high) of a name made by `subset_at`; None for any other name."""
    match = _FAR.fullmatch(subset)
    return (match["subset"], int(match["low"]), int(match["high"])) if match else None


def training_number(name: str) -> int | None:
    """Return the number of a training group from a group's or episode's id; None otherwise.

    The scheduler numbers groups in the order in which it opens them.

    Example: "g0000012", "g0000012/3" -> 12; "eval-before-model/3" -> None.
    """
    digits = name.partition("/")[0][1:]
    is_number = name.startswith("g") and digits.isascii() and digits.isdigit()
    return int(digits) if is_number else None


def is_below(group_id: str, number: int) -> bool:
    """Return True for a training group that was opened before the group with this number."""
    number_of_group = training_number(group_id)
    return number_of_group is not None and number_of_group < number


def actor_name(number: int) -> str:
    """Return the name of an actor that the launcher starts."""
    return f"actor-{number}"
