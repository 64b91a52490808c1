"""Finds the thoughts in a sampled answer. An environment never receives them.

The form of thoughts is measured on the chat template. Two forms exist:

block      <think> thoughts </think> answer
messages   <|channel|>analysis<|message|> thoughts <|end|><|start|>assistant
           <|channel|>final<|message|> answer
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jinja2 import TemplateError

from actor.formats.sampled import SampledText, special_in, without_marks, without_special
from common.formats.calls import NAME, as_call
from common.formats.turns import ASSISTANT, USER, Message, RenderTurns, Turns
from common.text import shared_end_tags, shared_tags

THOUGHT = "\u2402thought\u2403"
USUAL = ("<think>", "</think>")  # Most models that think write these, whatever the template has.
# Names of a message's field for thoughts, in the order in which they are tried.
FIELDS = ("reasoning_content", "reasoning", "thinking")
USER_MESSAGE: Message = {"role": "user", "content": USER}
_BREAK = "\ue000"  # A character that no tag of a template contains.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThoughtForm:
    """Form of thoughts in the answers of one chat template, as `SampledText.marked` has them."""

    blocks: Sequence[tuple[str, str]] = (USUAL,)  # Marks before and after thoughts.
    # Text between two messages of an answer; "": an answer is one message.
    between: str = ""
    opens: str = ""  # Start of a message that holds thoughts.
    head_end: str = ""  # Last special token of a message's head.
    asked: str = ""  # End of the generation prompt: the answer continues it.
    field: str = ""  # Field of a message whose thoughts the template shows; "": it shows none.
    # Text before an end of thoughts without a beginning stays text. A stream has already sent it.
    keeps_lead: bool = False

    def spans(self, answer: str) -> list[Span]:
        """Return start and end of each part of a marked answer that is no thought.

        Thoughts without an end last until the end of the answer. An end without a beginning means
        that all text before it is thoughts, unless `keeps_lead`.
        """
        text = self.asked + answer
        start = len(self.asked)
        spans = [
            span
            for message in self._messages(text)
            for span in self._outside_blocks(text, *message)
        ]
        moved = [(max(a, start) - start, b - start) for a, b in spans if b > start]
        return [(a, b) for a, b in moved if a < b]

    def text(self, answer: str) -> str:
        """Return the text of a marked answer without its thoughts and special tokens."""
        return "".join(self.shown(answer[a:b]) for a, b in self.spans(answer))

    def shown(self, message: str) -> str:
        """Return a marked message without its head and special tokens."""
        return without_special(self._body(message))

    def thoughts(self, answer: str) -> str:
        """Return the thoughts of a marked answer without their marks and special tokens."""
        edges = [0, *(edge for span in self.spans(answer) for edge in span), len(answer)]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        thoughts = "".join(answer[a:b] for a, b in pairs)
        for mark in (self.opens, self.between, *(each for pair in self.blocks for each in pair)):
            thoughts = thoughts.replace(mark, "") if mark else thoughts
        return without_special(thoughts).strip()

    @property
    def marks(self) -> list[str]:
        """The marks of thoughts and of messages."""
        marks = [self.between, self.opens, self.head_end]
        return [each for each in (*marks, *itertools.chain(*self.blocks)) if each]

    @property
    def special(self) -> list[str]:
        """Special tokens in the marks of thoughts. Such a token ends no turn."""
        marks = [self.between, self.opens, *(each for pair in self.blocks for each in pair)]
        return [name for each in marks for name in special_in(each)]

    def num_settled(self, answer: str) -> int:
        """Return the length of the begin of a marked answer that no later text makes a thought.

        Of several messages, the last one is not settled before the end of its head.
        """
        end = len(answer) - len_of_begun(answer, self.marks)
        for mark in self.marks:  # The end of a whole mark may begin another one.
            at = answer.rfind(mark, 0, end + len(mark) - 1)
            end = at if 0 <= at < end < at + len(mark) else end
        if not self.between:
            return end
        start = answer.rfind(self.between, 0, end) + 1
        start += len(self.between) - 1 if start else 0
        head = answer[start:end].lstrip()
        is_open = head.startswith(self.opens) or self.head_end in head
        return end if is_open else start

    def described(self) -> str:
        """Return the form of thoughts as text."""
        if self.between:
            return without_marks(f"{self.opens} ... {self.between}")
        opens, closes = self.blocks[0]
        return without_marks(f"{opens} ... {closes}")

    def _messages(self, text: str) -> list[Span]:
        """Return the messages of an answer that hold no thoughts."""
        if not self.between:
            return [(0, len(text))]
        spans: list[Span] = []
        at = 0
        for piece in text.split(self.between):
            if not piece.lstrip().startswith(self.opens):
                spans.append((at, at + len(piece)))
            at += len(piece) + len(self.between)
        return spans

    def _outside_blocks(self, text: str, start: int, end: int) -> list[Span]:
        """Return the spans of a text outside of all kinds of blocks."""
        spans = [(start, end)]
        for opens, closes in self.blocks:
            spans = [
                each
                for a, b in spans
                for each in _outside(text, a, b, opens, closes, keeps_lead=self.keeps_lead)
            ]
        return spans

    def _body(self, message: str) -> str:
        """Return a message without its head."""
        if not self.between:
            return message
        _, has_head, body = message.partition(self.head_end)
        return body if has_head else message


def _outside(
    text: str, start: int, end: int, opens: str, closes: str, *, keeps_lead: bool
) -> list[Span]:
    """Return the parts of text[start:end] outside of blocks.

    Behind a block, another end of thoughts is a part of the answer.
    """
    spans: list[Span] = []
    at = start
    has_block = False
    while at < end:
        first = text.find(opens, at, end)
        stop = text.find(closes, at, end)
        if stop >= 0 and (first < 0 or stop < first):  # The block's beginning is missing.
            spans = [*spans, (at, stop)] if has_block or keeps_lead else []
            has_block = True
            at = stop + len(closes)
            continue
        spans.append((at, end if first < 0 else first))
        if first < 0 or stop < 0:
            break
        has_block = True
        at = stop + len(closes)
    return spans


def measure_thoughts(render: RenderTurns, turns: Turns, sampled: SampledText) -> ThoughtForm:
    """Return the form of thoughts in a template's answers; the usual one if it shows none."""
    asked = sampled.encoded(turns.after_user)
    usual = [USUAL, tuple(map(sampled.encoded, USUAL)), *sampled.pairs_of("think")]
    shown = _shown(render, turns)
    if shown is None:
        return ThoughtForm(blocks=_distinct(usual), asked=asked)
    field = shown[3]
    opens, closes = map(sampled.encoded, shown[:2])
    header = sampled.encoded(turns.answered)
    between = closes.removesuffix(header)
    repeated = shared_end_tags(between, asked)  # The head of another message of the same answer.
    if special_in(repeated):
        *_, head_end = special_in(header or opens)
        return ThoughtForm(
            blocks=_distinct(usual),
            between=between,
            opens=opens.strip(),
            head_end=head_end,
            asked=asked.rpartition(repeated)[2],
            field=field,
        )
    marks = (opens.strip(), sampled.encoded(shown[2]).strip().partition("\n")[0])
    return ThoughtForm(blocks=_distinct([marks, *usual]), asked=asked, field=field)


def _shown(render: RenderTurns, turns: Turns) -> tuple[str, str, str, str] | None:
    """Return the text before and after thoughts in an answer; None: the template shows none.

    The third text is the end of the thoughts: the start of the second one that an answer with text
    and one with calls share. The fourth text is the field of the thoughts.
    """
    examples: list[tuple[str, str, str]] = []
    for extra in ({"content": ASSISTANT}, {"content": "", "tool_calls": [as_call(NAME, {})]}):
        plain = _text_of(render, [USER_MESSAGE, {"role": "assistant", **extra}])
        for name in FIELDS:
            shown = _around(render, turns, plain, {**extra, name: THOUGHT})
            if shown is not None:
                examples.append((*shown, name))
                break
    if not examples:
        return None
    opens, closes, field = examples[0]
    shared = shared_tags(closes, examples[-1][1])
    return opens, closes, shared if shared.strip() else closes, field


def _around(
    render: RenderTurns, turns: Turns, plain: str, answer: Message
) -> tuple[str, str] | None:
    """Return the text before and after thoughts in one message; None: it shows none.

    Args:
        plain: the text of the same message without thoughts.
    """
    text = _text_of(render, [USER_MESSAGE, {"role": "assistant", **answer}])
    lead, _, rest = text.partition(THOUGHT)
    closes = rest[: len(rest) - len(shared_end_tags(rest, plain))]
    if ASSISTANT in plain:
        closes = rest.partition(ASSISTANT)[0]
    begin = lead.removeprefix(shared_tags(lead, turns.closed))
    opens = begin if begin.strip() else _opening(lead, closes, turns)
    return (opens, closes) if opens and closes.strip() else None


def _opening(lead: str, closes: str, turns: Turns) -> str:
    """Return the mark that opens thoughts, if the text before all answers contains it.

    It ends as the closing mark does: <think> and </think>, <|open|>think and <|close|>think.
    """
    line = lead.rstrip().rpartition("\n")[2]
    start = next((i for i in range(len(line)) if line[i:] in closes), len(line))
    if len(line) - start > 1:  # A bracket alone is the end of any tag.
        return line[len(shared_tags(line, line[:start] + _BREAK)) :]
    return turns.asked if turns.asked.strip() and closes.strip() not in turns.asked else line


def _text_of(render: RenderTurns, messages: list[Message]) -> str:
    """Return the rendered text after the user's text, "" if the template refuses it."""
    try:
        return render(messages, False).partition(USER)[2]
    except (TemplateError, TypeError):
        return ""


def len_of_begun(text: str, marks: Iterable[str]) -> int:
    """Return the length of the longest end of a text that begins one of the marks."""
    return max(
        (
            num
            for mark in marks
            for num in range(1, min(len(mark), len(text) + 1))
            if text.endswith(mark[:num])
        ),
        default=0,
    )


def _distinct(pairs: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return pairs of marks in their order, each once."""
    return list(dict.fromkeys((opens, closes) for opens, closes in pairs if opens and closes))
