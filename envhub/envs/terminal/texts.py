"""Texts of the terminal: commands of actions, descriptions of results, and rewards."""

import json
import re

from envhub.sandbox.interface import LOGS, TESTS, CommandEnd, CommandResult

VERIFIER = f"{LOGS}/verifier"
FENCE = re.compile(r"```(?:bash|sh|shell|console)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
ENDS = {
    CommandEnd.TIMEOUT: "The command took longer than {limit:g} s.",
    CommandEnd.MEMORY: "The command exceeded the memory limit.",
    CommandEnd.FILES: "The command created too many files.",
}
# The shell keeps its directory and exported variables between commands.
SHELL = """
state=/tmp/.shell_state
trap '{ printf "cd %q\\n" "$PWD"; export -p; } >"$state" 2>/dev/null' EXIT
[ -f "$state" ] && . "$state" 2>/dev/null
eval "$1"
"""
CLEAR = f"""
chmod -R u+rwX {TESTS} {LOGS} 2>/dev/null
find {TESTS} {LOGS} -mindepth 1 -delete && mkdir {VERIFIER}
"""


def command_of(action: str) -> str:
    """Return the command of an action: its last fenced block, or the text after `Action:`."""
    blocks = FENCE.findall(action)
    text = blocks[-1] if blocks else action.rpartition("Action:")[2]
    return text.strip().encode("utf-8", errors="replace").decode()


def describe(result: CommandResult, limit_s: float, max_chars: int) -> str:
    """Return a command's output with notes; a long output loses its middle."""
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in result.text)
    if len(text) > max_chars:
        half = max_chars // 2
        note = f"\n[{len(text) - 2 * half} characters were left out here]\n"
        text = text[:half] + note + text[-half:]
    lines = [text.rstrip("\n")] if text.strip() else []
    if result.ended_by is not CommandEnd.EXIT:
        lines.append(ENDS[result.ended_by].format(limit=limit_s))
        lines.append("All processes were ended.")
    elif result.exit_code != 0:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "[no output]"


def reward_of(text: str) -> float:
    """Return the reward of reward.txt (a number) or reward.json (`reward`, or the mean of all).

    Raises: ValueError: it is no number in [0, 1].
    """
    held = json.loads(text)
    if isinstance(held, dict):
        values = [held["reward"]] if "reward" in held else [*held.values()]
        if not values or not all(isinstance(each, (int, float)) for each in values):
            raise ValueError(f"the rewards are {text.strip()[:80]!r}, not numbers")
        held = sum(values) / len(values)
    if isinstance(held, bool) or not isinstance(held, (int, float)) or not 0 <= held <= 1:
        raise ValueError(f"the reward is {text.strip()[:80]!r}, not a number in [0, 1]")
    return float(held)
