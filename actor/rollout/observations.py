"""Prepares observations for the conversation: valid text that fits the room.

An unpaired surrogate becomes U+FFFD. A text that is too long loses its end, and a mark gives the
number of lost characters. The first page may use all room of a prompt, a later observation half of
the context. An observation that does not fit at all is dropped, and its episode ends as
context_full.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.text import valid_text

CUT_MARK = "\n[cut here: {} more characters]"
MAX_CHARS_PER_TOKEN = (
    64  # A text with more characters per token of room is cut before it is encoded.
)


@dataclass(slots=True)
class Observations:
    """The observations of one episode, with counts of the changed ones."""

    num_repaired: int = 0
    num_cut: int = 0

    def fitted(
        self, text: str, encode: Callable[[str], list[int]], *, max_tokens: int
    ) -> list[int] | None:
        """Return the token ids of an observation or of its beginning; None if nothing of it fits.

        Args:
            encode: returns the ids of a text as part of the conversation, framing included. It is
                called again only for a text that is too long.
        """
        whole = valid_text(text)
        self.num_repaired += whole != text
        num_kept = min(len(whole), max(0, max_tokens) * MAX_CHARS_PER_TOKEN)
        if num_kept == len(whole) and len(ids := encode(whole)) <= max_tokens:
            return ids
        self.num_cut += 1
        while num_kept > 0:
            ids = encode(whole[:num_kept] + CUT_MARK.format(len(whole) - num_kept))
            if len(ids) <= max_tokens:
                return ids
            num_kept = min(num_kept - 1, num_kept * max_tokens // len(ids))
        return None
