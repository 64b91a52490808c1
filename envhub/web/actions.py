"""The action language of web pages: `click [12]`, `type [7] [blue socks] [1]`, `stop [42]`."""

import re
from dataclasses import dataclass
from enum import StrEnum

from envhub.env import Style, action_text
from envhub.tables import read_instructions, read_table

MAX_TEXT_CHARS = 4000
NO_FENCE = (
    "Cannot parse action from response. Your action should be inside triple backticks (```). "
    "Please adjust accordingly."
)
FENCED = re.compile(r"```(.*?)```", re.DOTALL)
WORD = re.compile(r"\s*([a-z_]+)")


class WebActionType(StrEnum):
    """The kinds of action."""

    CLICK = "click"
    HOVER = "hover"
    TYPE = "type"
    PRESS = "press"
    SCROLL = "scroll"
    DRAG = "drag"
    MOUSE_CLICK = "mouse_click"
    MOUSE_MOVE = "mouse_move"
    MOUSE_DRAG = "mouse_drag"
    NEW_TAB = "new_tab"
    TAB_FOCUS = "tab_focus"
    CLOSE_TAB = "close_tab"
    GOTO = "goto"
    GO_BACK = "go_back"
    GO_FORWARD = "go_forward"
    STOP = "stop"


POINTER_KINDS = frozenset(
    {
        WebActionType.DRAG,
        WebActionType.MOUSE_CLICK,
        WebActionType.MOUSE_MOVE,
        WebActionType.MOUSE_DRAG,
    }
)
WEB_KINDS = frozenset(WebActionType) - POINTER_KINDS


@dataclass(frozen=True, slots=True)
class ActionSyntax:
    """Syntax of one kind of action: an example, a pattern of its arguments, and its effect."""

    text: str
    arguments: str
    meaning: str


ID = r"\[\s*+(?P<id>\d{1,6})\s*+\]"
POINT = r"\[\s*+\d{1,4}\s*+,\s*+\d{1,4}\s*+\]"
_TABLE = read_table(__file__, "actions.yaml")
FORMS = {WebActionType(name): ActionSyntax(**form) for name, form in _TABLE["forms"].items()}


def _pattern(form: ActionSyntax) -> re.Pattern[str]:
    """Return the pattern of an action's arguments."""
    arguments = form.arguments.replace("{id}", ID).replace("{point}", POINT)
    return re.compile(rf"\s*+{arguments}\s*+", re.DOTALL)


COMPILED = {kind: _pattern(form) for kind, form in FORMS.items()}
KEYS = _TABLE["keys"]
KEY_NAMES = {word: name for name, words in KEYS.items() for word in words.split()}
MODIFIERS = ("Control", "Shift", "Alt")


class InvalidAction(ValueError):
    """The text is not a valid action; the message is written for the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebAction:
    """One action.

    Attributes:
        element: id of a node in the last observation, or a tab's number; -1 for none.
        target: id of the node onto which `element` is dragged; -1 for none.
        text: the text to type, the key, the direction, the URL or the answer.
        enter: whether Enter follows the typed text.
        points: positions of the mouse, in pixels from the top left corner of the viewport.
    """

    kind: WebActionType
    element: int = -1
    target: int = -1
    text: str = ""
    enter: bool = False
    points: tuple[tuple[int, int], ...] = ()


def fenced(reply: str) -> str:
    """Return the text inside the first pair of triple backticks in a reply.

    Raises: InvalidAction: there is no such pair.
    """
    match = FENCED.search(reply)
    if match is None:
        raise InvalidAction(NO_FENCE)
    return match[1].strip()


def parse(text: str, kinds: frozenset[WebActionType] = WEB_KINDS) -> WebAction:
    """Return the action that a text denotes.

    Raises: InvalidAction: the word is unknown, or its arguments are malformed.
    """
    word = WORD.match(text)
    if word is None or word[1] not in kinds:
        raise InvalidAction(f'Invalid action "{text[:200]}". Known actions: {_known(kinds)}.')
    kind = WebActionType(word[1])
    match = COMPILED[kind].fullmatch(text, word.end())
    if match is None:
        raise InvalidAction(
            f'Invalid {kind} action "{text[:200]}". Its form is {FORMS[kind].text}.'
        )
    parts = {name: value for name, value in match.groupdict().items() if value is not None}
    words = parts.get("text", "")
    if kind is not WebActionType.TYPE:
        words = words.strip()
    if len(words) > MAX_TEXT_CHARS:
        raise InvalidAction(f"Invalid {kind} action: longer than {MAX_TEXT_CHARS} characters.")
    if kind is WebActionType.SCROLL:
        words = "down" if words.endswith("down") else "up"
    if kind is WebActionType.PRESS:
        words = key_name(words)
    return WebAction(
        kind=kind,
        element=int(parts.get("id", -1)),
        target=int(parts.get("to", -1)),
        text=words,
        enter=kind is WebActionType.TYPE and parts.get("enter", "1") == "1",
        points=_points(parts.get("points", "")),
    )


def _points(words: str) -> tuple[tuple[int, int], ...]:
    """Return the points in a text of numbers."""
    numbers = [int(number) for number in re.findall(r"\d+", words)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def describe(action: WebAction) -> str:
    """Return the text of an action in this language."""
    parts = [action.kind.value]
    parts += [f"[{number}]" for number in (action.element, action.target) if number >= 0]
    parts += [f"[{x},{y}]" for x, y in action.points]
    if action.text or action.kind in (WebActionType.TYPE, WebActionType.STOP):
        parts.append(f"[{action.text}]")
    if action.kind is WebActionType.TYPE:
        parts.append(f"[{int(action.enter)}]")
    return " ".join(parts)


def read_reply(reply: str, style: Style) -> str:
    """Return the action's text in an agent's reply. AgentGym's agents put it between backticks.

    Raises: InvalidAction: the backticks are missing in AgentGym's style.
    """
    return fenced(reply) if style is Style.AGENTGYM else action_text(reply)


def as_reply(action: str, style: Style) -> str:
    """Return an agent's reply that contains an action."""
    if style is Style.COMPACT:
        return action
    return f"In summary, the next action I will perform is ```{action}```"


def key_name(combination: str) -> str:
    """Return a key combination with the browsers' key names: `ctrl+a` is `Control+a`.

    Raises: InvalidAction: an unknown key.
    """
    names = [part.strip() for part in re.split(r"\+(?=.)", combination)]
    keys = [KEY_NAMES.get(name.lower(), name) for name in names]
    *modifiers, last = keys
    is_function_key = re.fullmatch(r"F([1-9]|1[0-2])", last) is not None
    is_key = len(last) == 1 or last in KEYS or is_function_key
    if not is_key or not all(key in MODIFIERS for key in modifiers):
        raise InvalidAction(f'Invalid press action: no key "{combination[:40]}".')
    return "+".join(keys)


def _known(kinds: frozenset[WebActionType]) -> str:
    """Return the known actions as text."""
    return ", ".join(form.text for kind, form in FORMS.items() if kind in kinds)


def read_web_instructions(
    code: str, kinds: frozenset[WebActionType] = WEB_KINDS
) -> dict[Style, str]:
    """Return `read_instructions`, where {actions} is one line of explanation for each kind."""
    lines = [f"{form.text}: {form.meaning}" for kind, form in FORMS.items() if kind in kinds]
    texts = read_instructions(code)
    return {style: text.replace("{actions}", "\n".join(lines)) for style, text in texts.items()}
