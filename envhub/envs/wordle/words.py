"""The words of Wordle, what a guess is answered, and the guess that tells most."""

from collections import Counter
from functools import lru_cache

NUM_LETTERS = 5
VOCABULARY = (
    *("apple", "beach", "brain", "bread", "chair", "cloud", "dance", "dream", "earth", "field"),
    *("flame", "fruit", "glass", "grape", "green", "heart", "horse", "house", "light", "lemon"),
    *("money", "mouse", "music", "night", "ocean", "paper", "peach", "piano", "plant", "river"),
    *("round", "sheep", "smile", "snake", "stone", "sugar", "table", "train", "water", "world"),
)


@lru_cache(maxsize=4096)
def marks(guess: str, hidden: str) -> str:
    """Returns a mark per letter: g at its place, y elsewhere in the word, b not in it.

    A letter is marked y only as often as the hidden word has it outside the places marked g.
    """
    left = Counter(h for g, h in zip(guess, hidden, strict=True) if g != h)
    found = []
    for g, h in zip(guess, hidden, strict=True):
        if g == h:
            found.append("g")
        elif left[g]:
            left[g] -= 1
            found.append("y")
        else:
            found.append("b")
    return "".join(found)


def consistent(words: tuple[str, ...], guess: str, answer: str) -> tuple[str, ...]:
    """Returns the words that would give this answer to this guess."""
    return tuple(word for word in words if marks(guess, word) == answer)


@lru_cache(maxsize=4096)
def best_guess(words: tuple[str, ...]) -> str:
    """Returns the word whose worst answer leaves the fewest of `words`, itself one if it can be."""

    def badness(guess: str) -> tuple[int, int, bool, str]:
        sizes = Counter(marks(guess, word) for word in words)
        return max(sizes.values()), -len(sizes), guess not in words, guess

    return min(VOCABULARY, key=badness)
