"""Decoding of single tokens from a tokenizer.json, without a tokenizer library."""

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Decoder of one vocabulary. A character that spans tokens belongs to its last token."""

    _pieces: dict[int, str]

    def __init__(self, path: Path) -> None:
        """Read a tokenizer.json. Raises: ConfigError: it is missing or malformed."""
        try:
            settings: Any = json.loads(path.read_bytes())
            vocab: Any = settings["model"]["vocab"]
            added: dict[int, str] = {
                t["id"]: t["content"] for t in settings.get("added_tokens", [])
            }
            if isinstance(vocab, list):  # A unigram model lists [piece, score] by token id.
                listed = cast(list[tuple[str, float]], vocab)
                self._pieces = {number: each[0] for number, each in enumerate(listed)}
            else:
                self._pieces = {number: piece for piece, number in vocab.items()}
        except FileNotFoundError as error:
            raise ConfigError(f"{path} does not exist") from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path} is not a valid tokenizer.json ({error!r:.80})") from error
        self._special = {t["id"] for t in settings.get("added_tokens", []) if t.get("special")}
        shape = json.dumps([settings.get("decoder"), settings.get("pre_tokenizer")])
        self._byte_of = _byte_alphabet() if '"ByteLevel"' in shape else None
        self._known: dict[int, bytes] = {number: text.encode() for number, text in added.items()}

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes(number)) for number in token_ids]
        if texts and (rest := decoder.decode(b"", final=True)):
            texts[-1] += rest
        return texts

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the joined text as environments receive it: stripped, without special tokens."""
        return "".join(self.texts([n for n in token_ids if n not in self._special])).strip()

    def _bytes(self, number: int) -> bytes:
        """Return the bytes of a token."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._decode(number)
        return found

    def _decode(self, number: int) -> bytes:
        """Return the bytes of a piece of the vocabulary."""
        piece = self._pieces.get(number)
        if piece is None:
            return f"⟨{number}⟩".encode()
        if self._byte_of is not None:
            if all(c in self._byte_of for c in piece):
                return bytes(self._byte_of[c] for c in piece)
            return piece.encode("utf-8", "replace")
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode("utf-8", "replace")


class TokenIdDecoder:
    """Decoder for runs without a tokenizer: it shows token ids."""

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each id in brackets."""
        return [f"⟨{number}⟩" for number in token_ids]

    def text(self, token_ids: Sequence[int]) -> str:
        """Raise ConfigError: the actions are unknown without a tokenizer."""
        raise ConfigError("The run's tokenizer is missing, so its actions cannot be decoded.")


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary.

    Printable bytes map to themselves; the other bytes map to the characters from 256 on.
    Source: the byte-level BPE of GPT-2 (Radford et al. 2019).
    """
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in own]
    return {chr(b): b for b in own} | {chr(256 + i): byte for i, byte in enumerate(rest)}
