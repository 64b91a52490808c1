"""Token ids of an episode -> the messages that the chat template framed.

Text of others may spell a control token out in letters, which reads like one: so control tokens are
told apart by their ids, and stand in the text between two marks that no text has.
"""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import ConfigError

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}\\d+{_CLOSE}")
_USER, _ASSISTANT, _NEXT = "\u2402user\u2403", "\u2402assistant\u2403", "\u2402next\u2403"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """One message; an agent's that was sampled is where its row's `loss_mask` is true."""

    is_agent: bool
    text: str
    is_sampled: bool = False


class Framing:
    """What one tokenizer's chat template puts around and between messages."""

    def __init__(self, tokenizer: Any) -> None:
        """Ask the template. Raises: ConfigError: it has none, or rewrites earlier turns."""
        self._tokenizer = tokenizer
        self._control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        user = {"role": "user", "content": _USER}
        asked = [user, {"role": "assistant", "content": _ASSISTANT}]
        head, _, after_user = self._render([user]).partition(_USER)
        both = self._render([*asked, {"role": "user", "content": _NEXT}])
        between, found, _ = both.partition(_ASSISTANT)[2].partition(_NEXT)
        if not found or not both.startswith(head):
            raise ConfigError("the chat template rewrites earlier turns: no messages can be told")
        self._head, self._after_user = self._framed(head), self._framed(after_user)
        framed = self._framed(between)
        mark = _MARK.match(framed)
        self._end_of_turn = mark[0] if mark else ""
        self._between = framed.removeprefix(self._end_of_turn)

    def messages(self, token_ids: np.ndarray, loss_mask: np.ndarray) -> list[Spoken]:
        """Return what was said in a row of tokens, user and agent in turn.

        Args:
            token_ids, loss_mask: [seq]

        Raises: ConfigError: another template framed these.
        """
        edges = [0, *(np.flatnonzero(np.diff(loss_mask)) + 1).tolist(), len(token_ids)]
        said: list[Spoken] = []
        for start, end in itertools.pairwise(edges):
            text = self._marked(token_ids[start:end].tolist())
            if loss_mask[start]:
                own = _MARK.sub("", text)
                said.append(Spoken(is_agent=True, text=own, is_sampled=True))
                continue
            lead = self._head if start == 0 else self._between
            text = text if start == 0 else text.removeprefix(self._end_of_turn)
            if not text.startswith(lead) and end == len(token_ids):
                break  # what a template puts behind the last turn
            said += self._unsampled(text, lead)
        return said

    def _unsampled(self, text: str, lead: str) -> list[Spoken]:
        if not text.startswith(lead) or not text.endswith(self._after_user):
            raise ConfigError("its tokens are framed by another chat template")
        inner = text[len(lead) : len(text) - len(self._after_user)]
        first, *rest = inner.split(self._after_user)
        said = [Spoken(is_agent=False, text=first)]
        for each in rest:
            answer, found, question = each.partition(self._end_of_turn + self._between)
            if not found:
                raise ConfigError("its tokens are framed by another chat template")
            said.append(Spoken(is_agent=True, text=answer))
            said.append(Spoken(is_agent=False, text=question))
        return said

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer has no chat template: no messages can be told")
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        )

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
