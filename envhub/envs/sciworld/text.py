"""Wordings of ScienceWorld's observations and instructions."""

import re

AGENTGYM_INSTRUCTION = """\
You are an agent in a world of science. Every round you are shown one observation and answer with \
one action that brings you nearer to the goal of the task.
The actions, where OBJ stands for an object and LOC for a place:
open OBJ; close OBJ; activate OBJ; deactivate OBJ; connect OBJ to OBJ; disconnect OBJ; \
use OBJ; use OBJ on OBJ; look around; look at OBJ; look in OBJ; read OBJ; move OBJ to OBJ; \
pick up OBJ; put down OBJ; pour OBJ into OBJ; dunk OBJ into OBJ; mix OBJ; go to LOC; eat OBJ; \
flush OBJ; focus on OBJ; wait; wait1; examine OBJ; task; inventory.
"focus on" tells which object the task is about, "wait" lets ten moments pass and "wait1" one, \
"task" repeats the task. When a request is ambiguous, answer with the number that you mean.
Answer in this form:
Thought:
<your thoughts>

Action:
<one action>"""

COMPACT_INSTRUCTION = """\
Do the science task. One action a turn: open, close, activate, deactivate, read, examine, \
look at, look in, pick up, put down, mix, eat, flush, disconnect OBJ; go to LOC; \
move OBJ to OBJ; pour OBJ in OBJ; dunk OBJ in OBJ; connect OBJ to OBJ; use OBJ on OBJ; \
focus on OBJ (only what the task names); look around; inventory; task; wait; wait1.
Action: <one action>"""

MAX_ACTION_CHARS = 300
NOT_UNDERSTOOD = ("No known action matches that input.", "Unknown action.")
AMBIGUOUS = "Ambiguous request:"

CHOICE = re.compile(r"^([0-9]+):", re.MULTILINE)
ROOM = re.compile(r"This .*?is called the (.+?)\. .*?you see:")
DOOR_STATE = re.compile(r"\(that is (open|closed)\)")
# Only a line begins with a capital article: elsewhere "A" is a name, as of a substance.
ARTICLE = re.compile(r"\ban? |^\s*An? ", re.MULTILINE)
NOT_TOLD = frozenset({"the agent", "air"})  # in every room


def one_line(text: str) -> str:
    """Returns an action as the simulator reads it: printable ASCII, single spaces, bounded."""
    kept = "".join(c if " " <= c <= "~" else " " for c in text)
    return " ".join(kept.split())[:MAX_ACTION_CHARS].strip()


def plain(action: str) -> str:
    """Returns an action without what small models add to it: capitals and a full stop."""
    return action.lower().rstrip(" .!")


def is_understood(observation: str) -> bool:
    """Returns False when the simulator found no action in the text."""
    return not observation.startswith(NOT_UNDERSTOOD)


def choices(observation: str) -> tuple[str, ...]:
    """Returns the numbers that an ambiguous request offers; none for other observations."""
    return tuple(CHOICE.findall(observation)) if observation.startswith(AMBIGUOUS) else ()


def compact(observation: str) -> str:
    """Returns an observation in fewer words, on one line."""
    if observation.startswith(AMBIGUOUS):
        return "which number? " + _listed(observation.splitlines()[1:])
    if not is_understood(observation):
        return "invalid action"
    text = observation.replace("In your inventory, you see:", "you hold:")
    text = ROOM.sub(r"\1:", text).replace("You also see:", "ways:")
    text = ARTICLE.sub("", text.replace("a substance called ", ""))
    text = DOOR_STATE.sub(r"\1", text)
    lines = [line for line in text.splitlines() if line.strip() not in NOT_TOLD]
    return _listed(lines)


def _listed(lines: list[str]) -> str:
    """Returns lines joined by semicolons, or by a space after one that announces a list."""
    joined = ""
    for line in lines:
        words = " ".join(line.split()).rstrip(",.")
        if words:
            joined += f" {words}" if joined.endswith(":") else f"; {words}"
    return joined.removeprefix("; ")
