"""Past answers without their thoughts, in the form in which the chat template shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from actor.formats.sampled import SampledText
from actor.formats.thoughts import ThoughtForm
from common.formats.turn_ends import TurnEnd
from common.formats.turns import Turns
from common.text import shared_length


@dataclass(frozen=True, slots=True)
class PastAnswers:
    """Removes thoughts from sampled answers, and replaces the generation prompt before them."""

    sampled: SampledText
    thoughts: ThoughtForm
    turns: Turns
    header: str  # The template's text before a past answer, behind `Turns.closed`.

    def without_thoughts(self, body: list[int]) -> list[int]:
        """Return the sampled tokens of an answer, without its end, that are no thoughts."""
        marked = self.sampled.marked(body)
        kept: list[int] = []
        for first, last in self.thoughts.spans(marked):
            space = len(marked[first:last]) - len(marked[first:last].lstrip())
            is_body = not kept and not self.thoughts.between  # A head may begin with a space.
            start = self.sampled.num_tokens(body, first + space * is_body)
            kept += body[start : self.sampled.num_tokens(body, last)]
        return kept

    def with_header(
        self, shown: list[int], encode: Callable[[str], list[int]], kept: list[int]
    ) -> list[int]:
        """Return the tokens before an answer with the header of a past answer.

        Args:
            shown: tokens that end with the generation prompt.
            kept: the answer, which may begin with its own header.
        """
        form = self.thoughts
        has_head = bool(form.between) and form.head_end in self.sampled.marked(kept)
        asked = encode(self.turns.after_user)
        past = encode(self.turns.closed + ("" if has_head else self.header))
        num_shared = shared_length(asked, past)
        if shown[-len(asked) :] != asked:  # The template asks without a generation prompt.
            return shown
        return [*shown[: len(shown) - len(asked) + num_shared], *past[num_shared:]]


def past_end(end: int | None, own: TurnEnd) -> list[int]:
    """Return the end of a past answer that was sampled with `end`; None: it was cut.

    The text after the answer holds the template's own end after any other one.
    """
    if end is None:
        return []
    if end in own.last and end not in own.run:
        return list(own.run)
    return [end] if end in own.run else []
