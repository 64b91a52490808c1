"""Encodes a conversation to token ids one turn at a time. Sampled tokens are never encoded again.

An observation is plain text: a control token that it contains (`<|im_end|>`) is encoded as its
letters.

The chat template is measured with marker texts (`common.formats.turns`). Only the text that it puts
between turns is derived from it. The generation prompt of each turn, such as `<think>`, stays in
the context together with the sampled answer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from actor.formats.call_turn import CallTurn, as_text
from actor.formats.measured import MeasuredTemplate
from actor.formats.past_answers import PastAnswers, past_end
from actor.formats.sampled import without_marks
from actor.formats.thoughts import FIELDS
from common.formats.calls import NAME, CallForm, as_call, each_text
from common.formats.turn_ends import TurnEnd
from common.formats.turns import ASSISTANT, USER, Message, Turns

SHOWN_MARK = "shownmark"  # Begin of texts that show whether a template drops a part.


class ChatRenderer(MeasuredTemplate):
    """Encodes observations for one tokenizer.

    Example (ChatML):
        first_prompt("hi")        <|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", True)  \\n<|im_start|>user\\nok<|im_end|>\\n<|im_start|>assistant\\n
        after_action("ok", False) the same behind an <|im_end|> that the model did not sample
    """

    @property
    def turns(self) -> Turns:
        """Text of the chat template around and between messages."""
        return self._turns

    @property
    def turn_end(self) -> TurnEnd:
        """End of an answer before a user's message."""
        return self._end

    @property
    def call_turn_end(self) -> TurnEnd:
        """End of an answer with calls before their results."""
        assert isinstance(self.call_turn, CallTurn)
        return self._end_of_turn(self.call_turn.between, self.call_turn.ended)

    def sampled_end(self, *, has_calls: bool) -> int:
        """Return the token with which a policy ends an answer, or an answer with calls."""
        if has_calls and isinstance(self.call_turn, CallTurn):
            own = self.call_turn_end
            return own.last[0] if own.last else own.run[0]
        ends = [each for each in (*self._end.last, *self._end.run) if each in self.end_of_turn_ids]
        return ends[0] if ends else self.end_of_turn_ids[0]

    @property
    def lead_of_end(self) -> list[int]:
        """Tokens that a policy samples between the text of an answer and the end of the turn."""
        return list(self._end.lead)

    @property
    def call_end(self) -> str:
        """Text of the token that ends an answer with calls before their results."""
        return self._tokenizer.decode(self.call_turn_end.run[:1])

    def rendered(
        self, messages: Sequence[Message], *, tools: list[Any] | None = None, is_asking: bool = True
    ) -> str:
        """Return the chat template's text. Raises: TemplateError, TypeError, ConfigError."""
        return self._rendered(messages, tools=tools, is_asking=is_asking)

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        """Return the ids of the first user turn, up to the start of the assistant's turn.

        Args:
            before: an instruction and the assistant's answer to it, which come first.
        """
        if before is None:
            shown = self._turns.shown(text)
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
        turns = self._turns
        past = self._after_first.removesuffix(turns.asked) + turns.answered
        end = self._tokenizer.decode([*self._end.lead, *self._end.run[:1]])
        num_answers = len(texts) // 2
        after = self._after_first if num_answers == 0 else past
        ids = list(self._known(self._before_first, turns.shown(texts[0]), after))
        for number, (answer, text) in enumerate(zip(texts[1::2], texts[2::2], strict=True), 1):
            after = turns.after_user if number == num_answers else turns.closed + turns.answered
            ids += self._known("", answer, end)
            ids += self._framed(self._end, turns.between, turns.shown(text), after, is_stopped=True)
        return ids

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        """Return the ids between the sampled turn and the next one: a user message with `text`.

        Args:
            is_stopped: the sampled turn ended with an end-of-turn token. If not, the template's end
                is inserted here. It was not sampled and is therefore never trained on.
            end: the token that ended the turn; None: the first of `end_of_turn_ids`. The template's
                own end is inserted after another one.
        """
        turns = self._turns
        shown = turns.shown(text)
        how: dict[str, Any] = {"is_stopped": is_stopped, "end": end}
        return self._framed(self._end, turns.between, shown, turns.after_user, **how)

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
        header, own = self._past_call if has_calls else (self._past_header, self._past_turn_end)
        past = PastAnswers(self._sampled, self.thoughts, self._turns, header)
        end = answer[-1] if len(body) < len(answer) else None
        kept = past.without_thoughts(body)
        before = past.with_header(shown, self._encoded, kept)
        return before, [*kept, *past_end(end, own)]

    @property
    def _past_header(self) -> str:
        """Header of a past answer, behind the text that all prompts share."""
        return self._turns.answered

    @property
    def _past_turn_end(self) -> TurnEnd:
        """End of an answer before an observation."""
        return self._end

    @property
    def _past_call(self) -> tuple[str, TurnEnd]:
        """Header and end of a past answer with calls."""
        assert isinstance(self.call_turn, CallTurn)
        return self.call_turn.answered, self.call_turn_end

    def _framed(
        self,
        own: TurnEnd,
        before: str,
        text: str,
        after: str,
        *,
        is_stopped: bool,
        end: int | None = None,
    ) -> list[int]:
        """Return the ids of a message with the end of the answer before it, as far as needed."""
        ids = self._known(before, text, after)
        return list(ids[own.num_sampled(end, is_stopped=is_stopped) :])

    def of_messages(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Return the ids of any conversation, up to the start of the assistant's turn.

        Raises: ValueError: the chat template refuses it; the message gives the reason.
        """
        return self._control.encode(self._safely(messages, tools))

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
        ends = [self._end]
        mark = ASSISTANT
        if has_calls and isinstance(self.call_turn, CallTurn):
            answer = {**answer, "content": "", "tool_calls": self._answered_calls(messages, calls)}
            mark = answer["tool_calls"][0]["function"]["name"]
            ends.append(self.call_turn_end)
        whole = self._safely([{"role": "user", "content": USER}, answer, *messages], tools)
        _, _, tail = whole.partition(USER)[2].partition(mark)
        found = [place for each in ends if (place := self._place_of(each, tail)) is not None]
        if not found:
            raise ValueError("the chat template does not end the assistant's turn")
        at, own = min(found, key=lambda place: place[0])
        self._check_instructions(messages, tail[at:])
        ids = self._control.encode(tail[at:])
        return ids[own.num_sampled(end, is_stopped=is_stopped) :]

    def _check_instructions(self, messages: Sequence[Message], text: str) -> None:
        """Check that a text after an answer has the system messages that stand there.

        Raises: ValueError: the chat template drops one, or moves it to another place.
        """
        for each in messages:
            if each["role"] != "system":
                continue
            instruction = self._control.broken(str(each["content"])).strip()
            if instruction not in text:
                raise ValueError(
                    f"the chat template drops or moves the system message {each['content']!r:.80}"
                    " after an answer; put its text into the user's message, or give another"
                    " template (model.chat_template)"
                )

    def _answered_calls(
        self, results: Sequence[Message], calls: Sequence[Message]
    ) -> list[dict[str, Any]]:
        """Return calls of an answer without their arguments, one for each name and id.

        Without the calls, they are made for the results that follow them.
        """
        assert isinstance(self.call_turn, CallTurn)
        if not calls:
            named = [each for each in results if each["role"] == "tool"] or [{}]
            calls = [
                {**as_call(each.get("name") or NAME, {}), **_id_of(each, "tool_call_id")}
                for each in named
            ]
        has_ids = any(each.get("tool_call_id") for each in results)
        call = self.call_turn.call
        return [
            {**call(str(each["function"]["name"]), {}), **(_id_of(each, "id") if has_ids else {})}
            for each in calls
        ]

    def _place_of(self, end: TurnEnd, tail: str) -> tuple[int, TurnEnd] | None:
        """Return the position of the end of a turn in a text, and its tokens there."""
        for lead in (end.lead, ()):  # A template may write another lead before other messages.
            name = self._tokenizer.decode([*lead, *end.run[:1]])
            if name in tail:
                return tail.index(name), replace(end, lead=lead)
        return None

    def _safely(self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        """Return a conversation as text for `ControlTokens.encode`. Raises: ValueError."""
        messages = list(map(self._with_own_fields, messages))
        named = ("role", "type")  # The actor writes these fields, so they need no escaping.
        broken = self._control.broken
        safe = [
            {k: v if k in named else each_text(v, broken) for k, v in each.items()}
            for each in messages
        ]
        try:
            return self._rendered(safe, tools=[each_text(each, broken) for each in tools] or None)
        except (TemplateError, TypeError, RecursionError) as error:
            raise ValueError(f"the chat template: {error}") from error

    def _with_own_fields(self, message: Message) -> Message:
        """Return a message with its calls and thoughts in the fields that the template reads."""
        thoughts = message.get(FIELDS[0])
        if thoughts and self.thoughts.field not in ("", FIELDS[0]):
            kept = {name: value for name, value in message.items() if name != FIELDS[0]}
            message = {**kept, self.thoughts.field: thoughts}
        calls = message.get("tool_calls")
        if not calls or isinstance(self.call_turn, str) or not self.call_turn.has_text:
            return message
        return {**message, "tool_calls": list(map(as_text, calls))}

    def completion(self, text: str) -> list[int]:
        """Return the ids of a bare text. Control tokens in it are encoded as such."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def action_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled action without its thoughts and special tokens."""
        return self.thoughts.text(self._sampled.marked(self._without_lead(token_ids))).strip()

    def thought_text(self, token_ids: list[int]) -> str:
        """Return the thoughts of a sampled answer, "" for none."""
        return self.thoughts.thoughts(self._sampled.marked(self._without_end(token_ids)))

    def read_answer(
        self, token_ids: list[int], tools: Sequence[Message]
    ) -> tuple[str, list[dict[str, Any]]]:
        """Return the text of a sampled answer and its tool calls, in the format of chat templates.

        Raises: AssertionError: this chat template supports no tools.
        """
        assert isinstance(self.calls, CallForm)
        text, calls = self.calls.read(self.call_text(token_ids), tools)
        if not calls:
            return self.action_text(token_ids), []
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
        has_heads = bool(form.between and self._turns.answered.strip())
        if has_heads and form.head_end not in marked:
            return ""  # The head of the call's own message.
        return form.shown(marked).strip()


def _id_of(message: Message, name: str) -> dict[str, Any]:
    """Return the id of a call as a field, {} without one."""
    return {"id": message[name]} if message.get(name) else {}
