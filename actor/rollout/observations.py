"""What an environment says, made fit for a conversation: valid text, and no longer than its room.

Half a character becomes U+FFFD. What is too long loses its end, and a mark says how much. The first
page may take all that the context leaves for a turn, a later observation half of the context; one
for which no room is left is not taken up, and its episode ends as context_full.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.text import valid_text

CUT_MARK = "\n[cut here: {} more characters]"
MAX_CHARS_PER_TOKEN = (
    64  # what is longer than so many per token of room is cut before it is encoded
)


@dataclass(slots=True)
class Observations:
    """Those of one episode, and how many of them had to be changed."""

    num_repaired: int = 0
    num_cut: int = 0

    def fitted(
        self, text: str, encode: Callable[[str], list[int]], *, max_tokens: int
    ) -> list[int] | None:
        """Return the token ids of an observation, or of its beginning; None: nothing of it fits.

        Args:
            encode: what a text is in a conversation, framing included; called again only for a
                text that is too long.
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
