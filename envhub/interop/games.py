"""Games of other libraries by name: `textarena:GuessTheNumber-v0`, `gymnasium:my_games:Maze-v0`.

Options follow a "?": `textarena:Sudoku-v0?max_turns=50&num_train=200`.
"""

import copy
import hashlib
import random
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

import numpy as np

from common.errors import ConfigError
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.interop.gym_game import GymnasiumGame
from envhub.interop.texts import ActionResult, BadAction, RewardRule, Rewards
from envhub.interop.yaml_environments import SUBSET, optional_package

FIRST_SEEDS = {"train": 0, "test": 1_000_000_000, "validation": 2_000_000_000}
SESSIONS_PER_WORKER = 32
# Exceptions that a library raises if it has no such game or cannot create it here.
REFUSALS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
MAX_CHARS = 100_000  # Maximum characters of a move in TextArena.
MAX_DIGITS = 300  # Maximum digits of a number in a move.
LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
EXAMPLE = re.compile(r"\[(?![A-Z]{2,}|Player)[^\[\]\n]{1,40}\]")  # "[GAME]" names a speaker.
MAX_SAMPLES = 16
FORM = 'Answer with one action{}. What follows "Action:" is played.'
DRAWING = threading.Lock()  # Games draw from the process-wide random generators.


class Game(Protocol):
    """One live game of a library; `form` describes an action in words, "" if it is any text."""

    @property
    def form(self) -> str: ...
    def samples(self) -> list[str]: ...  # Returns a few actions; [] if any text is an action.
    def check(self) -> None: ...  # Raises ConfigError if the game cannot be played with texts.
    def begin(self, seed: int) -> str: ...
    # Raises BadAction if the action is refused without an effect.
    def act(self, text: str) -> ActionResult: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GameOptions:
    """Options after the "?" of a reference."""

    num_train: int = 10_000
    num_validation: int = 1_000
    num_test: int = 1_000
    max_turns: int = 30
    reward: str = ""  # last or sum; "": the library's default.
    min_reward: float = 0.0
    max_reward: float = 1.0


KINDS: dict[str, type] = {f.name: type(f.default) for f in fields(GameOptions)}


def parse_reference(text: str) -> tuple[str, GameOptions]:
    """Return a game's name and options. Raises: ConfigError: an unknown option or value."""
    name, _, query = text.partition("?")
    options_by_key: dict[str, Any] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        try:
            options_by_key[key] = KINDS[key](value)
        except (LookupError, ValueError) as error:
            raise ConfigError(
                f"{text}: {key}={value}: unknown or invalid; the options are {', '.join(KINDS)}"
            ) from error
    options = GameOptions(**options_by_key)
    is_sound = options.reward in ("", "last", "sum") and options.min_reward < options.max_reward
    sizes = (options.num_train, options.num_validation, options.num_test, options.max_turns)
    if not is_sound or min(sizes) < 1:
        law = "reward must be last or sum, min_reward < max_reward, all others >= 1"
        raise ConfigError(f"{text}: {law}")
    return name, options


class RandomStates:
    """The states of the process-wide random generators of one episode.

    Example: two episodes play in turn in one process. The numbers that each of them draws are
    those that it draws alone.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def seed(self, seed: int) -> None:
        """Begin the states that follow a seed."""
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def used(self) -> Generator[None]:
        """Let the calls of one thread draw from these states."""
        with DRAWING:
            outer_python = random.getstate()
            outer_numpy = np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python = random.getstate()
                self._numpy = np.random.get_state()
                random.setstate(outer_python)
                np.random.set_state(outer_numpy)


class SeededEnv:
    """An episode of a game; each item is a seed."""

    def __init__(self, make_game: Callable[[], Game], subset: SubsetSpec, rule: RewardRule) -> None:
        self._make_game = make_game
        self._made: Game | None = None
        self._subset = subset
        self._rule = rule
        self._rewards = Rewards(rule)
        self._draws = RandomStates()
        self._first = self._text = ""
        self._reward = rule.start_score

    def reset(self, item_id: str, seed: int) -> str:
        """Begin the game with the item's seed; `seed` is unused. Raises: UnknownItem."""
        item = parse_item(item_id, {SUBSET: self._subset})
        self._rewards = Rewards(self._rule)
        self._reward = self._rule.start_score
        game_seed = FIRST_SEEDS[item.split] + item.index
        game = self._game()
        self._draws.seed(game_seed)
        with self._draws.used():
            self._first = self._text = game.begin(game_seed)
        return self._first

    def step(self, action: str) -> StepResult:
        """Play the text after the last "Action:". Raises: EnvFailure: an invalid reward."""
        game = self._game()
        try:
            with self._draws.used():
                moved = game.act(action_text(action))
        except BadAction as error:
            return StepResult(
                observation=str(error), reward=self._reward, done=False, is_valid=False
            )
        reward = moved.reward
        # The policy caused the invalid action, so its reward is clipped to the range.
        if isinstance(reward, (int, float)) and not moved.is_valid:
            reward = max(reward, self._rule.least)
        self._reward = self._rewards.add(reward, is_last=moved.is_done)
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
        """Return sample actions of the game; [] if any text is an action."""
        game = self._game()
        draws = copy.copy(self._draws)  # Samples change no draw of a later step.
        with draws.used():
            return game.samples()

    def expert_action(self) -> str | None:
        """Return None: the libraries have no experts."""
        return None

    def render(self) -> str:
        return self._text

    def fingerprint(self) -> str:
        """Return the hash of the first observation, the only part of the state available here."""
        return hashlib.sha256(self._first.encode(errors="surrogatepass")).hexdigest()

    def close(self) -> None:
        """Close the game, if there is one."""
        if self._made is not None:
            self._made.close()

    def _game(self) -> Game:
        """Return the game, made at the first call."""
        if self._made is None:
            with self._draws.used():  # Constructors of games draw, too.
                self._made = self._make_game()
        return self._made


def _check_playable(text: str) -> None:
    """Raise BadAction for a text that TextArena's games cannot parse."""
    if len(text) > MAX_CHARS or "\0" in text:
        raise BadAction(f"A move has at most {MAX_CHARS} characters, and none is NUL.")
    if LONG_NUMBER.search(text):
        raise BadAction(f"A number of a move has at most {MAX_DIGITS} digits.")


def _moved(game: Any, text: str) -> ActionResult:
    """Play a move in a game of TextArena."""
    is_done, info = game.step(text)
    state = game.state
    if not is_done:
        is_valid = not getattr(state, "error_count", 0)
        shown = str(game.get_observation()[1])
        return ActionResult(text=shown, reward=None, is_done=False, is_valid=is_valid)
    reward = (state.rewards or {}).get(0)
    reason = str((state.game_info or {}).get(0, {}).get("reason") or info or "")
    is_valid = not (state.game_info or {}).get(0, {}).get("invalid_move", False)
    return ActionResult(text=reason, reward=reward, is_done=True, is_valid=is_valid)


def new_text(before: str, shown: str, move_entry: str) -> str:
    """Return the part of a transcript that the player has not seen.

    Args:
        before: the transcript before the move.
        shown: the transcript after it. The whole text is new unless it continues `before`.
        move_entry: the entry of the move in the transcript, which is left out.
    """
    added = shown.removeprefix(before)
    return added.removeprefix(move_entry) or shown


class TextArenaGame:
    """A game of TextArena for one player."""

    form = ""

    def __init__(self, name: str) -> None:
        library: Any = optional_package("textarena", "textarena")
        self._reference = f"textarena:{name}"
        self._make: Callable[[], Any] = partial(library.make, env_id=name)
        self._game = self._make()
        self._samples: list[str] = []
        self._shown = ""  # The last text of the game, which often is the whole transcript.

    def samples(self) -> list[str]:
        """Return the moves in brackets of the first observation that a copy of the game accepts."""
        return [text for text in self._samples if _moved(copy.deepcopy(self._game), text).is_valid]

    def check(self) -> None:
        """Raise ConfigError if the game needs several players, or does not begin here."""
        try:
            with RandomStates().used():
                self._game.reset(num_players=1, seed=0)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise ConfigError(
                f"{self._reference}: does not begin with one player: {why}"
            ) from error
        num_players = self._game.state.num_players
        if num_players != 1:
            raise ConfigError(f"{self._reference}: has {num_players} players, not one")

    def begin(self, seed: int) -> str:
        """Create a new game and return its first observation; `reset` alone keeps old messages."""
        self._game = self._make()
        self._game.reset(num_players=1, seed=seed)
        self._shown = str(self._game.get_observation()[1])
        self._samples = [*dict.fromkeys(EXAMPLE.findall(self._shown))][:MAX_SAMPLES]
        return self._shown

    def act(self, text: str) -> ActionResult:
        """Play a move; TextArena reports the reward at the end. Raises: BadAction."""
        _check_playable(text)
        num_logged = len(self._game.state.logs)
        moved = _moved(self._game, text)
        if moved.is_done:
            return moved
        before = self._shown
        self._shown = moved.text
        role = self._game.state.role_mapping.get(0, "Player 0")
        logged = self._game.state.logs[num_logged:]
        move_entry = "".join(f"\n[{role}] {entry}" for player, entry in logged if player == 0)
        return replace(moved, text=new_text(before, self._shown, move_entry))

    def close(self) -> None:
        """Do nothing: a game is only an object."""


# Game classes by library, with the kind of reward.
LIBRARIES: dict[str, tuple[Callable[[str], Game], str]] = {
    "gymnasium": (GymnasiumGame, "sum"),
    "textarena": (TextArenaGame, "last"),
}


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of `library:name?options`; its name is the text after the last colon.

    Raises: ConfigError: the library is missing, or has no such game that can be played here.
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
        num_train=options.num_train,
        num_validation=options.num_validation,
        num_test=options.num_test,
        max_turns=options.max_turns,
    )
    rule = RewardRule(
        kind="sum" if (options.reward or usual) == "sum" else "last",
        least=options.min_reward,
        most=options.max_reward,
    )

    def make(_: Style) -> SeededEnv:
        return SeededEnv(partial(make_game, name), subset, rule)

    return EnvSpec(
        name=name.rpartition(":")[2],
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, FORM.format(f": {form}" if form else "")),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        start_score=rule.start_score,
    )
