"""Measures how a chat template shows a tool call and its result, with marker texts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from common.formats.calls import ARGUMENTS, KEYS, NAME, VALUES, Arguments, CallForm, as_call
from common.formats.turns import ASSISTANT, MARGIN, NEXT, USER, Message, Turns
from common.text import shared_length, shared_tags

QUOTED = f'{NEXT}"'  # Its quote shows whether the template writes tool results verbatim or as JSON.
PROBE_TOOL = "probe_tool"
# Some templates require all fields of a tool, and a property.
PROBE: Message = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"probed": {"type": "string", "description": ""}},
            "required": ["probed"],
        },
    },
}
# (messages, tools, add_generation_prompt) -> text
RenderCalls = Callable[[Sequence[Message], Sequence[Any], bool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNames:
    """Names of a vocabulary's special tokens."""

    special: Sequence[str]
    ends: Sequence[str]  # Names of those that may end a turn.
    after_thoughts: Sequence[str] = ()  # Marks behind thoughts.


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTurn:
    """Text of a chat template around a tool call and its result."""

    form: CallForm
    between: str  # Text from the end of the call to the text of its result.
    after: str  # Text from a result to the next answer.
    answered: str  # Text before a past call, behind the text that all prompts share.
    ended: str  # Text after a call that ends the conversation.
    is_json: bool  # The template writes a result as a JSON text.
    has_text: bool  # The template takes arguments as a JSON text only.
    strips: bool  # The template removes whitespace around a result.

    def call(self, name: str, arguments: Arguments) -> Message:
        """Return a call in the form that this template accepts."""
        return as_text(as_call(name, arguments)) if self.has_text else as_call(name, arguments)

    def shown(self, result: str) -> str:
        """Return the text of a result as the template writes it."""
        result = result.strip() if self.strips else result
        return _inner(result) if self.is_json else result


def as_text(call: Message) -> Message:
    """Return a call whose arguments are a JSON text."""
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def measure_call(
    render: RenderCalls,
    turns: Turns,
    names: CallNames,
    sampled: Callable[[str], str],
    *,
    tools: Sequence[Message] = (PROBE,),
    name: str = NAME,
    form: CallForm | None = None,
) -> CallTurn:
    """Return the turn of a call in a template.

    Args:
        sampled: returns a text of the template as it reads when the policy has sampled it.
        tools: the tools in the prompt. The call has the name `name`.
        form: the form of calls; None: it is found in the call of NAME.

    Raises:
        ValueError: the template has no tools or shows no calls.
        TemplateError, TypeError: the template refuses them.
    """
    refusals: list[TemplateError | TypeError | ValueError] = []
    for has_text in (False, True):
        try:
            return _Probe(render, turns, names, tools, name, has_text).turn(sampled, form)
        except (TemplateError, TypeError, ValueError) as error:
            refusals.append(error)
    of_objects, of_texts = refusals
    # A template that takes only texts refuses objects as a TypeError, which names no reason.
    raise of_texts if isinstance(of_objects, TypeError) else of_objects


@dataclass(frozen=True, slots=True)
class _Probe:
    """Conversations of markers with one call."""

    render: RenderCalls
    turns: Turns
    names: CallNames
    tools: Sequence[Message]
    name: str
    has_text: bool

    def turn(self, sampled: Callable[[str], str], form: CallForm | None) -> CallTurn:
        """Return the text around a call and its result, measured with markers."""
        whole = self._texts(ARGUMENTS, "", is_final=False)
        final = self._final()
        self._check_tools(whole)
        start, result_at, result = self._places(whole)
        end_at = _end_of_call(whole, final, start, result_at, self.names)
        if form is None:
            mark = next(each for each in self.names.special if whole.startswith(each, end_at))
            closing, opening = self._around_later(mark)
            form = CallForm.of(
                sampled(self._call(ARGUMENTS, mark)),
                sampled(self._call({}, mark)),
                closing=sampled(closing),
                opening=sampled(opening),
            )
            self._check_read(form, sampled, whole[end_at : end_at + len(mark)])
        repeated = self._texts(ARGUMENTS, "", is_final=False, num_calls=2)
        if not repeated.endswith(whole[end_at:]):
            raise ValueError(f"shows a second call otherwise than the first: {whole!r:.1000}")
        shares_start = final[:end_at] == whole[:end_at]
        return CallTurn(
            form=form,
            between=whole[end_at:result_at],
            after=whole[result_at + len(result) :],
            answered=self._header(whole, form),
            ended=final[end_at:] if shares_start else "",
            is_json=result != QUOTED,
            has_text=self.has_text,
            strips=self._strips(),
        )

    def _texts(
        self,
        arguments: Arguments,
        content: str,
        *,
        is_final: bool,
        num_calls: int = 1,
        num_together: int = 1,
        result: str = QUOTED,
    ) -> str:
        """Return the rendered text after the user's text, with or without the call's result."""
        call = as_call(self.name, arguments)
        message = {
            "role": "assistant",
            "content": content,
            "tool_calls": [as_text(call) if self.has_text else call] * num_together,
        }
        answered = [{"role": "tool", "name": self.name, "content": result}] * num_together
        turn = [message] if is_final else [message, *answered]
        messages = [{"role": "user", "content": USER}, *(turn * num_calls)]
        return self.render(messages, self.tools, not is_final).partition(USER)[2]

    def _around_later(self, mark: str) -> tuple[str, str]:
        """Return the end that only the last call has, and the start of others; "" for one call."""
        one = self._texts(ARGUMENTS, "", is_final=False).partition(VALUES[-1])[2].partition(mark)[0]
        try:
            two = self._texts(ARGUMENTS, "", is_final=False, num_together=2)
        except (TemplateError, TypeError):
            return "", ""
        between = two.partition(VALUES[-1])[2].partition(self.name)[0]
        shared = shared_tags(one, between)
        return one.removeprefix(shared), between.removeprefix(shared)

    def _check_read(self, form: CallForm, sampled: Callable[[str], str], mark: str) -> None:
        """Check that a call with a number is read as given, up to the first end of a turn."""
        arguments: Arguments = {KEYS[1]: 7, KEYS[0]: VALUES[0]}
        whole = self._texts(arguments, "", is_final=False)
        user: Message = {"role": "user", "content": USER}
        asked = self.render([user], self.tools, True).partition(USER)[2]
        text = whole.removeprefix(shared_tags(whole, asked))
        ends = [at for each in (mark, *self.names.ends) if (at := text.find(each)) >= 0]
        kinds = {KEYS[0]: {"type": "string"}, KEYS[1]: {"type": "integer"}}
        tool: Message = {"function": {"name": self.name, "parameters": {"properties": kinds}}}
        _, calls = form.read(sampled(text[: min(ends)]), [tool])
        if calls != [(self.name, arguments)]:
            raise ValueError(
                f"writes tool calls in a form that cannot be read back: {text!r:.300}; give"
                " another template (model.chat_template)"
            )

    def _header(self, whole: str, form: CallForm) -> str:
        """Return the text between the end of the user's message and the call."""
        user: Message = {"role": "user", "content": USER}
        asked = self.render([user], self.tools, True).partition(USER)[2]
        closed = asked.removesuffix(self.turns.asked)
        text = whole.removeprefix(closed if whole.startswith(closed) else self.turns.closed)
        match = form.begin.search(text)
        if match is None:
            return ""
        # The tags before a call are also a part of its beginning.
        lead = text[: match.end()]
        marks = [each for each in self.names.after_thoughts if each in lead]
        return lead[: max([match.start(), *(lead.rindex(each) + len(each) for each in marks)])]

    def _strips(self) -> bool:
        """Return whether the template removes whitespace around a result."""
        wide = f"{MARGIN}{NEXT}{MARGIN}"
        text = self._texts(ARGUMENTS, "", is_final=False, result=wide)
        return wide not in text and _inner(wide) not in text

    def _final(self) -> str:
        """Return the rendered text of a call without a result; "": the template refuses it."""
        try:
            return self._texts(ARGUMENTS, "", is_final=True)
        except (TemplateError, TypeError):
            return ""

    def _check_tools(self, whole: str) -> None:
        user: Message = {"role": "user", "content": USER}
        shown = self.render([user], self.tools, True)
        tool = str(self.tools[0]["function"]["name"])
        shows = {
            "the tools of a prompt": tool in shown,
            "tool calls": self.name in whole,
            "tool results": NEXT in whole,
        }
        if missing := [what for what, is_shown in shows.items() if not is_shown]:
            raise ValueError(
                f"does not render {', '.join(missing)}; give one that does (model.chat_template)"
            )

    def _places(self, whole: str) -> tuple[int, int, str]:
        """Return the position after the last argument, and position and text of the result."""
        last = whole.find(VALUES[-1])
        start = last + len(VALUES[-1]) if last >= 0 else whole.find(self.name) + len(self.name)
        for result in (QUOTED, _inner(QUOTED)):
            at = whole.find(result, start)
            if at >= 0:
                return start, at, result
        raise ValueError(f"does not render tool calls as turns: {whole!r:.1000}")

    def _call(self, arguments: Arguments, mark: str) -> str:
        """Return a call as the template writes it, without the end of its turn."""
        text = self._texts(arguments, ASSISTANT, is_final=False)
        before, has_text, call = text.partition(ASSISTANT)
        if not has_text or self.name in before:  # The text is dropped, or moved behind the call.
            text = self._texts(arguments, "", is_final=False)
            header = self.turns.closed + self.turns.answered
            call = text.removeprefix(shared_tags(text, header))
        start = call.find(VALUES[-1]) if arguments else call.find(self.name)
        end = call.find(mark, max(start, 0))
        if start < 0:
            raise ValueError(f"name and arguments are not found in {call!r:.300}")
        if end < 0:
            raise ValueError(f"does not end a turn with tool calls: {text!r:.1000}")
        return call[:end]


def _end_of_call(whole: str, final: str, start: int, result_at: int, names: CallNames) -> int:
    """Return the position of the token that ends a turn of calls.

    Args:
        whole, final: the text with the call's result and without it.
        start, result_at: the end lies between these positions in `whole`.

    Raises: ValueError: no special token ends the turn.
    """
    places = [at for each in names.ends if start <= (at := whole.find(each, start)) < result_at]
    if places:
        return min(places)
    stripped = final.rstrip()
    for name in names.special:
        at = len(stripped) - len(name)
        if at >= start and stripped.endswith(name) and whole.startswith(name, at):
            return at
    shared = shared_length(whole, final) if final else start
    after = [
        at
        for name in names.special
        if (at := whole.find(name, max(start, shared - len(name) + 1), result_at)) >= 0
    ]
    if not after:
        raise ValueError(f"does not end a turn with tool calls: {whole!r:.1000}")
    return min(after)


def _inner(text: str) -> str:
    """Return a text as JSON writes it between quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
