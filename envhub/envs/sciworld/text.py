"""Text processing of ScienceWorld's observations and actions."""

import re

MAX_ACTION_CHARS = 300
NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
AMBIGUOUS = "Ambiguous request:"

CHOICE = re.compile(r"^([0-9]+):", re.MULTILINE)
ROOM = re.compile(r"This .*?is called the (.+?)\. .*?you see:")
DOOR_STATE = re.compile(r"\(that is (open|closed)\)")
# A capital article occurs only at the start of a line. Elsewhere "A" is a name, as of a substance.
ARTICLE = re.compile(r"\ban? |^\s*An? ", re.MULTILINE)
OMITTED = frozenset({"the agent", "air"})  # These objects are in every room.


def one_line(text: str) -> str:
    """Return an action in the simulator's input format: printable ASCII, single spaces, bounded."""
    kept = "".join(c if " " <= c <= "~" else " " for c in text)
    return " ".join(kept.split())[:MAX_ACTION_CHARS].strip()


def plain(action: str) -> str:
    """Return an action without the capitals and full stops that small models add."""
    return action.lower().rstrip(" .!")


def is_understood(observation: str) -> bool:
    """Return False if the simulator found no action in the text."""
    return not observation.startswith(NOT_UNDERSTOOD)


def choices(observation: str) -> tuple[str, ...]:
    """Return the numbers that an ambiguous request offers; () for other observations."""
    return tuple(CHOICE.findall(observation)) if observation.startswith(AMBIGUOUS) else ()


def compact(observation: str) -> str:
    """Return an observation in fewer words, on one line."""
    if observation.startswith(AMBIGUOUS):
        return "which number? " + _listed(observation.splitlines()[1:])
    if not is_understood(observation):
        return "invalid action"
    text = observation.replace("In your inventory, you see:", "you hold:")
    text = ROOM.sub(r"\1:", text).replace("You also see:", "ways:")
    text = ARTICLE.sub("", text.replace("a substance called ", ""))
    text = DOOR_STATE.sub(r"\1", text)
    lines = [line for line in text.splitlines() if line.strip() not in OMITTED]
    return _listed(lines)


def _listed(lines: list[str]) -> str:
    """Return lines joined by semicolons, or by a space after a line that ends with a colon."""
    joined = ""
    for line in lines:
        words = " ".join(line.split()).rstrip(",.")
        if words:
            joined += f" {words}" if joined.endswith(":") else f"; {words}"
    return joined.removeprefix("; ")
