"""Measures a chat template with marker texts: turns, thoughts, ends of turns and tool calls."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

from jinja2 import TemplateError

from actor.formats.call_turn import CallNames, CallTurn, measure_call
from actor.formats.control_tokens import ControlTokens, special_tokens
from actor.formats.sampled import SampledText, without_marks
from actor.formats.thoughts import measure_thoughts
from common.errors import ConfigError
from common.formats.calls import CallForm
from common.formats.chat_template import render_chat, template_of
from common.formats.turn_ends import TurnEnd, configured_ends, find_end
from common.formats.turns import Message, measure_turns

# Size of the cache of encoded texts. Episodes of a group begin with the same text.
NUM_KNOWN_TEXTS = 256
RESULT_ID = "tool_call_id"  # Field of a tool result: the id of its call.
CALL_ID = "call{:05}"  # The format that the strictest template requires.


class MeasuredTemplate:
    """The chat template of a tokenizer, measured with marker texts."""

    def __init__(self, tokenizer: Any) -> None:
        """Measure the tokenizer's chat template.

        Raises: ConfigError: the template cannot be used; the message has the reason.
        """
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self.num_tokens = len(tokenizer)
        self._known = lru_cache(NUM_KNOWN_TEXTS)(self._control.encode_between)
        self._sampled = SampledText(tokenizer)
        self._special = special_tokens(tokenizer)
        self._turns = measure_turns(self._asking)
        self._before_first = self._turns.before
        self._after_first = self._turns.after_user
        self.thoughts = measure_thoughts(self._asking, self._turns, self._sampled)
        marks = self.thoughts.special
        self._inner = [each for each in self._special if self._sampled.marked([each]) in marks]
        self._configured = configured_ends(tokenizer)
        self._end = self._end_of_turn(self._turns.between, self._turns.ended)
        self.end_of_turn_ids = self._stops()

    def _rendered(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, is_asking: bool = True
    ) -> str:
        """Return the chat template's text of messages. Raises: ConfigError: there is none."""
        if not template_of(self._tokenizer):
            raise ConfigError(
                "model.path: the tokenizer has no chat template; give one (model.chat_template)"
            )
        return render_chat(
            self._tokenizer, with_ids(messages), tools=tools, add_generation_prompt=is_asking
        )

    def _asking(self, messages: Sequence[Message], is_asking: bool) -> str:
        """Return the text of messages, with or without the generation prompt."""
        return self._rendered(messages, is_asking=is_asking)

    def _encoded(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _end_of_turn(self, after: str, last: str) -> TurnEnd:
        """Return the end of an answer from the template's text behind it."""
        found = find_end(
            self._encoded(after),
            self._encoded(last),
            self._special,
            lambda token_id: not self._tokenizer.decode([token_id]).strip(),
            self._inner,
        )
        if found is None:
            raise ConfigError(
                "model.path: the chat template does not end a turn with a special token: it writes"
                f" {after!r:.200} after an answer; give a template that does (model.chat_template)"
            )
        return found

    def _stops(self) -> list[int]:
        """Return the tokens that end a sampled turn, the template's own first.

        A token that also stands inside of an answer, as between the messages of gpt-oss, ends no
        turn.

        Raises: ConfigError: no other token ends a turn.
        """
        own = [*self._end.run[:1], *self._end.last, *self._configured]
        ends = list(dict.fromkeys(each for each in own if each not in self._inner))
        if not ends:
            raise ConfigError(
                f"model.path: the chat template ends an answer with {self.shown(own[:1])!r}, which"
                " also ends its thoughts; give another end of a turn (eos_token_id in"
                " generation_config.json)"
            )
        return ends

    @cached_property
    def call_turn(self) -> CallTurn | str:
        """The chat template's turn of a tool call, or the reason why it supports no tools."""
        try:
            return self._measured_call()
        except (TemplateError, TypeError) as error:
            return f"the policy's chat template cannot render tools: {error}"
        except ValueError as error:
            return f"the policy's chat template {error}"

    @property
    def calls(self) -> CallForm | str:
        """The chat template's format of tool calls, or the reason why it supports no tools."""
        return self.call_turn if isinstance(self.call_turn, str) else self.call_turn.form

    def _measured_call(self, **which: Any) -> CallTurn:
        """Return the turn of a call, measured with the special tokens of the vocabulary."""
        ends = [*self.end_of_turn_ids, *self._end.run[:1]]
        names = CallNames(
            special=list(self._special.values()),
            ends=[self._special[each] for each in ends if each in self._special],
            after_thoughts=[without_marks(closes) for _, closes in self.thoughts.blocks],
        )
        return measure_call(self._with_tools, self._turns, names, self._as_sampled, **which)

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[Any], is_asking: bool
    ) -> str:
        return self._rendered(messages, tools=list(tools), is_asking=is_asking)

    def _as_sampled(self, text: str) -> str:
        """Return a text of the template as it reads when the policy has sampled it."""
        return self.whole_text(self._encoded(text))

    def plain_text(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special tokens. Whitespace at its ends is kept."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def shown(self, token_ids: list[int]) -> str:
        """Return the text of tokens with all special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def whole_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled answer with its special tokens, except those that end it."""
        return self._tokenizer.decode(self._without_end(token_ids))

    def _without_end(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of an answer without those that end the turn."""
        while token_ids and token_ids[-1] in self.end_of_turn_ids:
            token_ids = token_ids[:-1]
        return token_ids

    def _without_lead(self, token_ids: list[int]) -> list[int]:
        """Return a sampled answer without its end and the template's tokens before the end."""
        body = self._without_end(token_ids)
        lead = list(self._end.lead)
        has_lead = bool(lead) and body[-len(lead) :] == lead
        return body[: -len(lead)] if has_lead else body


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls and results have ids, and results the name of their call.

    Some templates require them.
    """
    found: list[Message] = []
    names: list[str] = []  # Names of the calls of the latest answer, without those of its results.
    place = 0
    for each in messages:
        if each["role"] == "tool":
            name = {"name": names[place]} if place < len(names) else {}
            each = {"tool_call_id": CALL_ID.format(place), **name, **each}
            place = place + 1
        else:
            place = 0
            names = []
        if calls := cast(list[dict[str, Any]], each.get("tool_calls") or []):
            named = [{"id": CALL_ID.format(i), **call} for i, call in enumerate(calls)]
            names = [str(call["function"]["name"]) for call in calls]
            each = {**each, "tool_calls": named}
        found.append(each)
    return found


def in_order(results: Sequence[Message], calls: Sequence[Message]) -> list[Message]:
    """Return tool results without ids, in the order of the calls whose ids they have.

    Raises: ValueError: a result has the id of no call.
    """
    places = {str(call["id"]): i for i, call in enumerate(calls) if call.get("id")}
    order: list[int] = []
    for place, each in enumerate(results):
        given = str(each.get(RESULT_ID) or "")
        if given and places and given not in places:
            known = ", ".join(places)
            raise ValueError(
                f"{RESULT_ID}={given!r:.80}: the answer before it has no such call; it has {known}"
            )
        order.append(places.get(given, place))
    if len(set(order)) < len(order):  # Two results of one call stay as they are.
        order = list(range(len(results)))
    placed = sorted(zip(order, results, strict=True), key=lambda pair: pair[0])
    return [{k: v for k, v in each.items() if k != RESULT_ID} for _, each in placed]
