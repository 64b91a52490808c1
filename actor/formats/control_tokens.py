"""Encoding of untrusted text: a control token's name in it becomes ordinary tokens.

Control tokens are the tokenizer's special tokens and the tokens that its chat template puts
between turns.
"""

import re
from typing import Any

from common.formats.chat_template import template_of

# Half of a surrogate pair. Valid text never contains it, so it can mark a position.
_BREAK = "\udcff"


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return id -> name of all special tokens.

    A tokenizer's `all_special_ids` has only those with a role, such as eos. Others are special in
    `added_tokens_decoder` alone, such as the ends of turns of Gemma and Phi.
    """
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    added = tokenizer.added_tokens_decoder.items()
    return {**named, **{number: token.content for number, token in added if token.special}}


class ControlTokens:
    """The control tokens of one tokenizer.

    Example:
        tokens = ControlTokens(tokenizer)
        tokens.encode(tokens.broken("a<|end|>b"))  encodes "a<" and "|end|>b" separately
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = template_of(tokenizer)
        names = special_tokens(tokenizer)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token.content[:1] in ("<", "[", "|") and token.content in template:
                names[token_id] = token.content
        spelled = sorted({name for name in names.values() if name}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        # The tokenizer's token for unknown text is no control token, unless it has a second role.
        others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        unknown = {tokenizer.unk_token_id} - {*others}
        self._ids = frozenset(names.keys() - unknown)
        self._expected: dict[tuple[str, str], list[int]] = {}  # Key: (before, after).

    def broken(self, text: str) -> str:
        """Return valid text with a mark inside each control token's name; `encode` splits there."""
        return self._pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. A text with marks is encoded in pieces."""
        pieces = text.split(_BREAK) if _BREAK in text else [text]
        encode = self._tokenizer.encode
        return [each for piece in pieces for each in encode(piece, add_special_tokens=False)]

    def encode_between(self, before: str, text: str, after: str) -> list[int]:
        """Return the token ids of untrusted text between two pieces of a chat template.

        The three parts are encoded as one string. That may yield more control tokens than the
        template has, since names may match after normalization. Then each part is encoded
        separately, and control tokens are removed from the text.
        """
        frame = (before, after)
        if frame not in self._expected:
            self._expected[frame] = self._control_tokens_in(
                self.encode(before) + self.encode(after)
            )
        broken = self.broken(text)
        ids = self.encode(before + broken + after)
        if self._control_tokens_in(ids) == self._expected[frame]:
            return ids
        inner = [each for each in self.encode(broken) if each not in self._ids]
        return [*self.encode(before), *inner, *self.encode(after)]

    def _control_tokens_in(self, ids: list[int]) -> list[int]:
        return [each for each in ids if each in self._ids]
