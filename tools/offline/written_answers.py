"""The tokens of conversations that are given as messages, as a rollout of the model has them.

The answer's text keeps the tokens of its vocabulary, such as `<think>` and `<tool_call>`. The names
of tokens that begin or end a turn are encoded as letters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from jinja2 import TemplateError

from actor.formats.call_turn import CallTurn
from actor.formats.control_tokens import special_tokens
from actor.formats.renderer import RESULT_ID, Renderer, in_order
from actor.formats.sampled import without_marks
from actor.formats.thoughts import FIELDS
from common.config.actor import KeepThinking
from common.errors import ConfigError
from common.formats.calls import Call, as_call, each_text, read_arguments
from common.formats.turns import ASSISTANT, NEXT, USER, Message
from common.text import valid_text
from tools.exchange import agent_traj
from tools.exchange.agent_traj import Conversation

THOUGHT = "\u2402thought\u2403"
# Half of a surrogate pair. Valid text never contains it, so it can mark a position.
_BREAK = "\udcff"
Part = tuple[list[int], bool]  # Consecutive token ids, and whether they are trained.


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """The tokens of one answer, and the header that a policy does not sample."""

    header: str  # Text before the answer, behind the text that all prompts share.
    sampled: list[int]  # The answer with the token that ends it.
    calls: list[Message] = field(default_factory=list[Message])  # In the form of chat templates.


class AnswerWriter:
    """Encodes answers for one chat template.

    Example (Qwen3-Thinking, whose generation prompt ends with `<think>\\n`):
        "<think>\\nleft\\n</think>\\n\\ngo"   header ...assistant\\n<think>\\n, sampled left\\n...
        "go"                              header ...assistant\\n,           sampled go<|im_end|>
    """

    def __init__(self, tokenizer: Any) -> None:
        """Measure the chat template. Raises: ConfigError: as `Renderer`."""
        self.renderer = Renderer(tokenizer)
        self._tokenizer = tokenizer
        turns = self.renderer.turns
        frame = "".join((turns.before, turns.closed, turns.between, turns.ended))
        roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        ends = {*self.renderer.end_of_turn_ids, *(each for each in roles if each is not None)}
        names = special_tokens(tokenizer)
        form = self.renderer.thoughts
        heads = turns.answered + without_marks(form.opens + form.head_end)
        framing = {
            name
            for number, name in names.items()
            if number in ends or (name in frame and name not in heads)
        }
        spelled = sorted(filter(None, framing), key=len, reverse=True)
        self._framing = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._marks = [tuple(map(without_marks, pair)) for pair in form.blocks]
        # Text of all prompts behind a user's text, without the thoughts that it may end with.
        self._closed = _before_marks(turns.closed, self._marks)
        moved = turns.closed.removeprefix(self._closed)
        self._asked = moved + turns.asked
        self._answered = moved + turns.answered
        self._moved = moved
        # The header of an answer beside thoughts, such as Command's <|START_RESPONSE|> or a space.
        self._head = _behind(turns.answered, [mark for pair in self._marks for mark in pair])
        self._lead = self._space_before_thoughts()
        self._joint = without_marks(self.renderer.thoughts.between)

    def write(self, message: Message, *, tools: Sequence[Message]) -> WrittenAnswer:
        """Return the tokens of an answer.

        Args:
            message: `content`, optional `tool_calls` and one of the fields for thoughts.

        Raises: ValueError: the template cannot show a field; the message has the field's name.
        """
        text = str(message.get("content") or "")
        thoughts = next((str(message[name]) for name in FIELDS if message.get(name)), "")
        calls = message.get("tool_calls")
        checked = _checked_calls(calls) if calls else []
        past = self._answered  # Header of an answer without thoughts.
        if checked:
            past, text = self._with_calls(text, checked, tools)
        if thoughts:
            text = self._with_thoughts(thoughts) + (text.lstrip() if checked else text)
        header, text = self._split_header(text, past, head="" if checked else self._head)
        end = self.renderer.sampled_end(has_calls=bool(checked))
        lead = [] if checked else self.renderer.lead_of_end
        ids = self._own(text)
        if ids[len(ids) - len(lead) :] == lead:
            lead = []  # The record's text has it.
        written_calls = [as_call(name, arguments) for name, arguments in checked]
        return WrittenAnswer(header=header, sampled=[*ids, *lead, end], calls=written_calls)

    def with_header(self, prompt: list[int], header: str) -> list[int]:
        """Return the tokens before an answer with this header in place of the generation prompt.

        Raises: ValueError: the prompt does not end with the generation prompt.
        """
        if header == self._asked:
            return prompt
        whole = self.renderer.turns.after_user
        for before, after in ((whole, self._closed + header), (self._asked, header)):
            asked = self._plain(before)
            if prompt[len(prompt) - len(asked) :] == asked:
                return [*prompt[: len(prompt) - len(asked)], *self._plain(after)]
        raise ValueError("messages: the chat template asks for this answer in another form")

    def without_thoughts(
        self, prompt: list[int], answer: WrittenAnswer
    ) -> tuple[list[int], list[int]]:
        """Return a past answer without its thoughts, and the tokens before it.

        Args:
            prompt: the tokens before the answer, with the generation prompt.
        """
        asked = self._asked
        header = answer.header.removeprefix(asked) if answer.header != asked else ""
        is_closed = any(closes in header for _, closes in self._marks)
        closing = self._plain(header) if is_closed else []  # Else its text would be thoughts.
        return self.renderer.without_thoughts(
            prompt, [*closing, *answer.sampled], has_calls=bool(answer.calls)
        )

    def _split_header(self, text: str, past: str, *, head: str) -> tuple[str, str]:
        """Return the header before an answer, behind the text of all prompts, and the answer.

        A header that opens a block of thoughts stands before an answer with thoughts only.

        Args:
            past: the template's header before such an answer in later prompts.
            head: the header that a policy samples before the text of an answer.
        """
        turns = self.renderer.turns
        form = self.renderer.thoughts
        if form.between:
            has_head = without_marks(form.head_end) in text
            return self._asked, text if has_head else self._answered + text
        opens, closes = next(
            (each for each in self._marks if each[0] in turns.after_user), ("", "")
        )
        has_thoughts = any(closing in text for _, closing in self._marks)
        if not opens:
            return self._asked, self._headed(text, head)
        has_thoughts = has_thoughts or text.lstrip().startswith(opens)  # They may be cut.
        lead = turns.after_user[turns.after_user.rindex(opens) :]
        if closes in lead:
            if has_thoughts:
                return _before_marks(self._answered.removesuffix(self._head), self._marks), text
            if not head and past.startswith(self._asked):  # Space before a call.
                text = past.removeprefix(self._asked) + text
            return self._asked, self._headed(text, head)
        if not has_thoughts:
            return (past if closes in past else self._closed_header(closes)), text
        for start in (lead, lead.strip()):
            if text.startswith(start):
                return self._asked, text.removeprefix(start).lstrip("\n")
        return self._asked, text

    def _closed_header(self, closes: str) -> str:
        """Return the header of an answer without thoughts, for prompts that begin thoughts.

        It is the template's own empty block, or the generation prompt with the end of thoughts. A
        policy that receives this prompt answers only after that end.
        """
        asked = self._asked
        shown = self._header_of({"content": ASSISTANT}, ASSISTANT)
        if closes in shown:
            return shown
        block = next(filter(None, map(self._block_of, FIELDS)), "").replace(THOUGHT, "")
        if block.startswith(asked) and closes in block:
            return block
        space = "\n" if asked.endswith("\n") else ""
        return f"{asked}{space}{closes}{space * 2}"

    def _header_of(self, answer: Message, mark: str) -> str:
        """Return the text before a mark in the last answer, behind the text of all prompts.

        The result is "" if the template does not show the mark.
        """
        messages = [{"role": "user", "content": USER}, {"role": "assistant", **answer}]
        text = self._rendered(messages, (), is_asking=False).partition(USER)[2]
        before, is_shown, _ = text.partition(mark)
        return before.removeprefix(self._closed) if is_shown else ""

    def _headed(self, text: str, head: str) -> str:
        """Return an answer with the header that a policy samples before its text or thoughts."""
        if any(text.startswith(opens) for opens, _ in self._marks):
            return self._lead + text
        if text.startswith(head) or (head.strip() and head in text):
            return text
        return text if any(closes in text for _, closes in self._marks) else head + text

    def _with_thoughts(self, thoughts: str) -> str:
        """Return thoughts as the template writes them before an answer's text."""
        block = next(filter(None, map(self._block_of, FIELDS)), "")
        if not block:
            raise ValueError(f"{FIELDS[0]}: the chat template shows no thoughts")
        return block.replace(THOUGHT, thoughts)

    def _block_of(self, name: str) -> str:
        """Return THOUGHT in a field as the template shows it before an answer; "": it does not."""
        block = self._header_of({"content": ASSISTANT, name: THOUGHT}, ASSISTANT)
        return block if THOUGHT in block else ""

    def _space_before_thoughts(self) -> str:
        """Return the whitespace that a policy samples before the mark that opens thoughts."""
        block = next(filter(None, map(self._block_of, FIELDS)), "")
        space = block[: len(block) - len(block.lstrip())]
        is_opened = any(block.startswith(space + opens) for opens, _ in self._marks)
        return space if is_opened and not self._asked else ""

    def _with_calls(
        self, said: str, checked: list[Call], tools: Sequence[Message]
    ) -> tuple[str, str]:
        """Return the header of an answer, and the answer with its calls as the template writes.

        Args:
            said: the text beside the calls, which may begin with thoughts.
        """
        turn = self.renderer.call_turn
        if not isinstance(turn, CallTurn):
            raise ValueError(f"tool_calls: {turn}")
        thoughts, said = self._split_thoughts(said)
        # Names of framing tokens in the record are letters, which end no turn.
        shown = [turn.call(name, each_text(given, self._marked)) for name, given in checked]
        example = {"role": "assistant", "content": self._marked(said), "tool_calls": shown}
        results = [{"role": "tool", "name": name, "content": NEXT} for name, _ in checked]
        whole = self._rendered(
            [{"role": "user", "content": USER}, example, *results], tools, is_asking=False
        )
        answer = whole.partition(USER)[2].removeprefix(self._closed)
        header = self._answered.removesuffix(self._head)
        marks = [mark for pair in self._marks for mark in pair]
        # Thoughts that the record does not have.
        for past in (self._moved + turn.answered, header):
            if any(mark in past for mark in marks) and answer.startswith(past):
                header = past
                answer = answer.removeprefix(past)
                break
        text, has_end, _ = answer.partition(self.renderer.call_end)
        text = text.replace(_BREAK, "")
        if not has_end or not turn.form.shows(text, checked):
            raise ValueError(
                f"tool_calls: the chat template writes {text!r:.300}, which is not read as the same"
                " calls; give another template (model.chat_template)"
            )
        if said.strip() not in text:
            raise ValueError(
                "content: the chat template does not write the text before the tool calls; remove"
                " the text, or give another template (model.chat_template)"
            )
        return header, thoughts + (text.lstrip() if thoughts else text)

    def _split_thoughts(self, text: str) -> tuple[str, str]:
        """Return the thoughts at the beginning of an answer with their marks, and the rest."""
        ends = [at + len(closes) for _, closes in self._marks if (at := text.rfind(closes)) >= 0]
        rest = text[max(ends, default=0) :].lstrip()
        return (text.removesuffix(rest), rest) if ends else ("", text)

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[Message], *, is_asking: bool
    ) -> str:
        """Return the chat template's text. Raises: ValueError: it refuses the messages."""
        try:
            return self.renderer.rendered(messages, tools=list(tools) or None, is_asking=is_asking)
        except (TemplateError, TypeError, ConfigError) as error:
            raise ValueError(f"messages: the chat template refuses them: {error}") from error

    def _plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _own(self, text: str) -> list[int]:
        """Return the tokens of an answer's text, in which names of framing tokens are letters."""
        if not self._joint:
            return self._plain_pieces(text)
        ids: list[int] = []
        for number, piece in enumerate(text.split(self._joint)):
            ids += self._plain(self._joint) if number else []
            ids += self._plain_pieces(piece)
        return ids

    def _plain_pieces(self, text: str) -> list[int]:
        """Return the tokens of a text in which framing tokens are encoded as letters."""
        pieces = self._marked(text).split(_BREAK)
        return [each for piece in pieces for each in self._plain(piece)]

    def _marked(self, text: str) -> str:
        """Return a text with a mark inside each name of a framing token."""
        return self._framing.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)


def _before_marks(text: str, marks: Sequence[Sequence[str]]) -> str:
    """Return the part of a text before the first mark that opens thoughts."""
    return text[: min([len(text), *(at for opens, _ in marks if (at := text.find(opens)) >= 0)])]


def _behind(header: str, marks: Sequence[str]) -> str:
    """Return the part of a header that stands behind the marks of thoughts.

    A space there belongs to the thoughts.
    """
    ends = [header.rindex(mark) + len(mark) for mark in marks if mark in header]
    rest = header[max(ends, default=0) :]
    return rest if rest.strip() or not ends else ""


def _checked_calls(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return name and arguments of each call. Raises: ValueError: a call is malformed."""
    if not isinstance(calls, list):
        raise ValueError("tool_calls: must be a list")
    checked: list[tuple[str, dict[str, Any]]] = []
    for number, item in enumerate(cast(list[object], calls)):
        call = cast(dict[str, Any], item) if isinstance(item, dict) else {}
        inner: object = call.get("function", call)
        function = cast(dict[str, Any], inner) if isinstance(inner, dict) else {}
        name: object = function.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError(f"tool_calls[{number}]: must have a name")
        try:
            arguments = read_arguments(function.get("arguments"))
        except ValueError as error:
            raise ValueError(f"tool_calls[{number}]: arguments: {error}") from error
        checked.append((name, each_text(arguments, valid_text)))
    return checked


def segments_of(
    conversation: Conversation, writer: AnswerWriter, keep: KeepThinking
) -> list[list[Part]]:
    """Return the parts of each segment; with `KeepThinking.ALL`, there is one segment.

    Raises: ValueError: the chat template cannot show a message; the text has the field's name.
    """
    steps = _steps_of(conversation, writer)
    num_kept = {KeepThinking.ALL: len(steps), KeepThinking.LAST: 1, KeepThinking.NONE: 0}[keep]
    segments: list[list[Part]] = []
    context: list[int] = []  # Tokens of the newest segment.
    for number, step in enumerate(steps):
        if step.answer is None and segments:  # The text after the last answer.
            segments[-1].append((step.prompt, False))
            break
        num_forgotten = max(0, number - num_kept)
        shown = [each for old in steps[:num_forgotten] for each in _forgotten(old, writer)]
        shown += [each for old in steps[num_forgotten:number] for each in _kept(old, writer)]
        shown += _asked(step, writer)
        if context and shown[: len(context)] == context:
            segments[-1].append((shown[len(context) :], False))
        else:
            segments.append([(shown, False)])
        sampled = [] if step.answer is None else step.answer.sampled
        segments[-1].append((sampled, step.is_trained))
        context = [*shown, *sampled]
    return segments


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenTurn:
    """A prompt from the answer before it, with its answer; None: the conversation ends."""

    prompt: list[int]
    answer: WrittenAnswer | None
    is_trained: bool = False


def _steps_of(conversation: Conversation, writer: AnswerWriter) -> list[_WrittenTurn]:
    tools = conversation.tools
    steps: list[_WrittenTurn] = []
    shown: list[dict[str, Any]] = []  # Messages since the last answer.
    last: WrittenAnswer | None = None
    calls: list[dict[str, Any]] = []  # Calls of the last answer.
    recorded_calls: list[dict[str, Any]] = []  # The same calls, as the record has them.
    for recorded in conversation.messages:
        message = _as_chat(recorded)
        if not recorded.is_agent:
            shown.append(message)
            continue
        answer = writer.write(message, tools=tools)
        prompt = _prompt(writer.renderer, _with_results(shown, recorded_calls), tools, last, calls)
        steps.append(_WrittenTurn(prompt=prompt, answer=answer, is_trained=recorded.is_trained))
        shown = []
        last = answer
        calls = answer.calls
        recorded_calls = recorded.calls
    if shown:
        prompt = _prompt(writer.renderer, _with_results(shown, recorded_calls), tools, last, calls)
        steps.append(_WrittenTurn(prompt=prompt, answer=None))
    return steps


def _asked(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the prompt of an answer with the answer's own header."""
    return writer.with_header(step.prompt, step.answer.header) if step.answer else step.prompt


def _kept(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the tokens of a past answer and its prompt, as they were sampled."""
    assert step.answer is not None
    return [*_asked(step, writer), *step.answer.sampled]


def _forgotten(step: _WrittenTurn, writer: AnswerWriter) -> list[int]:
    """Return the tokens of a past answer and its prompt without the thoughts."""
    assert step.answer is not None
    shown, answer = writer.without_thoughts(step.prompt, step.answer)
    return [*shown, *answer]


def _with_results(shown: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages after an answer, whose first ones are the results of its calls in order.

    Raises: ValueError: a result has the id of no call.
    """
    others = (i for i, each in enumerate(shown) if each["role"] != "tool")
    num = next(others, len(shown))
    return [*in_order(shown[:num], calls), *shown[num:]]


def _prompt(
    renderer: Renderer,
    shown: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    last: WrittenAnswer | None,
    calls: list[dict[str, Any]],
) -> list[int]:
    """Return the tokens from the last answer, or from the beginning, to the next answer."""
    if not shown:
        raise ValueError("messages: the agent's message follows none of the environment")
    is_user = [each["role"] for each in shown] == ["user"]
    text = str(shown[0]["content"])
    if last is None:
        if is_user and not tools:
            return renderer.first_prompt(text)
        return renderer.of_messages(shown, tools=tools)
    end = last.sampled[-1]
    if is_user and not calls:
        return renderer.after_turn(text, is_stopped=True, end=end)
    has_calls = bool(calls) or shown[0]["role"] == "tool"
    return renderer.after_calls(
        shown, tools=tools, is_stopped=True, has_calls=has_calls, calls=calls, end=end
    )


def _as_chat(message: agent_traj.Message) -> dict[str, Any]:
    """Return a message in the format of chat templates."""
    converted: dict[str, Any] = {"role": message.chat_role, "content": message.text}
    if message.call_id:
        converted[RESULT_ID] = message.call_id
    if message.thoughts:
        converted[FIELDS[0]] = message.thoughts
    return {**converted, "tool_calls": message.calls} if message.calls else converted
