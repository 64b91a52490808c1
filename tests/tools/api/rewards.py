"""Rewards of a user, as objects of a package."""


def grade(completion: str) -> float:
    """Return 1 for an answer with a digit."""
    return float(any(map(str.isdigit, completion)))


class Judge:
    """A reward with a state, which no role can import."""

    def grade(self, completion: str) -> float:
        """Return the same grade."""
        return grade(completion)
