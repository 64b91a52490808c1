"""Names of the metrics that record an episode's seat and opponent."""

import re

_SEAT = re.compile(r"seat_(\d+)_reward")
_OPPONENT = re.compile(r"against_(.+)_reward")


def seat_metrics(seat: int, opponent: str, reward: float) -> dict[str, float]:
    """Return the metrics of an episode in a seat; an empty `opponent` has none of its own."""
    names = [f"seat_{seat}_reward", *([f"against_{opponent}_reward"] if opponent else [])]
    return dict.fromkeys(names, reward)


def role_of(metrics: dict[str, float]) -> str:
    """Return a name of the seat and the opponent that metrics record; "" without seats."""
    parts = [
        match[1] for kind in (_SEAT, _OPPONENT) for match in map(kind.fullmatch, metrics) if match
    ]
    return "/".join(parts)
