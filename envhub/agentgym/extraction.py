"""Extraction of the action from a model's text, by the rules of each AgentGym client."""

import re
from dataclasses import dataclass

from envhub.agentgym.dialects import Dialect, Extraction
from envhub.env import Style, action_text
from envhub.web.actions import FENCED, NO_FENCE

MARK = "Action:"
END_OF_TEXT = "</s>"
SEVERAL_ACTIONS = "Error: Only one 'Action' is allowed per response. Please adjust your response."
ACTION_LINE = re.compile(r"Action:\s*([^\n]*)")
NOT_PLAIN = re.compile(r"[^A-Za-z0-9, ]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extracted:
    """The action to send, or the message for the agent if no action is sent."""

    action: str = ""
    complaint: str = ""


def extract(dialect: Dialect, text: str, style: Style) -> Extracted:
    """Return the action in `text`.

    In AgentGym's style, a text without the expected marks gives the action that AgentGym's client
    would send, often "". In the compact style, such a text is itself the action.
    """
    if dialect.extraction in (Extraction.LAST_ACTION, Extraction.FIRST_ACTION):
        text = text.removesuffix(END_OF_TEXT)  # The other clients do not remove it.
    is_bare = style is Style.COMPACT and MARK not in text and "```" not in text
    match dialect.extraction:
        case Extraction.ONE_ACTION:
            return _one_action(text, is_bare=is_bare)
        case Extraction.LAST_ACTION:
            return Extracted(action=_last_action(text, is_bare=is_bare))
        case Extraction.FIRST_ACTION:
            parts = text.split(MARK)
            return Extracted(action=parts[min(1, len(parts) - 1)].strip())
        case Extraction.SQL_BLOCK:
            return Extracted(action=text.rpartition("```sql")[2].partition("```")[0].strip())
        case Extraction.FENCED:
            if is_bare:
                return Extracted(action=f"```{text.strip()}```")
            is_fenced = FENCED.search(text) is not None
            return Extracted(action=text) if is_fenced else Extracted(complaint=NO_FENCE)
        case Extraction.WHOLE | Extraction.TOOL:
            return Extracted(action=text)


def _one_action(text: str, *, is_bare: bool) -> Extracted:
    """Return the only action of a text, in plain letters."""
    lines = [" ".join(text.split())] if is_bare else ACTION_LINE.findall(text)
    if len(lines) > 1:
        return Extracted(complaint=SEVERAL_ACTIONS)
    plain = NOT_PLAIN.sub("", lines[0]) if lines else ""
    return Extracted(action=" ".join(plain.split()))


def _last_action(text: str, *, is_bare: bool) -> str:
    """Return the last action of a text, "" for none."""
    if MARK in text:
        return action_text(text)
    is_action = is_bare or "search[" in text or "click[" in text
    return text.strip() if is_action else ""
