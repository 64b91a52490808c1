"""Counts of refused requests, by client address and reason."""

from collections import Counter

MAX_ADDRESSES = 1_000  # Addresses with counts of their own; later ones are counted as "others".
MAX_SHOWN = 50
REFUSED = {
    400: "malformed",
    401: "token",
    403: "origin",
    413: "too_large",
    422: "invalid",
}  # Reasons by HTTP status.


class Refusals:
    """Requests and connections that a hub refused, by address and reason."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def note(self, client: tuple[str, int] | None, reason: str) -> None:
        """Count one refusal of a client, by the address that uvicorn reports."""
        address = client[0] if client else "unknown"
        if len(self._counts) >= MAX_ADDRESSES and address not in self._counts:
            address = "others"
        self._counts.setdefault(address, Counter())[reason] += 1

    def report(self) -> dict[str, int]:
        """Return the most frequent refusals by "address/reason", with their counts."""
        found = Counter(
            {f"{a}/{r}": n for a, c in self._counts.copy().items() for r, n in c.items()}
        )
        return dict(found.most_common(MAX_SHOWN))
