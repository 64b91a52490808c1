"""Encoding text of others: what reads like a control token is spelled out, and never becomes one.

Such are a tokenizer's special tokens and those that its chat template puts between turns.
"""

import re
from typing import Any

# Half of a surrogate pair: no valid text has it, so it can mark a place in one.
_BREAK = "\udcff"


class ControlTokens:
    """The control tokens of one tokenizer.

    Example:
        tokens = ControlTokens(tokenizer)
        tokens.encode(tokens.broken("a<|end|>b"))  as "a<", "|end|>b" are encoded apart
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        names = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        for token_id, token in tokenizer.added_tokens_decoder.items():
            is_framing = token.content[:1] in ("<", "[", "|") and token.content in template
            if token.special or is_framing:
                names[token_id] = token.content
        spelled = sorted({name for name in names.values() if name}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        # What a tokenizer says of unknown text is no control token, unless it is another one, too.
        others = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
        unknown = {tokenizer.unk_token_id} - {*others}
        self._ids = frozenset(names.keys() - unknown)
        self._expected: dict[tuple[str, str], list[int]] = {}  # of pieces of the template

    def broken(self, text: str) -> str:
        """Return valid text with a mark inside each control token's name, for `encode` to see."""
        return self._pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; at its marks it is encoded in pieces."""
        pieces = text.split(_BREAK) if _BREAK in text else [text]
        encode = self._tokenizer.encode
        return [each for piece in pieces for each in encode(piece, add_special_tokens=False)]

    def encode_between(self, before: str, text: str, after: str) -> list[int]:
        """Return the token ids of others' text between two pieces of a chat template.

        All three are encoded as one. Only where that makes a control token more than the template
        has (names may match after normalization) each is by itself, and the text without them.
        """
        frame = (before, after)
        if frame not in self._expected:
            self._expected[frame] = self._of(self.encode(before) + self.encode(after))
        broken = self.broken(text)
        ids = self.encode(before + broken + after)
        if self._of(ids) == self._expected[frame]:
            return ids
        inner = [each for each in self.encode(broken) if each not in self._ids]
        return [*self.encode(before), *inner, *self.encode(after)]

    def _of(self, ids: list[int]) -> list[int]:
        return [each for each in ids if each in self._ids]
