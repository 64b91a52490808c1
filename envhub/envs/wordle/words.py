"""The words of Wordle, the answer to a guess, and the most informative guess."""

from collections import Counter
from functools import cache, lru_cache
from pathlib import Path

from common.errors import ConfigError
from envhub.tables import read_text

VOCABULARY = tuple(read_text(__file__, "words.txt").split())
NUM_LETTERS = 5


@cache
def vocabulary(path: str) -> tuple[str, ...]:
    """Return the five-letter words of a file with one word per line; "": our own words.

    Raises: ConfigError: no such file, or no such word in it.
    """
    if not path:
        return VOCABULARY
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"envs.wordle.words={path}: cannot be read: {error}") from error
    words = tuple(line.strip() for line in lines if len(line.strip()) == NUM_LETTERS)
    if not words or not all(word.isascii() and word.islower() for word in words):
        raise ConfigError(
            f"envs.wordle.words={path}: must have one word of five letters a-z per line"
        )
    return words


@lru_cache(maxsize=4096)
def marks(guess: str, hidden: str) -> str:
    """Return a mark per letter: g at its place, y elsewhere in the word, b not in it.

    As in LMRL-Gym, the number of occurrences is ignored: both e of `green` are marked.
    """
    return "".join(
        "g" if letter == there else "y" if letter in hidden else "b"
        for letter, there in zip(guess, hidden, strict=True)
    )


def consistent(words: tuple[str, ...], guess: str, answer: str) -> tuple[str, ...]:
    """Return the words that would give this answer to this guess."""
    return tuple(word for word in words if marks(guess, word) == answer)


@lru_cache(maxsize=4096)
def best_guess(words: tuple[str, ...], known: tuple[str, ...] = VOCABULARY) -> str:
    """Return the known word whose worst answer leaves the fewest of `words`; these win ties."""

    def remaining_words(guess: str) -> tuple[int, int, bool, str]:
        """Return the sort key of a guess: the number of words that its worst answer leaves."""
        sizes = Counter(marks(guess, word) for word in words)
        return max(sizes.values()), -len(sizes), guess not in words, guess

    return min(known, key=remaining_words)
