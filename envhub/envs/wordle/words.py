"""The words of Wordle, what a guess is answered, and the guess that tells most."""

from collections import Counter
from functools import lru_cache

from envhub.tables import read_text

VOCABULARY = tuple(read_text(__file__, "words.txt").split())


@lru_cache(maxsize=4096)
def marks(guess: str, hidden: str) -> str:
    """Return a mark per letter: g at its place, y elsewhere in the word, b not in it.

    How often the word has a letter does not count, as in LMRL-Gym: both e of `green` are marked.
    """
    return "".join(
        "g" if letter == there else "y" if letter in hidden else "b"
        for letter, there in zip(guess, hidden, strict=True)
    )


def consistent(words: tuple[str, ...], guess: str, answer: str) -> tuple[str, ...]:
    """Return the words that would give this answer to this guess."""
    return tuple(word for word in words if marks(guess, word) == answer)


@lru_cache(maxsize=4096)
def best_guess(words: tuple[str, ...]) -> str:
    """Return the word whose worst answer leaves the fewest of `words`, itself one if it can be."""

    def badness(guess: str) -> tuple[int, int, bool, str]:
        sizes = Counter(marks(guess, word) for word in words)
        return max(sizes.values()), -len(sizes), guess not in words, guess

    return min(VOCABULARY, key=badness)
