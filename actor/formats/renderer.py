"""Encodes a conversation to token ids one turn at a time. Sampled tokens are never encoded again.

An observation is plain text: a control token that it contains (`<|im_end|>`) is encoded as its
letters.

The chat template is measured with marker texts (`common.formats.turns`). Only the text that it puts
between turns is derived from it. The generation prompt of each turn, such as `<think>`, stays in
the context together with the sampled answer.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, cast

import regex
from jinja2 import TemplateError

from actor.formats.call_turn import PROBE, CallNames, CallTurn, as_text, measure_call
from actor.formats.control_tokens import ControlTokens, special_tokens
from actor.formats.sampled import GrowingText, SampledText, begin_of_marked, without_marks
from actor.formats.thoughts import FIELDS, len_of_begun, measure_thoughts
from actor.rollout.context import least_prompt
from actor.rollout.folding import least_of_branches
from common.config.actor import ActorSection
from common.errors import ConfigError
from common.formats.calls import BETWEEN_CALLS, NAME, CallForm, as_call, each_text
from common.formats.chat_template import render_chat, template_of
from common.formats.sense_tokens import sense_tokens_in
from common.formats.turn_ends import TurnEnd, configured_ends, find_end
from common.formats.turns import ASSISTANT, USER, Message, measure_turns
from common.text import shared_length

OF_PROCESSOR = "chat_template.json"  # File of older checkpoints for images.
# Size of the cache of encoded texts. Episodes of a group begin with the same text.
NUM_KNOWN_TEXTS = 256
RESULT_ID = "tool_call_id"  # Field of a tool result: the id of its call.
CALL_ID = "call{:05}"  # The format that the strictest template requires.
SHOWN_MARK = "shownmark"  # Begin of texts that show whether a template drops a part.


class Renderer:
    """Encodes and decodes the turns of one tokenizer, whose chat template it measures.

    Example (ChatML):
        first_prompt("hi")        <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", True)  \\n<|im_start|>user\\nok<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", False) the same behind an <|im_end|> that the model did not sample
    """

    def __init__(self, tokenizer: Any) -> None:
        """Measure the tokenizer's chat template.

        Raises: ConfigError: the template cannot be used; the message has the reason.
        """
        self.tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self.num_tokens = len(tokenizer)
        self._known = lru_cache(NUM_KNOWN_TEXTS)(self._control.encode_between)
        self._sampled = SampledText(tokenizer)
        self._special = special_tokens(tokenizer)
        self._senses = sense_tokens_in(Path(str(getattr(tokenizer, "name_or_path", "") or ".")))
        self.turns = measure_turns(self._asking)
        self._before_first = self.turns.before
        self._after_first = self.turns.after_user
        self.thoughts = measure_thoughts(self._asking, self.turns, self._sampled)
        marks = self.thoughts.special
        self._inner = [each for each in self._special if self._sampled.marked([each]) in marks]
        self._configured = configured_ends(tokenizer)
        self.turn_end = self._end_of_turn(self.turns.between, self.turns.ended)
        self.end_of_turn_ids = self._stops()

    def rendered(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, is_asking: bool = True
    ) -> str:
        """Return the chat template's text of messages. Raises: ConfigError: there is none."""
        if not template_of(self.tokenizer):
            raise ConfigError(
                "model.path: the tokenizer has no chat template, as of a base model; give one"
                " (model.chat_template=FILE). configs/templates/plain.jinja is one for plain text"
                f"{self._processor_hint()}"
            )
        return render_chat(
            self.tokenizer, with_ids(messages), tools=tools, add_generation_prompt=is_asking
        )

    def _processor_hint(self) -> str:
        """Return how to use the template of a processor for images; "" without one."""
        name = str(getattr(self.tokenizer, "name_or_path", "") or "")
        if not name or not (Path(name) / OF_PROCESSOR).is_file():
            return ""
        return f". {name}/{OF_PROCESSOR} has one: put its text into chat_template.jinja beside it"

    def _asking(self, messages: Sequence[Message], is_asking: bool) -> str:
        """Return the text of messages, with or without the generation prompt."""
        return self.rendered(messages, is_asking=is_asking)

    def _end_of_turn(self, after: str, last: str) -> TurnEnd:
        """Return the end of an answer from the template's text behind it."""
        end = find_end(
            self.completion(after),
            self.completion(last),
            self._special,
            lambda token_id: not self.tokenizer.decode([token_id]).strip(),
            self._inner,
        )
        if end is None:
            raise ConfigError(
                "model.path: the chat template does not end a turn with a special token: it writes"
                f" {after!r:.200} after an answer; give a template that does (model.chat_template)"
            )
        return end

    def _stops(self) -> list[int]:
        """Return the tokens that end a sampled turn, the template's own first.

        A token that also stands inside of an answer, as between the messages of gpt-oss, ends no
        turn.

        Raises: ConfigError: no other token ends a turn.
        """
        configured = [*self.turn_end.run[:1], *self.turn_end.last, *self._configured]
        ends = list(dict.fromkeys(each for each in configured if each not in self._inner))
        if not ends:
            raise ConfigError(
                "model.path: the chat template ends an answer with"
                f" {self.shown(configured[:1])!r}, which also ends its thoughts; give another end"
                " of a turn (eos_token_id in generation_config.json)"
            )
        return ends

    @cached_property
    def of_streams(self) -> "Renderer":
        """The renderer of answers whose text is sent before the answer is complete.

        It differs by answers with an end of thoughts without a beginning: the text before it stays
        text.
        """
        renderer = copy(self)
        renderer.thoughts = replace(self.thoughts, keeps_lead=True)
        return renderer

    def growing(self) -> GrowingText:
        """Return the marked text of a sampled answer that arrives in parts."""
        return self._sampled.growing()

    def settled(self, answer: str, *, tools: bool) -> tuple[str, str]:
        """Return the text and the thoughts that any answer with this begin has at their begin.

        The spaces at their ends are left out, because an answer's own ends have none.

        Args:
            answer: begin of a sampled answer, as `growing` returns it, without the end of the turn.
            tools: the answer may have calls. The text before them is settled, and nothing else;
                before calls, characters such as the bracket of a list are no text.
        """
        form = self.thoughts
        lead = self._sampled.marked(list(self.turn_end.lead))
        num = len(answer) - len_of_begun(answer, [f"{lead}{SHOWN_MARK}"] if lead else [])
        marked = answer[: min(num, form.num_settled(answer))]
        thoughts = form.thoughts(marked)
        if tools and form.between:
            return "", thoughts
        if not tools or isinstance(self.calls, str):
            return form.text(marked).strip(), thoughts
        beside = "".join(marked[a:b] for a, b in form.spans(marked))
        begin = self._call_begin.search(without_marks(beside), partial=True)
        num_chars = len(beside) if begin is None else begin.start()
        text = form.shown(begin_of_marked(beside, num_chars)).strip()
        return (text if text.strip(BETWEEN_CALLS) else ""), thoughts

    @cached_property
    def _call_begin(self) -> "regex.Pattern[str]":
        """The begin of a call. Only the package `regex` finds the begin of a match."""
        assert isinstance(self.calls, CallForm)
        return regex.compile(self.calls.begin.pattern)

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

    def _measured_call(
        self, *, tools: Sequence[Message] = (PROBE,), name: str = NAME, form: CallForm | None = None
    ) -> CallTurn:
        """Return the turn of a call, measured with the special tokens of the vocabulary."""
        ends = [*self.end_of_turn_ids, *self.turn_end.run[:1]]
        names = CallNames(
            special=list(self._special.values()),
            ends=[self._special[each] for each in ends if each in self._special],
            after_thoughts=[without_marks(closes) for _, closes in self.thoughts.blocks],
        )
        return measure_call(
            self._with_tools, self.turns, names, self._as_sampled, tools=tools, name=name, form=form
        )

    def _with_tools(
        self, messages: Sequence[Message], tools: Sequence[Any], is_asking: bool
    ) -> str:
        return self.rendered(messages, tools=list(tools), is_asking=is_asking)

    def _as_sampled(self, text: str) -> str:
        """Return a text of the template as it reads when the policy has sampled it."""
        return self.whole_text(self.completion(text))

    def plain_text(self, token_ids: list[int]) -> str:
        """Return the text of tokens without special tokens. Whitespace at its ends is kept."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def shown(self, token_ids: list[int]) -> str:
        """Return the text of tokens with all special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def whole_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled answer with its special tokens, except those that end it."""
        return self.tokenizer.decode(self._without_end(token_ids))

    def _without_end(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of an answer without those that end the turn."""
        while token_ids and token_ids[-1] in self.end_of_turn_ids:
            token_ids = token_ids[:-1]
        return token_ids

    def _without_lead(self, token_ids: list[int]) -> list[int]:
        """Return a sampled answer without its end and the template's tokens before the end."""
        body = self._without_end(token_ids)
        lead = list(self.turn_end.lead)
        has_lead = bool(lead) and body[-len(lead) :] == lead
        return body[: -len(lead)] if has_lead else body

    @property
    def call_turn_end(self) -> TurnEnd:
        """End of an answer with calls before their results."""
        assert isinstance(self.call_turn, CallTurn)
        return self._end_of_turn(self.call_turn.between, self.call_turn.ended)

    def sampled_end(self, *, has_calls: bool) -> int:
        """Return the token with which a policy ends an answer, or an answer with calls."""
        if has_calls and isinstance(self.call_turn, CallTurn):
            call_end = self.call_turn_end
            return call_end.last[0] if call_end.last else call_end.run[0]
        ends = [
            token_id
            for token_id in (*self.turn_end.last, *self.turn_end.run)
            if token_id in self.end_of_turn_ids
        ]
        return ends[0] if ends else self.end_of_turn_ids[0]

    @property
    def lead_of_end(self) -> list[int]:
        """Tokens that a policy samples between the text of an answer and the end of the turn."""
        return list(self.turn_end.lead)

    @property
    def call_end(self) -> str:
        """Text of the token that ends an answer with calls before their results."""
        return self.tokenizer.decode(self.call_turn_end.run[:1])

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        """Return the ids of the first user turn, up to the start of the assistant's turn.

        Args:
            before: an instruction and the assistant's answer to it, which come first.
        """
        if before is None:
            shown = self.turns.shown(text)
            return list(self._known(self._before_first, shown, self._after_first))
        return self.conversation([*before, text])

    def opened(self, messages: list[dict[str, Any]], text: str) -> list[int]:
        """Return the ids of messages and a user's message after them; see `of_messages`.

        Raises: ValueError: the chat template refuses or drops one of them.
        """
        self.check_shown(messages)
        return self.of_messages([*messages, {"role": "user", "content": text}])

    def conversation(self, texts: Sequence[str]) -> list[int]:
        """Return the ids of alternating messages, up to the start of the assistant's next turn.

        Args:
            texts: an odd number of messages; the user's are first and last.
        """
        turns = self.turns
        past = self._after_first.removesuffix(turns.asked) + turns.answered
        end = self.tokenizer.decode([*self.turn_end.lead, *self.turn_end.run[:1]])
        num_answers = len(texts) // 2
        after = self._after_first if num_answers == 0 else past
        ids = list(self._known(self._before_first, turns.shown(texts[0]), after))
        for number, (answer, text) in enumerate(zip(texts[1::2], texts[2::2], strict=True), 1):
            after = turns.after_user if number == num_answers else turns.closed + turns.answered
            ids += self._known("", answer, end)
            ids += self._framed(
                self.turn_end, turns.between, turns.shown(text), after, is_stopped=True
            )
        return ids

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        """Return the ids between the sampled turn and the next one: a user message with `text`.

        Args:
            is_stopped: the sampled turn ended with an end-of-turn token. If not, the template's end
                is inserted here. It was not sampled and is therefore never trained on.
            end: the token that ended the turn; None: the first of `end_of_turn_ids`. The template's
                own end is inserted after another one.
        """
        turns = self.turns
        return self._framed(
            self.turn_end,
            turns.between,
            turns.shown(text),
            turns.after_user,
            is_stopped=is_stopped,
            end=end,
        )

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        """Return the same ids for the environment's observation after an action."""
        return self.after_turn(observation, is_stopped=is_stopped, end=end)

    def without_thoughts(
        self, shown: list[int], answer: list[int], *, has_calls: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of a past answer without its thoughts, as the template shows it.

        Args:
            shown: tokens before the answer, which end with the generation prompt.
            answer: the sampled tokens.
            has_calls: the answer has calls, whose results follow it.
        """
        body = self._without_end(answer)
        header, turn_end = self._past_call if has_calls else self._past_form(answer)
        end = answer[-1] if len(body) < len(answer) else None
        past = self._beside_thoughts(body)
        return self._with_header(shown, header, past), [*past, *past_end(end, turn_end)]

    def _beside_thoughts(self, body: list[int]) -> list[int]:
        """Return the sampled tokens of an answer, without its end, that are no thoughts."""
        marked = self._sampled.marked(body)
        rest: list[int] = []
        for first, last in self.thoughts.spans(marked):
            space = len(marked[first:last]) - len(marked[first:last].lstrip())
            is_body = not rest and not self.thoughts.between  # A head may begin with a space.
            start = self._sampled.num_tokens(body, first + space * is_body)
            rest += body[start : self._sampled.num_tokens(body, last)]
        return rest

    def _with_header(self, shown: list[int], header: str, answer: list[int]) -> list[int]:
        """Return the tokens before an answer with the header of a past answer.

        Args:
            shown: tokens that end with the generation prompt.
            header: the template's text before a past answer, behind `Turns.closed`.
            answer: the tokens of the answer, which may begin with its own header.
        """
        form = self.thoughts
        has_head = bool(form.between) and form.head_end in self._sampled.marked(answer)
        asked = self.completion(self.turns.after_user)
        past = self.completion(self.turns.closed + ("" if has_head else header))
        num_shared = shared_length(asked, past)
        if shown[-len(asked) :] != asked:  # The template asks without a generation prompt.
            return shown
        return [*shown[: len(shown) - len(asked) + num_shared], *past[num_shared:]]

    def _past_form(self, answer: list[int]) -> tuple[str, TurnEnd]:
        """Return the header of a past answer, behind the text that all prompts share, and its end.

        The end stands before an observation.
        """
        return self.turns.answered, self.turn_end

    @property
    def _past_call(self) -> tuple[str, TurnEnd]:
        """Header and end of a past answer with calls."""
        assert isinstance(self.call_turn, CallTurn)
        return self.call_turn.answered, self.call_turn_end

    def _framed(
        self,
        turn_end: TurnEnd,
        before: str,
        text: str,
        after: str,
        *,
        is_stopped: bool,
        end: int | None = None,
    ) -> list[int]:
        """Return the ids of a message with the end of the answer before it, as far as needed."""
        ids = self._known(before, text, after)
        return list(ids[turn_end.num_sampled(end, is_stopped=is_stopped) :])

    def of_messages(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of any conversation, up to the start of the assistant's turn.

        Raises: ValueError: the chat template refuses it; the message gives the reason.
        """
        return self._text_only(self._control.encode(self._safely(messages, tools)))

    def sense_problem(self, ids: Sequence[int]) -> str:
        """Return which token of a prompt stands for an image or sound, "" for none."""
        token = next((each for each in ids if each in self._senses), None)
        if token is None:
            return ""
        key = f"{self._senses[token]}={token} in config.json"
        return (
            f"the token {self.shown([token])!r} ({key}) stands for other input than text, and a"
            " policy reads text only; remove it"
        )

    def _text_only(self, ids: list[int]) -> list[int]:
        """Return the ids of a template's text. Raises: ValueError: one stands for an image."""
        if problem := self.sense_problem(ids):
            raise ValueError(f"the chat template writes other input than text: {problem}")
        return ids

    def check_shown(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Check that the chat template shows the text and the calls of each message.

        Each text is replaced by one that occurs nowhere else; it must be in the rendered prompt.

        Raises: ValueError: the template drops a part; the message names it.
        """
        marked: list[Message] = []
        marks: list[tuple[str, str]] = []
        for number, message in enumerate(messages, 1):
            made = dict(message)
            where = f"message {number} ({message['role']})"
            if message["content"]:
                made["content"] = f"{SHOWN_MARK}{number}content"
                marks.append((made["content"], f"{where}: content"))
            calls: list[Message] = []
            for at, call in enumerate(message.get("tool_calls", [])):
                name = f"{SHOWN_MARK}{number}call{at}end"
                arguments = {f"{name}argument": f"{name}value"}
                calls.append({**call, "function": {"name": name, "arguments": arguments}})
                marks += [(name, f"{where}: tool_calls"), (f"{name}value", f"{where}: tool_calls")]
            marked.append({**made, "tool_calls": calls} if calls else made)
        if not marks:
            return
        text = self._safely([*marked, {"role": "user", "content": USER}], tools)
        lost = next((what for mark, what in marks if mark not in text), None)
        if lost is not None:
            raise ValueError(
                f"the chat template drops {lost}; give another template (model.chat_template), or"
                " remove that part of the record"
            )

    def after_calls(
        self,
        messages: list[dict[str, Any]],
        *,
        is_stopped: bool,
        has_calls: bool,
        tools: Sequence[dict[str, Any]],
        end: int | None = None,
        calls: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return the ids between an answer and the next one: `after_action` for any messages.

        Args:
            has_calls: the answer consisted of calls, which a template may require before their
                results.
            calls: those calls. A template may write the name of the called tool before a result.

        Raises: ValueError: the chat template refuses it; the message gives the reason.
        """
        answer: Message = {"role": "assistant", "content": ASSISTANT}
        ends = [self.turn_end]
        mark = ASSISTANT
        if has_calls and isinstance(self.call_turn, CallTurn):
            answer = {**answer, "content": "", "tool_calls": self._answered_calls(messages, calls)}
            mark = answer["tool_calls"][0]["function"]["name"]
            ends.append(self.call_turn_end)
        whole = self._safely([{"role": "user", "content": USER}, answer, *messages], tools)
        _, _, tail = whole.partition(USER)[2].partition(mark)
        places = [place for each in ends if (place := self._place_of(each, tail)) is not None]
        if not places:
            raise ValueError("the chat template does not end the assistant's turn")
        at, turn_end = min(places, key=lambda place: place[0])
        self._check_instructions(messages, tail[at:])
        ids = self._text_only(self._control.encode(tail[at:]))
        return ids[turn_end.num_sampled(end, is_stopped=is_stopped) :]

    def _check_instructions(self, messages: Sequence[Message], text: str) -> None:
        """Check that a text after an answer has the system messages that stand there.

        Raises: ValueError: the chat template drops one, or moves it to another place.
        """
        for message in messages:
            if message["role"] != "system":
                continue
            instruction = self._control.broken(str(message["content"])).strip()
            if instruction not in text:
                raise ValueError(
                    "the chat template drops or moves the system message"
                    f" {message['content']!r:.80} after an answer; put its text into the user's"
                    " message, or give another template (model.chat_template)"
                )

    def _answered_calls(
        self, results: Sequence[Message], calls: Sequence[Message]
    ) -> list[dict[str, Any]]:
        """Return calls of an answer without their arguments, one for each name and id.

        Without the calls, they are made for the results that follow them.
        """
        assert isinstance(self.call_turn, CallTurn)
        if not calls:
            named = [result for result in results if result["role"] == "tool"] or [{}]
            calls = [
                {**as_call(result.get("name") or NAME, {}), **_id_of(result, "tool_call_id")}
                for result in named
            ]
        has_ids = any(result.get("tool_call_id") for result in results)
        call = self.call_turn.call
        return [
            {
                **call(str(result["function"]["name"]), {}),
                **(_id_of(result, "id") if has_ids else {}),
            }
            for result in calls
        ]

    def _place_of(self, end: TurnEnd, tail: str) -> tuple[int, TurnEnd] | None:
        """Return the position of the end of a turn in a text, and its tokens there."""
        for lead in (end.lead, ()):  # A template may write another lead before other messages.
            name = self.tokenizer.decode([*lead, *end.run[:1]])
            if name in tail:
                return tail.index(name), replace(end, lead=lead)
        return None

    def _safely(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return a conversation as text for `ControlTokens.encode`. Raises: ValueError."""
        messages = list(map(self._with_own_fields, messages))
        named = ("role", "type")  # The actor writes these fields, so they need no escaping.
        broken = self._control.broken
        safe = [
            {k: v if k in named else each_text(v, broken) for k, v in message.items()}
            for message in messages
        ]
        try:
            return self.rendered(
                safe, tools=[each_text(message, broken) for message in tools] or None
            )
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template: {error}") from error

    def _with_own_fields(self, message: Message) -> Message:
        """Return a message with its calls and thoughts in the fields that the template reads."""
        thoughts = message.get(FIELDS[0])
        if thoughts and self.thoughts.field not in ("", FIELDS[0]):
            others = {name: value for name, value in message.items() if name != FIELDS[0]}
            message = {**others, self.thoughts.field: thoughts}
        calls = message.get("tool_calls")
        if not calls or isinstance(self.call_turn, str) or not self.call_turn.has_text:
            return message
        return {**message, "tool_calls": list(map(as_text, calls))}

    def completion(self, text: str) -> list[int]:
        """Return the ids of a bare text. Control tokens in it are encoded as such."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def action_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled action without its thoughts and special tokens."""
        return self.thoughts.text(self._sampled.marked(self._without_lead(token_ids))).strip()

    def thought_text(self, token_ids: list[int]) -> str:
        """Return the thoughts of a sampled answer, "" for none."""
        return self.thoughts.thoughts(self._sampled.marked(self._without_end(token_ids)))

    def read_answer(
        self, token_ids: list[int], tools: Sequence[Message], *, stop: str | None = None
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a sampled answer and its tool calls, in the format of chat templates.

        Args:
            stop: the text that ended the answer. It and what follows it are left out.

        Raises: AssertionError: this chat template supports no tools.
        """
        assert isinstance(self.calls, CallForm)
        whole = self.call_text(token_ids)
        text, calls = self.calls.read(whole if stop is None else whole.partition(stop)[0], tools)
        if not calls:
            text = self.action_text(token_ids)
            return (text if stop is None else text.partition(stop)[0].strip()), []
        return self._text_beside(text), [as_call(*each) for each in calls]

    def call_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled answer that may hold calls: without thoughts and its end."""
        marked = self._sampled.marked(self._without_end(token_ids))
        spans = self.thoughts.spans(marked)
        return without_marks("".join(marked[a:b] for a, b in spans))

    def _text_beside(self, text: str) -> str:
        """Return the text beside calls without special tokens and heads of messages."""
        marked = self._sampled.encoded(text)
        form = self.thoughts
        has_heads = bool(form.between and self.turns.answered.strip())
        if has_heads and form.head_end not in marked:
            return ""  # The head of the call's own message.
        return form.shown(marked).strip()

    def of(self, env: str, tools: Sequence[Message] = ()) -> "Renderer":
        """Return the renderer of an environment's episodes, whose actions may call `tools`."""
        return self

    def without_tools(self) -> "Renderer":
        """Return the renderer of conversations without tools."""
        return self

    def check_room(self, actor: ActorSection) -> None:
        """Check that the beginning of a page fits beside a turn.

        Raises: ConfigError: it does not fit, so that no episode could ever be played.
        """
        turn_tokens = actor.max_turn_tokens
        needed = least_prompt(self, actor, turn_tokens)
        needed = max(needed, least_of_branches(self, actor, turn_tokens)) + turn_tokens
        if actor.max_model_len < needed:
            asides = {
                "actor.plan": actor.plan,
                "actor.reflect_every": actor.reflect_every,
                "actor.reflect_on_invalid": actor.reflect_on_invalid,
            }
            named = [f"actor.context={actor.context.value}"]
            named += [f"{key}={str(value).lower()}" for key, value in asides.items() if value]
            raise ConfigError(
                f"actor.max_model_len={actor.max_model_len}: no observation fits with"
                f" {', '.join(named)} and actor.max_turn_tokens={turn_tokens};"
                f" use at least actor.max_model_len={needed}"
            )


def past_end(end: int | None, turn_end: TurnEnd) -> list[int]:
    """Return the end of a past answer that was sampled with `end`; None: it was cut.

    The text after the answer holds the template's own end after any other one.
    """
    if end is None:
        return []
    if end in turn_end.last and end not in turn_end.run:
        return list(turn_end.run)
    return [end] if end in turn_end.run else []


def _id_of(message: Message, name: str) -> dict[str, Any]:
    """Return the id of a call as a field, {} without one."""
    return {"id": message[name]} if message.get(name) else {}


def with_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls and results have ids, and results the name of their call.

    Some templates require them.
    """
    named_messages: list[Message] = []
    names: list[str] = []  # Names of the calls of the latest answer, without those of its results.
    place = 0
    for message in messages:
        if message["role"] == "tool":
            name = {"name": names[place]} if place < len(names) else {}
            message = {"tool_call_id": CALL_ID.format(place), **name, **message}
            place = place + 1
        else:
            place = 0
            names = []
        if calls := cast(list[dict[str, Any]], message.get("tool_calls") or []):
            named = [{"id": CALL_ID.format(i), **call} for i, call in enumerate(calls)]
            names = [str(call["function"]["name"]) for call in calls]
            message = {**message, "tool_calls": named}
        named_messages.append(message)
    return named_messages


def in_order(results: Sequence[Message], calls: Sequence[Message]) -> list[Message]:
    """Return tool results without ids, in the order of the calls whose ids they have.

    Raises: ValueError: a result has the id of no call.
    """
    places = {str(call["id"]): i for i, call in enumerate(calls) if call.get("id")}
    order: list[int] = []
    for place, result in enumerate(results):
        result_id = str(result.get(RESULT_ID) or "")
        if result_id and places and result_id not in places:
            listed = ", ".join(places)
            raise ValueError(
                f"{RESULT_ID}={result_id!r:.80}: the answer before it has no such call; it has"
                f" {listed}"
            )
        order.append(places.get(result_id, place))
    if len(set(order)) < len(order):  # Two results of one call stay as they are.
        order = list(range(len(results)))
    placed = sorted(zip(order, results, strict=True), key=lambda pair: pair[0])
    return [{k: v for k, v in result.items() if k != RESULT_ID} for _, result in placed]
