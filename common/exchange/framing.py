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

from common.control_tokens import special_tokens
from common.errors import ConfigError
from common.formats.call_turn import CallTurn
from common.formats.chat_renderer import ChatRenderer
from common.formats.chat_template import render_chat

_OPEN = "\ue000"
_CLOSE = "\ue001"
_MARK = re.compile(f"{_OPEN}\\d+{_CLOSE}")
_USER = "\u2402user\u2403"
_NEXT = "\u2402next\u2403"
_END = re.compile(f"\\s*{_OPEN}\\d+{_CLOSE}")  # The token that ends an answer.
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
        """Measure the chat template. Raises: ConfigError: as `ChatRenderer`.

        Args:
            day: the date in the prompts, as in `render_chat`.
        """
        self._tokenizer = tokenizer
        self._day = day
        self._names = {
            number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()
        }
        self._names |= special_tokens(tokenizer)
        renderer = ChatRenderer(tokenizer)
        turns = renderer.turns
        self._ends = {f"{_OPEN}{number}{_CLOSE}" for number in renderer.end_of_turn_ids}
        self._headers = sorted(map(self._framed, (turns.asked, turns.answered)), key=len)
        user = {"role": "user", "content": _USER}
        self._head = self._framed(self._render([user]).partition(_USER)[0])
        self._after = self._framed(turns.closed)
        self._frames = self._frames_of("user", turns.between, turns.ended, turns.closed)
        self._end_of_turn = _first_end(self._framed(turns.between))
        self._system = self._system_frame(user)
        call = renderer.call_turn
        if isinstance(call, CallTurn):
            after = call.after.removesuffix(turns.asked)
            frames = self._frames_of("tool", call.between, call.ended, after)
            if frames[0].before != self._frames[0].before:
                self._frames[:0] = frames  # First, since the user's frame may be a prefix of it.
                self._headers.append(self._framed(call.answered))
        self._headers.sort(key=len, reverse=True)

    def _frames_of(self, role: str, between: str, last: str, after: str) -> list[_Frame]:
        """Return the frames of a message after an answer, by the tokens that its end stands for."""
        framed = self._framed(between)
        end = _first_end(framed)
        rest = framed.removeprefix(end)
        frames = [_Frame(role, rest, self._framed(after))]
        while end and (more := _MARK.match(rest)) and more[0] in self._framed(last):
            rest = rest.removeprefix(more[0])  # Another token of the same end.
            frames.append(_Frame(role, rest, self._framed(after)))
        return frames

    def messages(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> list[Spoken]:
        """Return the messages of a row of tokens, user and agent in turn.

        Args:
            token_ids, loss_mask: [seq]

        Raises: ConfigError: the tokens do not match this template.
        """
        edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(token_ids)]
        spoken: list[Spoken] = []
        for start, end in itertools.pairwise(edges):
            text = self._marked(token_ids[start:end].tolist())
            if loss_mask[start]:
                spoken.append(Spoken(role="assistant", text=self._answer(text), is_sampled=True))
                continue
            if start == 0:
                spoken += self._begun(text)
                continue
            text = text.removeprefix(self._end_of_turn)
            if end == len(token_ids) and not any(text.startswith(f.before) for f in self._frames):
                break  # The template's text after the last turn.
            spoken += self._unsampled(text)
        return spoken

    def _answer(self, text: str) -> str:
        """Return an answer without the tokens that end it. Other tokens have their names."""
        while (mark := text[text.rfind(_OPEN) :] if text.endswith(_CLOSE) else "") in self._ends:
            text = text.removesuffix(mark)
        return self._named(text)

    def _named(self, text: str) -> str:
        """Return framed text with the names of its control tokens."""
        return _MARK.sub(lambda mark: self._names.get(int(mark[0][1:-1]), ""), text)

    def _begun(self, text: str) -> list[Spoken]:
        """Return the messages before the first sampled one."""
        before = self._frames[-1].before
        if text.startswith(self._head) and not self._has_system(text):
            return self._unsampled(before + text[len(self._head) :])
        if self._system is None or not text.startswith(self._system.before):
            raise ConfigError(_OTHER)
        system, found, rest = text[len(self._system.before) :].partition(self._system.after)
        if not found:
            raise ConfigError(_OTHER)
        return [Spoken(role="system", text=self._named(system)), *self._unsampled(before + rest)]

    def _has_system(self, text: str) -> bool:
        """Return whether a text that begins like a user's message begins with a system message."""
        frame = self._system
        return (
            frame is not None
            and text.startswith(frame.before)
            and _MARK.search(frame.after) is not None
            and frame.before == self._head
            and frame.after in text[len(frame.before) :].partition(self._after)[0]
        )

    def _unsampled(self, text: str) -> list[Spoken]:
        spoken: list[Spoken] = []
        while True:
            frame = next((f for f in self._frames if text.startswith(f.before)), None)
            if frame is None:
                raise ConfigError(_OTHER)
            inner, found, text = text[len(frame.before) :].partition(frame.after)
            if not found:
                raise ConfigError(_OTHER)
            spoken.append(Spoken(role=frame.role, text=self._named(inner)))
            header = next((each for each in self._headers if text.startswith(each)), "")
            text = text.removeprefix(header)
            if not text:
                return spoken
            answer, found, text = text.partition(self._end_of_turn)
            if not found:
                raise ConfigError(_OTHER)
            spoken.append(Spoken(role="assistant", text=self._named(answer)))

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

    def _render(self, messages: list[dict[str, Any]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer has no chat template, so tokens cannot be split into messages; use"
                " --format json"
            )
        return render_chat(self._tokenizer, messages, day=self._day)

    def _framed(self, text: str) -> str:
        return self._marked(self._tokenizer.encode(text, add_special_tokens=False))

    def _marked(self, token_ids: list[int]) -> str:
        """Return the text with each control token's id between two marks."""
        parts: list[str] = []
        for is_control, run in itertools.groupby(token_ids, self._names.__contains__):
            if is_control:
                parts += [f"{_OPEN}{number}{_CLOSE}" for number in run]
            else:
                parts.append(self._tokenizer.decode(list(run)))
        return "".join(parts)


def _first_end(framed: str) -> str:
    """Return the token with which a framed text ends the answer before it, "" for none."""
    found = _END.match(framed)
    return found[0] if found else ""
