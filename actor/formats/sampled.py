"""The text of sampled tokens in which special tokens differ from the same letters.

A special token's name stands between two marks that no decoded text contains.
"""

import itertools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actor.formats.control_tokens import special_tokens

# Halves of surrogate pairs. Decoded text never contains them.
_OPEN = "\udc02"
_CLOSE = "\udc03"
_SPECIAL = re.compile(f"{_OPEN}[^{_CLOSE}]*{_CLOSE}")
INCOMPLETE = "\ufffd"  # A decoder writes it for a part of a character.
_NO_MARKS = str.maketrans({_OPEN: None, _CLOSE: None})


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive tokens of one kind: ordinary ones, or one added token."""

    text: str
    ids: Sequence[int]
    is_added: bool


class SampledText:
    """Decodes sampled tokens with marked special tokens, and finds the token of a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        self._added = {
            number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()
        }
        self._added |= self._special
        self._bytes = _byte_tokens(tokenizer)

    def marked(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, each special token between two marks."""
        return "".join(run.text for run in self._runs(token_ids))

    def encoded(self, text: str) -> str:
        """Return a text of the chat template as `marked` returns its tokens."""
        return self.marked(self._tokenizer.encode(text, add_special_tokens=False))

    def growing(self) -> "GrowingText":
        """Return the text of tokens that arrive in parts, without tokens."""
        return GrowingText(self._tokenizer, self._added, self._named, self._bytes)

    def num_tokens(self, token_ids: Sequence[int], num_chars: int) -> int:
        """Return the number of tokens that contain the first characters of `marked`."""
        seen = 0
        count = 0
        for run in self._runs(token_ids):
            if seen >= num_chars:
                return count
            if seen + len(run.text) <= num_chars or run.is_added:
                count += len(run.ids)
            else:
                decode = self._tokenizer.decode
                wanted = num_chars - seen
                count += bisect_left(
                    range(len(run.ids)), wanted, key=lambda n: len(decode(list(run.ids[:n])))
                )
            seen += len(run.text)
        return count

    def pairs_of(self, word: str) -> list[tuple[str, str]]:
        """Return pairs of added tokens that open and close a block of a kind, such as think."""
        names = {name: self._named(number) for number, name in self._added.items()}
        pairs: list[tuple[str, str]] = []
        for name, shown in names.items():
            at = name.lower().find(word)
            closing = (
                f"{name[:at]}/{name[at:]}",
                name.replace("START", "END").replace("start", "end").replace("begin", "end"),
            )
            pairs += [(shown, names[each]) for each in closing if at > 0 and each in names]
        return [each for each in pairs if each[0] != each[1]]

    def _runs(self, token_ids: Sequence[int]) -> list[_Run]:
        """Return the tokens as runs of ordinary tokens and single added tokens."""
        runs: list[_Run] = []
        for is_added, group in itertools.groupby(token_ids, self._added.__contains__):
            ids = list(group)
            if is_added:
                runs += [_Run(self._named(each), [each], True) for each in ids]
            else:
                runs.append(_Run(self._tokenizer.decode(ids), ids, False))
        return runs

    def _named(self, token_id: int) -> str:
        """Return an added token by its name, with marks if it is special."""
        name = self._added[token_id]
        return f"{_OPEN}{name}{_CLOSE}" if token_id in self._special else name


class GrowingText:
    """The text of tokens that arrive in parts, as `SampledText.marked` returns it for all of them.

    Characters whose last bytes have not arrived are not in the text yet. Consecutive tokens of
    single bytes arrive together, because one wrong byte makes all of them unreadable. Only the
    latest tokens are decoded again: the tokens before them determine no more than their first
    character.
    """

    def __init__(
        self,
        tokenizer: Any,
        added: Mapping[int, str],
        named: Callable[[int], str],
        single_bytes: frozenset[int],
    ) -> None:
        """`SampledText.growing` creates it."""
        self.text = ""
        self._tokenizer = tokenizer
        self._added = added
        self._named = named
        self._bytes = single_bytes
        self._run: list[int] = []  # The latest ordinary tokens.
        self._num_read = 0  # The first of them, whose characters are in the text.

    def add(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        for is_added, group in itertools.groupby(token_ids, self._added.__contains__):
            if is_added:
                self._read(is_end=True)
                self._run.clear()
                self._num_read = 0
                self.text += "".join(map(self._named, group))
            else:
                self._run += group
                if self._run[-1] not in self._bytes:
                    self._read(is_end=False)

    def _read(self, *, is_end: bool) -> None:
        """Append the characters of the tokens that were not read yet."""
        earlier = self._tokenizer.decode(self._run[: self._num_read])
        text = self._tokenizer.decode(self._run)
        if len(text) <= len(earlier) or (text.endswith(INCOMPLETE) and not is_end):
            return
        self.text += text[len(earlier) :]
        del self._run[: self._num_read]
        self._num_read = len(self._run)


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are single bytes (`<0x0A>`); empty for a vocabulary without them."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{number:02X}>" for number in range(256)])
    unknown = tokenizer.unk_token_id
    return frozenset(each for each in ids if each is not None and each != unknown)


def without_special(text: str) -> str:
    """Return marked text without its special tokens."""
    return _SPECIAL.sub("", text)


def without_marks(text: str) -> str:
    """Return marked text with the names of its special tokens as letters."""
    return text.translate(_NO_MARKS)


def begin_of_marked(text: str, num_chars: int) -> str:
    """Return the begin of marked text that has this many characters beside the marks."""
    places = (at for at, char in enumerate(text) if char not in (_OPEN, _CLOSE))
    return text[: next(itertools.islice(places, num_chars, None), len(text))].removesuffix(_OPEN)


def special_in(text: str) -> list[str]:
    """Return the special tokens in marked text, each with its marks."""
    return _SPECIAL.findall(text)
