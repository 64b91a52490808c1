"""Names of groups and episodes."""


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
