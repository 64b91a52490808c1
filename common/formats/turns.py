"""Measures the text that a chat template puts around and between messages.

Conversations of marker texts are rendered with the template itself. The generation prompt may
differ from the text before the same answer in a later prompt, such as `<think>` or a channel. A
rollout keeps the tokens of both the generation prompt and the sampled answer, so only the text
between turns has to be the same in all prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from common.errors import ConfigError
from common.text import shared_tags

Message = dict[str, Any]
USER = "\u2402user\u2403"
ASSISTANT = "\u2402assistant\u2403"
NEXT = "\u2402next\u2403"
SECOND = "\u2402second\u2403"
LAST = "\u2402last\u2403"
MARGIN = "\n "  # Whitespace around a text, to find out whether the template removes it.
SHOWN = 400  # Characters of a rendered text in an error.
# (messages, add_generation_prompt) -> text
RenderTurns = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPrompt:
    """The texts that an episode begins with, as its environment gives them."""

    env: str
    place: str  # The record or the item, for messages.
    messages: list[Message]  # The last one is the first observation.
    instruction: str = ""  # It comes before the first observation.
    # The agent's answer to the instruction; "": both texts are one message.
    acknowledgement: str = ""
    tools: Sequence[Message] = ()
    has_own_tools: bool = False  # The tools are the item's, not its environment's.
    may_be_cut: bool = False  # A page, which may lose its end, and no question.

    @property
    def text(self) -> str:
        """All messages as one text, as `data.max_length` measures it."""
        return "\n".join(str(each["content"]) for each in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Text of a chat template around and between messages.

    Example (Qwen3.5, which thinks):
        before    <|im_start|>user\\n
        closed    <|im_end|>\\n<|im_start|>assistant\\n
        asked     <think>\\n
        answered  ""
        between   <|im_end|>\\n<|im_start|>user\\n
        ended     <|im_end|>\\n
    """

    before: str  # Text before the first user's text.
    closed: str  # Text between a user's text and the answer, as far as all prompts have it.
    asked: str  # Rest of the generation prompt.
    answered: str  # Rest of the text before the answer in later prompts.
    between: str  # Text from the end of an answer to the next user's text.
    ended: str  # Text after an answer that ends the conversation.
    strips: bool  # The template removes whitespace around a user's text.

    @property
    def after_user(self) -> str:
        """Text after a user's text up to the answer to sample."""
        return self.closed + self.asked

    def shown(self, text: str) -> str:
        """Return a user's text as the template renders it."""
        return text.strip() if self.strips else text


def measure_turns(render: RenderTurns) -> Turns:
    """Return the text between turns.

    Raises: ConfigError: the template refuses or rewrites such a conversation; names the reason.
    """
    first = _rendered(render, _conversation(USER), is_asking=True)
    if first.count(USER) != 1:
        raise ConfigError(f"model.path: the chat template {_fault_of_user(render)}")
    before, _, after_user = first.partition(USER)
    both = _rendered(render, _conversation(USER, ASSISTANT, NEXT), is_asking=True)
    head, between, after_next = _parts(both, ASSISTANT, NEXT, earlier=first)
    if not head.startswith(before + USER):
        raise _rewrite_error(first, both, "changes the text before or in the first user's message")
    header = head.removeprefix(before + USER)
    closed = shared_tags(after_user, header)
    if after_next != after_user:
        law = "asks for a later answer in another form than for the first"
        raise _rewrite_error(first, both, law)
    _check_growth(render, both, between)
    ended = _rendered(render, _conversation(USER, ASSISTANT), is_asking=False)
    return Turns(
        before=before,
        closed=closed,
        asked=after_user.removeprefix(closed),
        answered=header.removeprefix(closed),
        between=between,
        ended=ended.rpartition(ASSISTANT)[2] if ASSISTANT in ended else between,
        strips=f"{MARGIN}{USER}{MARGIN}"
        not in _rendered(render, _conversation(f"{MARGIN}{USER}{MARGIN}"), is_asking=True),
    )


def _conversation(*texts: str) -> list[Message]:
    """Return texts as messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def _rendered(render: RenderTurns, messages: list[Message], *, is_asking: bool) -> str:
    """Return the chat template's text of messages. Raises: ConfigError: it refuses them."""
    try:
        return render(messages, is_asking)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(each["role"] for each in messages)
        raise ConfigError(
            f"model.path: the chat template refuses a conversation of {roles}: {error}; give"
            " another template (model.chat_template)"
        ) from error


def _parts(text: str, *marks: str, earlier: str) -> list[str]:
    """Return the texts before, between and after marks that must be there once, in this order."""
    pieces: list[str] = []
    rest = text
    for mark in marks:
        if rest.count(mark) != 1:
            raise _rewrite_error(earlier, text, "drops or repeats an earlier text")
        piece, _, rest = rest.partition(mark)
        pieces.append(piece)
    return [*pieces, rest]


def _rewrite_error(before: str, after: str, fault: str) -> ConfigError:
    """Return the error for a template that changes earlier turns."""
    return ConfigError(
        f"model.path: the chat template rewrites earlier turns: it {fault}, so token ids cannot be"
        f" kept; it renders {_cut(after)} after {_cut(before)}; give another template"
        " (model.chat_template)"
    )


def _cut(text: str) -> str:
    """Return the end of a rendered text for an error; the start has the longest system text."""
    return repr(text if len(text) <= SHOWN else f"...{text[-SHOWN:]}")


def _check_growth(render: RenderTurns, both: str, between: str) -> None:
    """Check with a third turn that earlier turns are kept, and that all turns have one form."""
    third = _rendered(render, _conversation(USER, ASSISTANT, NEXT, SECOND, LAST), is_asking=True)
    first_turns = both[: both.index(NEXT) + len(NEXT)]
    *_, again, _ = _parts(third, USER, ASSISTANT, NEXT, SECOND, LAST, earlier=both)
    if not third.startswith(first_turns):
        raise _rewrite_error(both, third, "changes two turns when a third one follows")
    if again != between:
        raise _rewrite_error(
            both, third, "has another text between later turns than between the first"
        )


def _fault_of_user(render: RenderTurns) -> str:
    """Return why a user's text is not in the rendered conversation once."""
    parts = [{"type": "text", "text": USER}]
    try:
        is_of_parts = USER in render([{"role": "user", "content": parts}], True)
    except (TemplateError, TypeError):
        is_of_parts = False
    if is_of_parts:
        return (
            "drops the user's text, since it shows content as a list of parts only (it is made for"
            " pictures); give a template that shows content as text (model.chat_template)"
        )
    return "drops the user's text; give a template that shows it (model.chat_template)"
