"""Checks of `check-env` that play an environment. Each check returns findings."""

import contextlib
import inspect
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from common.errors import EnvError
from common.text import counted
from envhub.env import SPLITS, EnvSpec, Isolation, StepResult, UnknownItem, split_item
from envhub.errors import StateUnsaved
from envhub.hosting.saved import state_text
from tools.author.episodes import Driver, RecordedPlay, chance, expert


class Grade(StrEnum):
    """Severity of a finding; only FAIL prevents a run."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    grade: Grade
    name: str
    text: str


@dataclass(slots=True)
class Plays:
    """Episodes of the same items by different players, played once and shared by all checks."""

    by_expert: list[RecordedPlay] = field(default_factory=list[RecordedPlay])
    by_chance: list[RecordedPlay] = field(default_factory=list[RecordedPlay])
    step_s: list[float] = field(default_factory=list[float])

    @property
    def all(self) -> list[RecordedPlay]:
        """Return the episodes of both players."""
        return [*self.by_expert, *self.by_chance]


def graded(name: str, problems: list[str], text: str) -> Iterator[Finding]:
    """Yield a failure for each of the first problems, or one OK finding if there are none."""
    for problem in problems[:3]:
        yield Finding(Grade.FAIL, name, problem)
    if not problems:
        yield Finding(Grade.OK, name, text)


HOSTILE = (
    "",
    " ",
    "\n",
    "no such action",
    "__import__('os')",
    "../../etc/passwd",
    "\u00e9\U0001f600",
    "x" * 5000,
)
MAX_AT_ONCE = 8  # Episodes that run at the same time.
START_S = 60.0  # Deadline for the start of their threads.
MAX_SAVED_PLAYS = 12  # Episodes whose states are saved and loaded.
MAX_SAVED_TURNS = 4  # Turns of each of them at which that happens, beside the last one.
SAVING = ("save", "load")
MAX_ACTIONS = 20  # Maximum number of valid actions tried in one state.
METHODS = ("reset", "step", "valid_actions", "expert_action", "render", "fingerprint", "close")


def items_of(spec: EnvSpec, num: int) -> list[str]:
    """Return items of every subset and split, evenly spaced."""
    items: list[str] = []
    share = max(2, num // max(1, len(spec.subsets)))
    for name, subset in spec.subsets.items():
        sizes = {split: subset.size(split) for split in SPLITS if subset.size(split)}
        for split, size in sizes.items():
            some = min(size, max(1, share // len(sizes)))
            items += [f"{name}-{split}-{index * size // some}" for index in range(some)]
    return items if len(items) <= 2 * num else random.Random(0).sample(items, num)


def max_turns_of(spec: EnvSpec, item_id: str) -> int:
    """Return the turn limit of an item."""
    item = split_item(item_id)
    assert item is not None
    return spec.subsets[item.subset].max_turns


def check_spec(spec: EnvSpec) -> Iterator[Finding]:
    """Yield the errors of the catalogue entry."""
    problems = [
        f"subset {name}: {what}"
        for name, subset in spec.subsets.items()
        for what, is_wrong in (
            ("no training items", subset.num_train <= 0),
            ("a number of held-out items below 0", min(subset.num_test, subset.num_validation) < 0),
            ("max_turns below 1", subset.max_turns < 1),
        )
        if is_wrong
    ]
    problems += [] if spec.subsets else ["no subsets"]
    if not 0.0 <= spec.start_score <= 1.0:
        problems.append(f"start_score={spec.start_score:g} is not in [0, 1]")
    yield from graded("entry", problems, f"{spec.name}, {counted(len(spec.subsets), 'subset')}")
    untested = [name for name, subset in spec.subsets.items() if not subset.num_test]
    if untested:
        yield Finding(Grade.NOTE, "entry", f"no held-out items in {', '.join(untested[:3])}")


def check_protocol(driver: Driver, item_id: str) -> Iterator[Finding]:
    """Yield missing methods and wrong return types, on one item."""
    with driver.open(item_id) as episode:
        missing = [name for name in METHODS if not callable(getattr(episode.env, name, None))]
        if missing:
            yield Finding(Grade.FAIL, "protocol", f"no method {', '.join(missing)}")
            return
        valid = episode.call("valid_actions")
        expert = episode.call("expert_action")
        wanted: list[tuple[str, Any, type | tuple[type, ...]]] = [
            ("reset", episode.first, str),
            ("valid_actions", valid, list),
            ("expert_action", expert, (str, type(None))),
            ("render", episode.call("render"), str),
            ("fingerprint", episode.call("fingerprint"), str),
            *((f"valid_actions()[{i}]", each, str) for i, each in enumerate(valid[:3])),
            ("step", episode.call("step", expert or "no such action"), StepResult),
        ]
    problems = [
        f"{name} returns {type(value).__name__}; it must return {_names_of(kind)}"
        for name, value, kind in wanted
        if not isinstance(value, kind)
    ]
    subset = item_id.partition("-")[0]
    problems += [
        f"accepts the unknown item {i!r}"
        for i in ("nothing", f"{subset}-train-999999999")
        if _accepts_item(driver, i)
    ]
    yield from graded("protocol", problems, "all methods exist, and unknown items are refused")


def _names_of(kind: type | tuple[type, ...]) -> str:
    """Return the names of types, as in "str or None"."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("None" if each is type(None) else each.__name__ for each in kinds)


def _accepts_item(driver: Driver, item_id: str) -> bool:
    """Return whether the environment knows an item."""
    try:
        driver.open(item_id).call("close")
    except UnknownItem:
        return False
    except EnvError:
        return True
    return True


def play_all(driver: Driver, items: list[str]) -> Plays:
    """Play every item with the expert and with random actions."""
    plays = Plays()
    for item_id in items:
        for choose, played in ((expert, plays.by_expert), (chance(item_id), plays.by_chance)):
            with driver.open(item_id) as episode:
                began = time.perf_counter()
                episode.play(choose, max_turns=max_turns_of(driver.spec, item_id))
                took_s = time.perf_counter() - began
                plays.step_s += [took_s / len(episode.results)] if episode.results else []
                played.append(episode)
    return plays


def check_determinism(driver: Driver, plays: Plays) -> Iterator[Finding]:
    """Yield items for which a repetition of the same actions has a different result."""
    if not driver.spec.is_repeatable:
        yield Finding(Grade.NOTE, "determinism", "not checked, because is_repeatable=False")
        return
    problems: list[str] = []
    for played in plays.all:
        with driver.open(played.item_id) as again:
            actions = iter(played.actions)
            again.play(lambda _, a=actions: next(a, None), max_turns=len(played.actions))
        for turn, (one, two) in enumerate(
            zip(compared_part(played), compared_part(again), strict=False)
        ):
            if one != two:
                problems.append(
                    f"{played.item_id}, turn {turn}: first {one!r:.80}, then {two!r:.80}"
                )
                break
    yield from graded(
        "determinism", problems, f"{counted(len(plays.all), 'episode')} repeated with equal results"
    )


def check_at_once(driver: Driver, plays: Plays) -> Iterator[Finding]:
    """Yield episodes that differ when other episodes run at the same time.

    First the episodes take turns in one thread, then each has a thread of its own, as in a worker.
    """
    spec = driver.spec
    if not spec.is_repeatable:
        return
    if spec.isolation is not Isolation.INLINE and spec.sessions_per_worker == 1:
        yield Finding(Grade.OK, "at once", "a process holds one episode (sessions_per_worker=1)")
        return
    alone = plays.all[:MAX_AT_ONCE]
    runs = [("in turns", _play_in_turns(driver, alone))]
    has_coroutines = any(inspect.iscoroutinefunction(episode.env.step) for episode in alone)
    if spec.isolation is Isolation.WORKER and not has_coroutines:
        runs.append(("in parallel threads", _play_in_threads(driver, alone)))
    problems = [
        f"{episode.item_id} differs when {len(alone)} episodes run {manner}; remove the state that "
        "episodes share, or set sessions_per_worker=1"
        for manner, outcomes in runs
        for episode, outcome in zip(alone, outcomes, strict=True)
        if outcome != compared_part(episode)
    ]
    text = f"{counted(len(alone), 'episode')} at once have the results of each alone"
    yield from graded("at once", problems, text)


def _play_in_turns(driver: Driver, alone: Sequence[RecordedPlay]) -> list[list[object]]:
    """Repeat episodes step by step in turns; return their compared parts."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(driver.open(episode.item_id)) for episode in alone]
        for turn in range(max(len(episode.actions) for episode in alone)):
            for again, episode in zip(opened, alone, strict=True):
                if turn < len(episode.actions):
                    again.step(episode.actions[turn])
        return [compared_part(again) for again in opened]


def _play_in_threads(driver: Driver, alone: Sequence[RecordedPlay]) -> list[list[object]]:
    """Repeat episodes in a thread each; return their compared parts, or the error's text."""
    start = threading.Barrier(len(alone))

    def play(episode: RecordedPlay) -> list[object]:
        other = Driver(driver.spec, driver.style)
        try:
            start.wait(timeout=START_S)
            with other.open(episode.item_id) as again:
                for action in episode.actions:
                    again.step(action)
            return compared_part(again)
        except EnvError as error:
            return [str(error)]
        finally:
            other.close()

    with ThreadPoolExecutor(len(alone)) as threads:
        return list(threads.map(play, alone))


def check_saving(driver: Driver, plays: Plays) -> Iterator[Finding]:
    """Yield episodes that differ after their state was saved and loaded between two turns.

    The state is saved before each of some turns. Another episode loads it and performs the rest of
    the actions. The saved episode goes on, too, and must be unchanged.
    """
    with driver.open(plays.all[0].item_id) as episode:
        has = [name for name in SAVING if callable(getattr(episode.env, name, None))]
    if len(has) < len(SAVING):
        text = "no save() and load(): an episode whose hub or actor is killed begins anew"
        if driver.spec.is_repeatable:
            text = "no save() and load(): an interrupted episode repeats its actions to continue"
        text = f"{has[0]}() alone, without {(set(SAVING) - set(has)).pop()}()" if has else text
        yield Finding(Grade.FAIL if has else Grade.NOTE, "saving", text)
        return
    problems: list[str] = []
    sizes: list[int] = []
    for played in plays.all[:MAX_SAVED_PLAYS]:
        try:
            turn = _first_difference(driver, played, sizes)
        except (StateUnsaved, EnvError) as error:
            problems.append(f"{played.item_id}: {error}")
            continue
        if turn is not None:
            problems.append(f"{played.item_id} differs from turn {turn} on after save() and load()")
    most = max(sizes, default=0)
    text = f"{counted(len(sizes), 'state')} saved and loaded, {most} bytes at most"
    yield from graded("saving", problems, text)


def _first_difference(driver: Driver, played: RecordedPlay, sizes: list[int]) -> int | None:
    """Return the first turn that differs after a state was loaded; None: all are equal.

    Raises: StateUnsaved: a state is not plain data, or too large. EnvError: a call raised.
    """
    expected = compared_part(played)
    last = len(played.actions) - played.is_over  # The last turn after which a state is saved.
    turns = {*range(0, last + 1, 1 + last // MAX_SAVED_TURNS), last}
    with driver.open(played.item_id) as saved:
        for turn, action in enumerate([*played.actions, None]):
            if turn in turns:
                text = state_text(saved.call("save"))
                sizes.append(len(text))
                with driver.open(played.item_id) as other:
                    other.call("load", json.loads(text))
                    for rest in played.actions[turn:]:
                        other.step(rest)
                    for number, part in enumerate(compared_part(other)[1:], turn + 1):
                        if driver.spec.is_repeatable and part != expected[number]:
                            return number - 1
            if action is not None:
                saved.step(action)
    if not driver.spec.is_repeatable:
        return None
    pairs = zip(compared_part(saved), expected, strict=False)
    return next((max(0, turn - 1) for turn, (one, two) in enumerate(pairs) if one != two), None)


def compared_part(episode: RecordedPlay) -> list[object]:
    """Return the part of an episode that is compared, as texts: NaN does not equal itself."""
    return [
        episode.first,
        *(json.dumps(result.as_dict(), default=str) for result in episode.results),
    ]


def check_actions(driver: Driver, items: list[str]) -> Iterator[Finding]:
    """Yield valid actions that are refused, and texts on which the environment fails."""
    problems: list[str] = []
    num_tried = 0
    for item_id in items[:4]:
        with driver.open(item_id) as episode:
            actions = episode.call("valid_actions")
        for action in actions[:MAX_ACTIONS]:
            num_tried += 1
            with driver.open(item_id) as episode:
                if not episode.step(action).is_valid:
                    problems.append(f"{item_id}: valid_actions has {action!r:.60}, step refuses it")
    for text in HOSTILE:
        with driver.open(items[0]) as episode:
            try:
                result = episode.step(text)
            except EnvError as error:
                problems.append(f"the action {text!r:.30} raises an error: {error}"[:200])
                continue
            if text == "no such action" and result.is_valid and not driver.spec.takes_any_text:
                problems.append(f"the action {text!r} counts as valid")
    yield from graded(
        "actions", problems, f"{num_tried} valid actions work, invalid ones are refused"
    )


def _split_of(item_id: str) -> str:
    """Return the split of an item."""
    item = split_item(item_id)
    return item.split if item else ""


def check_items(driver: Driver, items: list[str]) -> Iterator[Finding]:
    """Yield items with equal initial states; equal items across the splits are leaks."""
    prints: dict[str, str] = {}
    twice: list[str] = []
    for item_id in items:
        with driver.open(item_id) as episode:
            state = str(episode.call("fingerprint"))
        if state in prints:
            is_leak = _split_of(item_id) != _split_of(prints[state])
            leak = ", and one of them is held out" * is_leak
            twice.append(f"{prints[state]} and {item_id} are equal{leak}")
        prints.setdefault(state, item_id)
    text = f"{counted(len(items), 'item')}, all different at reset"
    grade = Grade.NOTE if twice else Grade.OK
    yield Finding(grade, "items", "; ".join(twice[:2]) if twice else text)
