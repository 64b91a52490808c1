"""Games of other libraries by name: `textarena:GuessTheNumber-v0`, `gymnasium:my_games:Maze-v0`.

What follows a "?" are options: `textarena:Sudoku-v0?max_turns=50&num_train=200`.
"""

import hashlib
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np

from common.errors import ConfigError
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.interop.described import SUBSET, optional_package
from envhub.interop.gym.game import GymnasiumGame
from envhub.interop.texts import BadAction, Moved, RewardRule, Rewards

TEST_SEED = 1_000_000_000  # the first seed of a test item; those of training items begin at 0
SESSIONS_PER_WORKER = 32
# How a library says that it has no such game, or cannot make it here.
REFUSALS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
MAX_CHARS = 100_000  # of a move of TextArena
MAX_DIGITS = 300  # of a number in it
LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
FORM = 'Answer with one action{}. What follows "Action:" is played.'
SEEDING = threading.Lock()  # games draw from the process's own source of chance


class Game(Protocol):
    """One live game of a library; `form` is that of an action in words, "" where it is a text."""

    @property
    def form(self) -> str: ...
    def samples(self) -> list[str]: ...  # a few actions; [] where any text is one
    def check(self) -> None: ...  # raises ConfigError: it cannot be played by texts
    def begin(self, seed: int) -> str: ...
    def act(self, text: str) -> Moved: ...  # raises BadAction: nothing happened
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GameOptions:
    """What a reference may say after its "?"."""

    num_train: int = 10_000
    num_test: int = 1_000
    max_turns: int = 30
    reward: str = ""  # last or sum; "": as the library means it
    min_reward: float = 0.0
    max_reward: float = 1.0


KINDS: dict[str, type] = {f.name: type(f.default) for f in fields(GameOptions)}


def parse_reference(text: str) -> tuple[str, GameOptions]:
    """Return a game's name and options. Raises: ConfigError: an option that there is not."""
    name, _, query = text.partition("?")
    given: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            given[key] = KINDS[key](value)
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"{text}: {key}={value}: the options are {', '.join(KINDS)}"
            ) from error
    options = GameOptions(**given)
    is_sound = options.reward in ("", "last", "sum") and options.min_reward < options.max_reward
    if not is_sound or min(options.num_train, options.num_test, options.max_turns) < 1:
        raise ConfigError(f"{text}: reward is last or sum, min_reward < max_reward, the rest >= 1")
    return name, options


class SeededEnv:
    """An episode of a game; an item is a seed."""

    def __init__(self, game: Game, subset: SubsetSpec, rule: RewardRule) -> None:
        self._game, self._subset, self._rule = game, subset, rule
        self._rewards = Rewards(rule)
        self._first = self._text = ""
        self._reward = rule.start_score

    def reset(self, item_id: str, seed: int) -> str:
        """Begin the game of the item's seed; the item alone fixes it. Raises: UnknownItem."""
        item = parse_item(item_id, {SUBSET: self._subset})
        self._rewards, self._reward = Rewards(self._rule), self._rule.start_score
        with SEEDING:
            own = item.index + (TEST_SEED if item.split == "test" else 0)
            random.seed(own)
            np.random.seed(own % 2**32)
            self._first = self._text = self._game.begin(own)
        return self._first

    def step(self, action: str) -> StepResult:
        """Play what follows the last "Action:". Raises: EnvFailure: no reward that can be one."""
        try:
            moved = self._game.act(action_text(action))
        except BadAction as error:
            return StepResult(
                observation=str(error), reward=self._reward, done=False, is_valid=False
            )
        paid = moved.reward
        if paid is not None and not moved.is_valid:  # a policy's fault, whatever the range
            paid = max(paid, self._rule.least)
        self._reward = self._rewards.add(paid, is_last=moved.is_done)
        self._text = moved.text
        return StepResult(
            observation=moved.text,
            reward=self._reward,
            done=moved.is_done,
            is_valid=moved.is_valid,
            is_success=None if moved.is_success is None else moved.is_success and moved.is_done,
            is_truncated=moved.is_truncated,
        )

    def valid_actions(self) -> list[str]:
        """Return actions of a game's space; [] where any text is one."""
        return self._game.samples()

    def expert_action(self) -> str | None:
        """Return None: the libraries have no experts."""
        return None

    def render(self) -> str:
        return self._text

    def fingerprint(self) -> str:
        """Return the hash of the first observation, which is all that can be seen from here."""
        return hashlib.sha256(self._first.encode(errors="surrogatepass")).hexdigest()

    def close(self) -> None:
        self._game.close()


def _check_playable(text: str) -> None:
    """Raises: BadAction: TextArena's games cannot read such a text."""
    if len(text) > MAX_CHARS or "\0" in text:
        raise BadAction(f"A move has at most {MAX_CHARS} characters, and none is NUL.")
    if LONG_NUMBER.search(text):
        raise BadAction(f"A number of a move has at most {MAX_DIGITS} digits.")


class TextArenaGame:
    """A game of TextArena for one player."""

    form = ""

    def __init__(self, name: str) -> None:
        library: Any = optional_package("textarena", "textarena")
        self._make: Callable[[], Any] = partial(library.make, env_id=name)
        self._game = self._make()

    def samples(self) -> list[str]:
        """Return []: the library does not say."""
        return []

    def check(self) -> None:
        """Do nothing: its actions and observations are texts."""

    def begin(self, seed: int) -> str:
        """Return what the player is told first; of a new game, as a second one goes on talking."""
        self._game = self._make()
        self._game.reset(num_players=1, seed=seed)
        return str(self._game.get_observation()[1])

    def act(self, text: str) -> Moved:
        """Play a move; TextArena says at the end what it pays. Raises: BadAction."""
        _check_playable(text)
        is_done, told = self._game.step(text)
        state = self._game.state
        if not is_done:
            is_valid = not getattr(state, "error_count", 0)
            observation = str(self._game.get_observation()[1])
            return Moved(text=observation, reward=None, is_done=False, is_valid=is_valid)
        reward = (state.rewards or {}).get(0)
        reason = str((state.game_info or {}).get(0, {}).get("reason") or told or "")
        is_valid = not (state.game_info or {}).get(0, {}).get("invalid_move", False)
        return Moved(text=reason, reward=reward, is_done=True, is_valid=is_valid)

    def close(self) -> None:
        """Do nothing: a game is only an object."""


LIBRARIES: dict[str, tuple[Callable[[str], Game], str]] = {  # with what an episode pays
    "gymnasium": (GymnasiumGame, "sum"),
    "textarena": (TextArenaGame, "last"),
}


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of `library:name?options`, named by what follows the last colon.

    Raises: ConfigError: the library is not installed, has no such game, or one it cannot play here.
    """
    library, _, text = reference.partition(":")
    make_game, usual = LIBRARIES[library]
    name, options = parse_reference(text)
    try:
        game = make_game(name)
        game.check()
        form = game.form
        game.close()
    except ConfigError:
        raise
    except REFUSALS as error:
        raise ConfigError(f"{reference}: {type(error).__name__}: {error}") from error
    subset = SubsetSpec(
        num_train=options.num_train, num_test=options.num_test, max_turns=options.max_turns
    )
    rule = RewardRule(
        kind="sum" if (options.reward or usual) == "sum" else "last",
        least=options.min_reward,
        most=options.max_reward,
    )

    def make(_: Style) -> SeededEnv:
        return SeededEnv(make_game(name), subset, rule)

    return EnvSpec(
        name=name.rpartition(":")[2],
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, FORM.format(f": {form}" if form else "")),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        start_score=rule.start_score,
    )
