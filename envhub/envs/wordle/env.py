"""Wordle: find the hidden word in six guesses."""

import random
from collections import Counter
from functools import cache, lru_cache, partial
from pathlib import Path

from common.config.envs import EnvsSection
from common.errors import ConfigError
from envhub.conversations import CONVERSATIONS
from envhub.env import EnvSpec, StepResult, Style, SubsetSpec, UnknownItem, action_text, parse_item
from envhub.envs.text_env import TextEnv
from envhub.tables import read_text
from envhub.tasks import spec_beside

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
def best_guess(words: tuple[str, ...], guesses: tuple[str, ...] = VOCABULARY) -> str:
    """Return the known word whose worst answer leaves the fewest of `words`; these win ties."""

    def remaining_words(guess: str) -> tuple[int, int, bool, str]:
        """Return the sort key of a guess: the number of words that its worst answer leaves."""
        sizes = Counter(marks(guess, word) for word in words)
        return max(sizes.values()), -len(sizes), guess not in words, guess

    return min(guesses, key=remaining_words)


SUBSET = "Common"
MAX_GUESSES = 6
NUM_TRAIN = 1_000_000
NUM_TEST = 1_000
FIRST_TEST_SEED = 10_000_000
MAX_ACTION_CHARS = 200
SOLVED = "ggggg"
SUBSETS = {SUBSET: SubsetSpec(num_train=NUM_TRAIN, num_test=NUM_TEST, max_turns=MAX_GUESSES)}


class WordleEnv(TextEnv):
    """One Wordle episode. The reward is 1 for finding the word.

    The word is not fixed at the start. Each guess is compared with a word drawn from those that fit
    all answers so far. The item determines the draws.
    """

    def __init__(self, style: Style, *, vocabulary: tuple[str, ...] = VOCABULARY) -> None:
        super().__init__(style)
        self._vocabulary = vocabulary

    def reset(self, item_id: str, seed: int = 0) -> str:
        """Start an item. `seed` is unused: the item determines all draws."""
        item = parse_item(item_id, SUBSETS)
        self._seed = item.index if item.split == "train" else FIRST_TEST_SEED + item.index
        self._rng = random.Random(self._seed)
        self._words = self._vocabulary
        self._answers: list[tuple[str, str]] = []  # Pairs (guess or invalid text, answer).
        self._begin()
        if self._is_compact:
            return f"words: {' '.join(self._vocabulary)}\nguess"
        return CONVERSATIONS["wordle"].first_observation("\n".join(self._vocabulary))

    def _step(self, action: str) -> StepResult:
        """Perform a guess, and describe the answer."""
        text = action_text(action)[:MAX_ACTION_CHARS]
        # AgentGym ignores spaces only; a word is five lower-case letters.
        guess = "".join(text.lower().split()) if self._is_compact else text.replace(" ", "")
        is_valid = guess in self._vocabulary
        answer = self._answer(guess) if is_valid else "invalid word"
        self._answers.append((guess, answer))
        self._done = answer == SOLVED or len(self._answers) == MAX_GUESSES
        observation = answer
        if is_valid:
            observation = " ".join(answer) + ("" if self._is_compact else "\n")
        return StepResult(
            observation=observation,
            reward=float(answer == SOLVED),
            done=self._done,
            is_valid=is_valid,
        )

    def state_text(self) -> str:
        """Return a text that identifies the current state of the item."""
        return f"{len(self._answers)} {' '.join(self._words)}"

    def save(self) -> list[str]:
        """Return the guesses. The answers follow from them."""
        return [guess for guess, _ in self._answers]

    def load(self, state: list[str]) -> None:
        """Repeat saved guesses, which draws the same words."""
        for guess in state:
            is_valid = guess in self._vocabulary
            self._answers.append((guess, self._answer(guess) if is_valid else "invalid word"))

    def _answer(self, guess: str) -> str:
        """Return the answer to a guess, and keep the words that fit it."""
        answer = marks(guess, self._rng.choice(self._words))
        self._words = consistent(self._words, guess, answer)
        return answer

    def _valid_actions(self) -> list[str]:
        return [" ".join(word) for word in self._vocabulary]

    def _expert_action(self) -> str | None:
        """Return the guess whose worst answer leaves the fewest words.

        At most six guesses are needed.
        """
        return " ".join(best_guess(self._words, self._vocabulary))

    def render(self) -> str:
        """Return the guesses with their answers, and the remaining words."""
        lines = [f"{guess} {answer}" for guess, answer in self._answers]
        return "\n".join([*lines, f"possible: {' '.join(self._words)}"])

    def _state(self) -> str:
        return f"{self._vocabulary} {self._seed}"


def from_agentgym(index: int) -> str:
    """Return the item with the draws of AgentGym's seed.

    The words are those of this package, or of `envs.wordle.words`.

    Raises: UnknownItem: negative or too large.
    """
    if not 0 <= index < NUM_TRAIN:
        raise UnknownItem(f"seed {index} is out of range; they are 0 to {NUM_TRAIN - 1}")
    return f"{SUBSET}-train-{index}"


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return Wordle's catalogue entry."""
    make = partial(WordleEnv, vocabulary=vocabulary(options.wordle.words))
    return spec_beside(__file__, SUBSETS, make, from_agentgym=from_agentgym)
