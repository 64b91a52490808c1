"""Splits the token ids of an episode into the messages of its chat template.

External text may contain the letters of a control token. Control tokens are therefore identified
by their ids. In the decoded text each one becomes its id between two marks that no text contains.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError

from common.errors import ConfigError
from common.formats.chat_template import render_chat

_OPEN = "\ue000"
_CLOSE = "\ue001"
_MARK = re.compile(f"{_OPEN}\\d+{_CLOSE}")
_USER = "\u2402user\u2403"
_ASSISTANT = "\u2402assistant\u2403"
_NEXT = "\u2402next\u2403"
_OTHER = "another chat template produced its tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One message. A sampled message is a contiguous run of tokens with `loss_mask` True."""

    role: str  # "system", "user", "tool" or "assistant" (the agent)
    text: str
    is_sampled: bool = False

    @property
    def is_agent(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text of a template before and after a message that follows an agent's message."""

    role: str
    before: str
    after: str


class Framing:
    """Text that one tokenizer's chat template adds around and between messages."""

    def __init__(self, tokenizer: Any, *, day: str = "") -> None:
        """Render probes. Raises: ConfigError: no template, or one that rewrites earlier turns.

        Args:
            day: the date in the prompts, as in `render_chat`.
        """
        self._tokenizer = tokenizer
        self._day = day
        self._control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        user = {"role": "user", "content": _USER}
        asked = [user, {"role": "assistant", "content": _ASSISTANT}]
        head, _, after_user = self._render([user]).partition(_USER)
        both = self._render([*asked, {"role": "user", "content": _NEXT}])
        between, found, _ = both.partition(_ASSISTANT)[2].partition(_NEXT)
        if not found or not both.startswith(head):
            raise ConfigError(
                "the chat template rewrites earlier turns, so tokens cannot be split into messages"
            )
        self._head, after = self._framed(head), self._framed(after_user)
        framed = self._framed(between)
        mark = _MARK.match(framed)
        self._end_of_turn = mark[0] if mark else ""
        own = _Frame("user", framed.removeprefix(self._end_of_turn), after)
        self._frames = [own]
        self._system = self._system_frame(user)
        if (told := self._tool_frame(asked[0], head + _USER + after_user)) is not None:
            self._frames.insert(0, told)  # First, since the user's frame may be a prefix of it.

    def messages(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> list[Spoken]:
        """Return the messages of a row of tokens, user and agent in turn.

        Args:
            token_ids, loss_mask: [seq]

        Raises: ConfigError: the tokens do not match this template.
        """
        edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(token_ids)]
        said: list[Spoken] = []
        for start, end in itertools.pairwise(edges):
            text = self._marked(token_ids[start:end].tolist())
            if loss_mask[start]:
                own = _MARK.sub("", text)
                said.append(Spoken(role="assistant", text=own, is_sampled=True))
                continue
            if start == 0:
                said += self._begun(text)
                continue
            text = text.removeprefix(self._end_of_turn)
            if end == len(token_ids) and not any(text.startswith(f.before) for f in self._frames):
                break  # The template's text after the last turn.
            said += self._unsampled(text)
        return said

    def _begun(self, text: str) -> list[Spoken]:
        """Return the messages before the first sampled one."""
        user = self._frames[-1]
        if text.startswith(self._head) and not self._has_system(text):
            return self._unsampled(user.before + text[len(self._head) :])
        if self._system is None or not text.startswith(self._system.before):
            raise ConfigError(_OTHER)
        told, found, rest = text[len(self._system.before) :].partition(self._system.after)
        if not found:
            raise ConfigError(_OTHER)
        return [
            Spoken(role="system", text=_MARK.sub("", told)),
            *self._unsampled(user.before + rest),
        ]

    def _has_system(self, text: str) -> bool:
        """Return whether a text that begins like a user's message begins with a system message."""
        frame = self._system
        after = self._frames[-1].after
        return (
            frame is not None
            and text.startswith(frame.before)
            and _MARK.search(frame.after) is not None
            and frame.before == self._head
            and frame.after in text[len(frame.before) :].partition(after)[0]
        )

    def _unsampled(self, text: str) -> list[Spoken]:
        said: list[Spoken] = []
        while True:
            frame = next((f for f in self._frames if text.startswith(f.before)), None)
            if frame is None:
                raise ConfigError(_OTHER)
            inner, found, text = text[len(frame.before) :].partition(frame.after)
            if not found:
                raise ConfigError(_OTHER)
            said.append(Spoken(role=frame.role, text=_MARK.sub("", inner)))
            if not text:
                return said
            answer, found, text = text.partition(self._end_of_turn)
            if not found:
                raise ConfigError(_OTHER)
            said.append(Spoken(role="assistant", text=answer))

    def _system_frame(self, user: dict[str, Any]) -> _Frame | None:
        """Return the frame of a system message; None: the template supports none."""
        try:
            text = self._render([{"role": "system", "content": _NEXT}, user])
        except (TemplateError, TypeError):
            return None
        before, found, rest = text.partition(_NEXT)
        between, has_user, _ = rest.partition(_USER)
        if not (found and has_user and between):
            return None
        return _Frame("system", self._framed(before), self._framed(between))

    def _tool_frame(self, user: dict[str, Any], asked: str) -> _Frame | None:
        """Return the frame of a tool's answer; None: there is none, or it equals a user's."""
        function = {"name": "f", "arguments": {"action": _ASSISTANT}}
        call = {"type": "function", "id": "call00000", "function": function}
        called = {"role": "assistant", "content": "", "tool_calls": [call]}
        told = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": _NEXT}
        try:
            text = self._render([user, called, told])
        except (TemplateError, TypeError):
            return None
        before, found, after = text.removeprefix(asked).partition(_NEXT)
        _, has_end, lead = self._framed(before).partition(self._end_of_turn)
        if not (text.startswith(asked) and found and self._end_of_turn and has_end):
            return None
        frame = _Frame("tool", lead, self._framed(after))
        return None if frame.before == self._frames[0].before else frame

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so tokens cannot be split into messages"
            )
        return render_chat(self._tokenizer, messages, day=self._day)

    def _framed(self, text: str) -> str:
        return self._marked(self._tokenizer.encode(text, add_special_tokens=False))

    def _marked(self, token_ids: list[int]) -> str:
        """Return the text with each control token's id between two marks."""
        parts: list[str] = []
        for is_control, run in itertools.groupby(token_ids, self._control.__contains__):
            if is_control:
                parts += [f"{_OPEN}{number}{_CLOSE}" for number in run]
            else:
                parts.append(self._tokenizer.decode(list(run)))
        return "".join(parts)
