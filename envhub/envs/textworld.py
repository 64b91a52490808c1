"""TextWorld: text adventures that Microsoft's TextWorld generates, one game for each seed.

A game is generated and compiled at its first reset, and kept in the user's cache folder. The
package is an extra. It is imported when a game starts, in a worker process.
"""

import hashlib
import re
import shutil
import tempfile
import threading
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common.config.envs import EnvsSection, TextworldOptions
from common.host.process_settings import cache_home
from envhub.digests import digests_of_packages
from envhub.env import EnvSpec, Isolation, StepResult, Style, SubsetSpec, action_text, parse_item
from envhub.interop.yaml_environments import optional_package
from envhub.tables import one_instruction

EXTRA = "textworld"
FIRST_SEEDS = {"train": 0, "validation": 1_000_000, "test": 2_000_000}
SESSIONS_PER_WORKER = 16
STEP_TIMEOUT_S = 180.0  # The first reset of a game compiles it, on a busy machine for a minute.
MAKING = threading.Lock()  # Games are made one at a time.
CALLS = threading.Lock()  # Generator, parser and interpreter have global state.
MAX_ROOMS = 100  # TextWorld's own limits of levels.
MAX_HUNT = 30
MAX_CHARS = 200  # Longest command.
# Commands of the interpreter instead of the game: they would end it or touch files.
META = re.compile(
    r"quit|q|restart|save|restore|undo|(un|no|tran)?script|verify|version|brief|verbose|superbrief"
    r"|notify|pronouns|oops|actions|tree|showme|purloin|gonear|scope|random|relations|rules|showverb"
    r"|changes|abstract|test|trace|responses|restrict|tw-.*"
)
CLAUSE = re.compile(r"[.;,\n]|\b(?:then|and)\b")  # Inform reads several commands in one line.
REFUSED = re.compile(
    r"That's not a verb|You can't |I (didn't|only|beg)|What do you want|Which do you mean|You must "
)
END = re.compile(r"\s*\*\*\* (.+?) \*\*\*.*\Z", re.DOTALL)
PROMPT = re.compile(r"\n+>\s.*\Z|\n+>\s*\Z", re.DOTALL)  # The prompt and the status line after it.
INSTRUCTION = """You play a text adventure. Reach the objective of the first message.
Commands are short, such as: look, inventory, go north, examine OBJECT, open OBJECT, close OBJECT,
take OBJECT, take OBJECT from OBJECT, drop OBJECT, put OBJECT on OBJECT, insert OBJECT into OBJECT,
lock OBJECT with OBJECT, unlock OBJECT with OBJECT, eat OBJECT.
Answer with one command after "Action:", for example:
Action: go north"""
CHOICE = """You play a text adventure. Reach the objective of the first message.
Answer with one of the listed commands and nothing else."""


class TextworldEnv:
    """One episode of a TextWorld game."""

    def __init__(self, options: TextworldOptions) -> None:
        self._options = options
        self._env: Any = None
        self._state: Any = None
        self._is_done = True
        self._first = self._shown = ""

    def reset(self, item_id: str, seed: int) -> str:
        """Start the game of an item; `seed` is unused. Raises: UnknownItem."""
        item = parse_item(item_id, subsets_of(self._options))
        with MAKING:
            length = quest_length_at(item.index, self._options)
            options = replace(self._options, quest_length=length)
            path = game_at(item.subset, FIRST_SEEDS[item.split] + item.index, options)
        with CALLS:
            library: Any = optional_package("textworld", EXTRA)
            infos = library.EnvInfos(
                description=True,
                objective=True,
                admissible_commands=True,
                policy_commands=True,
                score=True,
                max_score=True,
                won=True,
                lost=True,
            )
            self._close()
            self._env = library.start(str(path), infos)
            self._state = self._env.reset()
        self._is_done = False
        objective = " ".join(str(self._state.objective).split())
        first = f"{objective}\n\n{cleaned(str(self._state.description))}"
        self._first = self._with_commands(first)
        self._shown = self._first
        return self._first

    def step(self, action: str) -> StepResult:
        """Play one command. Several commands, or one of the interpreter, are refused."""
        if self._is_done:
            raise RuntimeError("step before reset, or after the episode has ended")
        command = " ".join(action_text(action).lower().split())
        admissible = [each.lower() for each in self._state.admissible_commands or []]
        if command not in admissible and (why := why_refused(command)):
            shown = self._with_commands(why)
            return StepResult(observation=shown, reward=self._score(), done=False, is_valid=False)
        with CALLS:
            self._state, _, is_over = self._env.step(command)
        text = cleaned(str(self._state.feedback))
        is_valid = command in admissible or not REFUSED.match(text)
        self._is_done = bool(is_over or self._state.won or self._state.lost)
        self._shown = self._with_commands(text or "Nothing happens.")
        return StepResult(
            observation=self._shown,
            reward=self._score(),
            done=self._is_done,
            is_valid=is_valid,
            is_success=self._is_done and bool(self._state.won),
        )

    def _score(self) -> float:
        """Return the share of the game's points."""
        most = self._state.max_score or 1
        return min(max((self._state.score or 0) / most, 0.0), 1.0)

    def _with_commands(self, text: str) -> str:
        """Return an observation, with the admissible commands if the options list them."""
        commands = self.valid_actions() if self._options.lists_commands else []
        return f"{text}\n\nCommands: {', '.join(commands)}" if commands else text

    def valid_actions(self) -> list[str]:
        """Return TextWorld's admissible commands."""
        return [] if self._is_done else list(self._state.admissible_commands or [])

    def expert_action(self) -> str | None:
        """Return the next command of TextWorld's own solution, which follows the state."""
        commands = [] if self._is_done else self._state.policy_commands or []
        return commands[0] if commands else None

    def render(self) -> str:
        """Return the last observation."""
        return self._shown

    def fingerprint(self) -> str:
        """Return the hash of the first observation and the solution."""
        state = [self._first, *(self._state.policy_commands or [])]
        return hashlib.sha256("\n".join(state).encode()).hexdigest()

    def close(self) -> None:
        """End the interpreter of the game."""
        with CALLS:
            self._close()

    def _close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def cleaned(text: str) -> str:
    """Return an observation without the prompt, the interpreter's menu and needless space."""
    lines = [line.rstrip() for line in PROMPT.sub("", text.replace("\r", "")).split("\n")]
    text = END.sub(r"\n\n\1", "\n".join(lines))
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def why_refused(command: str) -> str:
    """Return why a text is no command of a game; "" if it may be one."""
    if not command:
        return "An action is a command, such as: look"
    if len(command) > MAX_CHARS or not command.isascii() or not command.isprintable():
        return f"A command has at most {MAX_CHARS} characters, all of them ASCII."
    words = [clause.split() for clause in CLAUSE.split(command)]
    if any(each and META.fullmatch(each[0]) for each in words):
        return "That is no command of the game."
    if sum(map(bool, words)) > 1:  # TextWorld follows the first one alone.
        return "Only one command is played at a time."
    return ""


def quest_length_at(index: int, options: TextworldOptions) -> int:
    """Return the commands that solve the custom game of a number, in every split."""
    least = options.min_quest_length or options.quest_length
    return least + index % (options.quest_length - least + 1)


def game_at(subset: str, seed: int, options: TextworldOptions) -> Path:
    """Return the compiled game of a seed, made at the first call."""
    with CALLS:
        library: Any = optional_package("textworld", EXTRA)
    difficulty = {
        name: asdict(options)[name] for name in ("level", "rooms", "objects", "quest_length")
    }
    made_by = repr([version(EXTRA), subset, sorted(difficulty.items())])
    digest = hashlib.blake2b(made_by.encode(), digest_size=8).hexdigest()
    folder = cache_home() / "longstride" / "textworld" / f"{subset}-{digest}" / str(seed)
    if not (folder / "game.z8").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
        try:
            _compile(library, subset, seed, options, str(unfinished / "game.z8"))
            unfinished.rename(folder)
        except OSError:
            if not (folder / "game.z8").is_file():  # Another process may have made the same game.
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder / "game.z8"


def _compile(library: Any, subset: str, seed: int, options: TextworldOptions, path: str) -> None:
    """Generate and compile a game. The compiler is another program, so turns go on beside it."""
    with CALLS:
        settings = library.GameOptions()
        settings.seeds = seed
        settings.path = path
        if subset == "custom":
            settings.nb_rooms = options.rooms
            settings.nb_objects = options.objects
            settings.quest_length = options.quest_length
            game = library.generator.make_game(settings)
        else:
            challenges: Any = optional_package("textworld.challenges", EXTRA)
            game = challenges.CHALLENGES[f"tw-{subset}"][1]({"level": options.level}, settings)
        source = library.generator.generate_inform7_source(game)
        game.save(str(Path(path).with_suffix(".json")))
    library.generator.compile_inform7_game(source, path)


def subsets_of(options: TextworldOptions) -> dict[str, SubsetSpec]:
    """Return the subsets that have games of the level. A seed belongs to one split."""
    spec = SubsetSpec(
        num_train=options.num_train,
        num_validation=options.num_validation,
        num_test=options.num_test,
        max_turns=options.max_turns,
    )
    distractors, length = divmod(options.level - 1, 100)
    names = ["custom"]
    if (distractors + 1) * (length + 1) <= MAX_ROOMS:
        names.append("coin_collector")
    if options.level <= MAX_HUNT:
        names.append("treasure_hunter")
    return dict.fromkeys(sorted(names), spec)


def make_spec(options: EnvsSection) -> EnvSpec:
    """Return the catalogue entry."""
    section = options.textworld

    def make(_: Style) -> TextworldEnv:
        return TextworldEnv(section)

    return EnvSpec(
        name="textworld",
        subsets=subsets_of(section),
        instruction=one_instruction(CHOICE if section.lists_commands else INSTRUCTION),
        make=make,
        isolation=Isolation.WORKER,
        sessions_per_worker=SESSIONS_PER_WORKER,
        max_workers=section.max_workers,
        sessions_key="envs.textworld.max_workers",
        step_timeout_s=STEP_TIMEOUT_S,
        expert_turns={"custom": partial(quest_length_at, options=section)},
        content=digests_of_packages(EXTRA),
    )
