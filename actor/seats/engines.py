"""Names that the launcher and the actors share about the engines of opponents."""

KEY_VARIABLE = "LONGSTRIDE_OPPONENT_KEY"  # Environment variable with the key of the engines.
RUN_VARIABLE = "LONGSTRIDE_OPPONENT_RUN"  # Environment variable with the folder of their addresses.


def past_role(number: int) -> str:
    """Return the role of an engine of past versions."""
    return f"opponent-past-{number}"


def opponent_role(number: int) -> str:
    """Return the role of an opponent's engine, by the number of its folder."""
    return f"opponent-{number}"
