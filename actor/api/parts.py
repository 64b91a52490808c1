"""Reads an answer whose tokens arrive in parts, for streams."""

from actor.api.prompts import cut_answer, logprobs_of
from actor.api.requests import AnswerPart, PolicyRequest
from actor.formats.renderer import Renderer
from actor.formats.sampled import without_special
from actor.formats.thoughts import len_of_begun
from actor.rollout.context import Turn


class AnswerComplete(Exception):
    """Raised for tokens after which the request takes no other one."""


class PartialAnswer:
    """The tokens of an answer so far, and the text that a stream has sent of them.

    A stream sends a text once no later token can change it. These parts are held back:

    - the part of a character, spaces at the end of the text;
    - text that may become a mark of thoughts, a stop text, or a call;
    - calls, up to the end of the answer: if one cannot be parsed, all of them are text.
    """

    def __init__(self, renderer: Renderer, asked: PolicyRequest, *, num_prompt: int) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.text = ""  # The text that was sent.
        self.thoughts = ""  # The thoughts that were sent.
        self._renderer = renderer
        self._asked = asked
        self._num_prompt = num_prompt
        self._num_reported = 0  # Tokens whose logprobs were sent.
        self._growing = renderer.growing()

    @property
    def taken(self) -> Turn:
        """The tokens so far as a turn without an end."""
        return Turn(
            list(self.token_ids),
            list(self.logprobs),
            list(self.versions),
            is_stopped=False,
            num_prompt=self._num_prompt,
        )

    def add(self, new: Turn) -> AnswerPart:
        """Append tokens and return the part of the answer that can be sent now.

        Raises: AnswerComplete: the request takes no further token.
        """
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs
        self.versions += new.versions
        ends = self._renderer.end_of_turn_ids
        self._growing.add([each for each in new.token_ids if each not in ends])
        if self._is_complete():
            raise AnswerComplete
        part = self._new_part(*self._settled())
        self._num_reported = len(self.token_ids)
        return part

    def _is_complete(self) -> bool:
        """Return whether the limit of tokens or a stop text ends the answer."""
        limit = self._asked.max_tokens
        if limit is not None and len(self.token_ids) >= limit:
            return True
        plain = without_special(self._growing.text)
        if not any(stop in plain for stop in self._asked.stop):
            return False
        return cut_answer(self._renderer.plain_text, self.token_ids, self._asked).stop is not None

    def _settled(self) -> tuple[str, str]:
        """Return the text and the thoughts that no later token changes."""
        answer = self._growing.text
        if self._asked.prompt is not None:
            text, thoughts = without_special(answer).strip(), ""
        else:
            text, thoughts = self._renderer.settled(answer, tools=bool(self._asked.tools))
        for stop in self._asked.stop:
            text = text.partition(stop)[0]
        return text[: len(text) - len_of_begun(text, self._asked.stop)].rstrip(), thoughts

    def _new_part(self, text: str, thoughts: str) -> AnswerPart:
        """Return the part of an answer that was not sent, and count it as sent."""
        start = self._num_reported
        part = AnswerPart(
            text=text[len(self.text) :],
            thoughts=thoughts[len(self.thoughts) :],
            logprobs=logprobs_of(
                self._renderer, self.token_ids[start:], self.logprobs[start:], self._asked
            ),
        )
        self.text = text if len(text) > len(self.text) else self.text
        self.thoughts = thoughts if len(thoughts) > len(self.thoughts) else self.thoughts
        return part
