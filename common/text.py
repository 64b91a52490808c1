"""Text that every encoding of ours can carry."""


def valid_text(text: str) -> str:
    """Return a text that UTF-8 can carry: halves of a surrogate pair that stand alone are U+FFFD.

    JSON and UTF-16 can hold half a character, which no tokenizer, file or message takes. Halves
    that stand together are the character that they are halves of.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
