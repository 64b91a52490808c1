"""A held-out item of an evaluation, as the chooser hands it to the player and the tables."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutItem:
    """One item and how it is played: at the full horizon, once for each seed."""

    env: str
    subset: str
    item_id: str
    horizon: int  # most turns
    seeds: tuple[int, ...]  # of the environment, one for each sample
