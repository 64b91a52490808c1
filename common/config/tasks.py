"""The section `tasks`: the tasks of the training mixture."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from omegaconf import MISSING

from common.config.horizon import MAX_TURNS
from common.config.knobs import ENV_NAME, NAME, Contradiction, knob
from common.ids import distance_of, subset_at


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    """One part of the training mixture."""

    env: str = knob(
        MISSING, 'Names the environment. Of "a|b" the first configured one is used.', form=ENV_NAME
    )
    subset: str = knob(MISSING, "Selects the subset of the environment's items.", form=NAME)
    weight: float = knob(1.0, "Sets the weight of the task relative to the other tasks.", ge=0)
    distance: list[int] = knob(
        [],
        "Selects items by the number of turns that their expert needs: [least, most]. [] selects "
        "all.",
        ge=1,
        le=MAX_TURNS,
    )

    def contradictions(self) -> Iterator[Contradiction]:
        if self.distance and (len(self.distance) != 2 or self.distance[0] > self.distance[1]):
            yield "distance", self.distance, "must be [least, most] in turns, or [] for all items"

    def items(self, bound: int = 0) -> str:
        """Return the name of its items: the subset, or a range of distances like "GoTo@4..8".

        Args:
            bound: largest distance that the curriculum currently allows; 0: no bound.
        """
        if not self.distance:
            return self.subset
        low, high = self.distance
        return subset_at(self.subset, low, min(high, bound or high))


def are_apart(one: TaskSection, other: TaskSection) -> bool:
    """Return whether both tasks have distances, and the ranges do not overlap."""
    ranges = sorted([one.distance, other.distance])
    return bool(ranges[0]) and ranges[0][1] < ranges[1][0]


def why_not_far(
    task: TaskSection, lengths_by_split: Mapping[str, Mapping[int, int]], items: str
) -> str:
    """Return why a task has no items at a distance; "" if it has some.

    Args:
        lengths_by_split: split -> expert's turns -> number of items; {} without an expert.
        items: name of the range as in `subsets_in_use`, without the environment.
    """
    _, low, high = distance_of(items) or ("", 0, 0)
    lengths = lengths_by_split.get("train", {})
    if any(low <= turns <= high for turns in lengths):
        return ""
    if not lengths:
        return f"the items of {task.env}/{task.subset} have no known distance"
    shown = ", ".join(f"{turns} ({num})" for turns, num in sorted(lengths.items()))
    return f"no training item of {task.subset} has this distance; turns (items): {shown}"
