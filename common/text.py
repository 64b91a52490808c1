"""Text that every encoding of the product can represent, and its escaped form in pages."""

import difflib
import html
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

# Tags of chat templates, such as <think> and [INST].
_TAG = re.compile(r"<[^<>\n]*>|\[[^\[\]\s]*\]")
# These characters can end a document or reverse the direction of the text after them.
BIDI_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)

NEAR_FRAC = 0.6  # Smallest similarity of a name that is suggested for another one.
MAX_LISTED = 12  # Number of known names that are listed if none is similar.


def valid_text(text: str) -> str:
    """Return text that UTF-8 can encode: lone halves of a surrogate pair become U+FFFD.

    JSON and UTF-16 can represent half a character; tokenizers, files and messages cannot. Two
    halves that form a pair become the character that they encode.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def plain(text: str) -> str:
    """Return the text without control characters, which could rewrite the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)


def kind_of(error: str) -> str:
    """Return what errors that differ only in numbers have in common."""
    return re.sub(r"\d+", "#", error)


def is_file_name(text: str) -> bool:
    """Return whether a text names a file or folder in another one, and is no path."""
    return text not in ("", ".", "..") and "/" not in text and text.isprintable()


def is_path_inside(text: str) -> bool:
    """Return whether a text is a relative path that stays in its folder."""
    return all(map(is_file_name, text.split("/")))


def counted(num: float, one: str, many: str = "", *, form: str = "") -> str:
    """Return a number with its noun, such as "1 epoch" or "2 epochs".

    Args:
        one: the noun, and words that agree with it, in the singular.
        many: the same in the plural; "": `one` with an s.
        form: format of the number, such as ",".
    """
    return f"{num:{form}} {one if num == 1 else many or f'{one}s'}"


def near_hint(name: str, candidates: Iterable[str], *, form: Callable[[str], str] = repr) -> str:
    """Return "; the nearest is 'a'" for an unknown name; "" if no known name is similar."""
    by_letters = {each.lower(): each for each in candidates}
    near = difflib.get_close_matches(name.lower(), by_letters, n=1, cutoff=NEAR_FRAC)
    return f"; the nearest is {form(by_letters[near[0]])}" if near else ""


def known_hint(name: str, candidates: Iterable[str], *, form: Callable[[str], str] = repr) -> str:
    """Return the nearest name as `near_hint` does, or else the first known names."""
    names = [*candidates]
    if not names:
        return ""
    listed = ", ".join(map(form, names[:MAX_LISTED]))
    num_others = len(names) - MAX_LISTED
    listed += f" and {num_others} more" if num_others > 0 else ""
    return near_hint(name, names, form=form) or f"; there are {listed}"


def json_bytes(value: object) -> bytes:
    """Return a value as UTF-8 JSON in which letters of all scripts are not escaped.

    Escapes would double the size of Chinese text. Texts must be valid, see `valid_text`.
    """
    return json.dumps(value, ensure_ascii=False).encode()


def log_text(text: str) -> str:
    """Return text for a log or a terminal, with control characters as escapes such as \\x1b.

    Tabs and line breaks are kept. Other control characters could rewrite the terminal or hide a
    line of the log.
    """
    text = valid_text(text)
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode() if _is_control(character) else character
        for character in text
    )


def html_text(value: object) -> str:
    """Return any text as safe HTML content or as a quoted attribute.

    Control characters become U+FFFD, including those that change the text direction. Letters of
    right-to-left scripts are kept.
    """
    text = valid_text(str(value))
    if not text.isprintable():
        text = "".join("\ufffd" if _is_control(each) else each for each in text)
    return html.escape(text, quote=True)


def _is_control(character: str) -> bool:
    """Return whether a terminal could obey a character instead of showing it."""
    return character in BIDI_CONTROLS or (
        unicodedata.category(character) == "Cc" and character not in "\t\n"
    )


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of equal elements at the start of two texts or lists."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def shared_tags(one: str, other: str) -> str:
    """Return the longest text with which both texts begin, without a part of a tag at its end.

    Example: `<a><think>` and `<a></think>` share `<a>`, although both begin with `<a><`.
    """
    at = shared_length(one, other)
    spans = [each.span() for text in (one, other) for each in _TAG.finditer(text)]
    return one[: min([at, *(start for start, end in spans if start < at < end)])]


def shared_end_tags(one: str, other: str) -> str:
    """Return the longest text with which both texts end, without a part of a tag at its start."""
    num = shared_length(one[::-1], other[::-1])
    spans = [
        (len(text) - match.end(), len(text) - match.start())
        for text in (one, other)
        for match in _TAG.finditer(text)
    ]
    num = min([num, *(start for start, end in spans if start < num < end)])
    return one[len(one) - num :]
