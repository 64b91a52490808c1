"""Games of other libraries by name: `textarena:GuessTheNumber-v0`, `gymnasium:my_games:Maze-v0`.

What follows a "?" are options: `textarena:Sudoku-v0?max_turns=50&num_train=200`.
"""

import hashlib
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

from common.errors import ConfigError
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.interop.described import SUBSET, optional_package
from envhub.interop.texts import BadAction, RewardRule, Rewards

TEST_SEED = 1_000_000_000  # the first seed of a test item; those of training items begin at 0
SESSIONS_PER_WORKER = 32
# How a library says that it has no such game, or cannot make it here.
REFUSALS = (ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
SEEDING = threading.Lock()  # games draw from the process's own source of chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What one action led to; `is_success` None: it is the whole reward."""

    text: str
    reward: float | None
    is_done: bool
    is_valid: bool = True
    is_success: bool | None = None


class Game(Protocol):
    """One live game of a library."""

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
        self._reward = self._rewards.add(moved.reward, is_last=moved.is_done)
        self._text = moved.text
        return StepResult(
            observation=moved.text,
            reward=self._reward,
            done=moved.is_done,
            is_valid=moved.is_valid,
            is_success=moved.is_success,
        )

    def valid_actions(self) -> list[str]:
        """Return []: the libraries do not say."""
        return []

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


class TextArenaGame:
    """A game of TextArena for one player."""

    def __init__(self, name: str) -> None:
        library: Any = optional_package("textarena", "textarena")
        self._make: Callable[[], Any] = partial(library.make, env_id=name)
        self._game = self._make()

    def begin(self, seed: int) -> str:
        """Return what the player is told first; of a new game, as a second one goes on talking."""
        self._game = self._make()
        self._game.reset(num_players=1, seed=seed)
        return str(self._game.get_observation()[1])

    def act(self, text: str) -> Moved:
        """Play a move; TextArena says at the end what it pays."""
        is_done, told = self._game.step(text)
        state = self._game.state
        if not is_done:
            is_valid = not getattr(state, "error_count", 0)
            observation = str(self._game.get_observation()[1])
            return Moved(text=observation, reward=None, is_done=False, is_valid=is_valid)
        reward = (state.rewards or {}).get(0)
        reason = str((state.game_info or {}).get(0, {}).get("reason") or told or "")
        is_valid = not getattr(state, "made_invalid_move", False)
        return Moved(text=reason, reward=reward, is_done=True, is_valid=is_valid)

    def close(self) -> None:
        """Do nothing: a game is only an object."""


class GymnasiumGame:
    """An environment of gymnasium whose actions are texts, or a few that have numbers."""

    def __init__(self, name: str) -> None:
        gymnasium = optional_package("gymnasium", "envs")
        try:
            self._env: Any = gymnasium.make(name)
        except gymnasium.error.Error as error:
            raise ConfigError(f"gymnasium:{name}: {type(error).__name__}: {error}") from error
        self._space: Any = self._env.action_space
        if not isinstance(self._space, (gymnasium.spaces.Text, gymnasium.spaces.Discrete)):
            kind = type(self._space).__name__
            raise ConfigError(f"gymnasium:{name}: its actions are a {kind}, not texts or numbers")
        self._is_text = isinstance(self._space, gymnasium.spaces.Text)

    def begin(self, seed: int) -> str:
        return _told(self._env.reset(seed=seed)[0])

    def act(self, text: str) -> Moved:
        """Play a text that is in the action space. Raises: BadAction."""
        action: Any = text
        if not self._is_text:
            first, past = int(self._space.start), int(self._space.start + self._space.n)
            if not text.isdecimal() or not first <= int(text[:9]) < past:
                raise BadAction(f"The action must be a number from {first} to {past - 1}.")
            action = int(text)
        elif not self._space.contains(text):
            raise BadAction(f"The action must be a text such as {self._space.sample()!r}.")
        observation, reward, is_terminated, is_truncated, told = self._env.step(action)
        said = told.get("is_success", told.get("success"))
        return Moved(
            text=_told(observation),
            reward=float(reward),
            is_done=bool(is_terminated or is_truncated),
            is_success=bool(said) if said is not None else None,
        )

    def close(self) -> None:
        self._env.close()


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
        make_game(name).close()
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

    form = 'Answer with one action. What follows "Action:" is played.'
    return EnvSpec(
        name=name.rpartition(":")[2],
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, form),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        start_score=rule.start_score,
    )


def _told(observation: Any) -> str:
    """Return an observation as text: itself, or JSON."""
    if isinstance(observation, str):
        return observation
    plain = getattr(observation, "tolist", lambda: observation)()
    return json.dumps(plain, ensure_ascii=False, default=str)
