"""Text that every encoding of ours can carry, and what a page shows of it."""

import html
import json
import unicodedata

# What has no place on a page: it can end a document, or turn the text that follows it around.
BIDI_CONTROLS = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


def valid_text(text: str) -> str:
    """Return a text that UTF-8 can carry: halves of a surrogate pair that stand alone are U+FFFD.

    JSON and UTF-16 can hold half a character, which no tokenizer, file or message takes. Halves
    that stand together are the character that they are halves of.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def json_bytes(value: object) -> bytes:
    """Return JSON as it travels: letters of all scripts as themselves, in UTF-8.

    Escapes would double the bytes of Chinese. Texts must be valid, see `valid_text`.
    """
    return json.dumps(value, ensure_ascii=False).encode()


def log_text(text: str) -> str:
    """Return text for a log or a terminal, with control characters as escapes such as \\x1b.

    Tabs and line breaks stay. All others could rewrite the terminal, or hide a line of the log.
    """
    text = valid_text(text)
    if text.isprintable():
        return text
    return "".join(_escaped(each) if _is_control(each) else each for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def html_text(value: object) -> str:
    """Return text for HTML content and quoted attributes, whoever wrote it.

    Control characters, also those that change the direction of what follows, are U+FFFD; letters
    of scripts that are written from the right stay as they are.
    """
    text = valid_text(str(value))
    if not text.isprintable():
        text = "".join("\ufffd" if _is_control(each) else each for each in text)
    return html.escape(text, quote=True)


def _is_control(character: str) -> bool:
    return character in BIDI_CONTROLS or (
        unicodedata.category(character) == "Cc" and character not in "\t\n"
    )
