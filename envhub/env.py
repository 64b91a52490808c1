"""The environment interface: `Env`, `EnvSpec`, step results and item ids."""

import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from common.errors import EnvFailure
from common.formats.turns import FirstPrompt
from common.text import known_hint

# A label before an action. An escaped line break before it lies in a string, as a quote does.
LABEL = re.compile(r"""(?<!["'])(?<!\\n)Action:""")
SPLITS = ("train", "validation", "test")
REVISION = "revision of "
ITEM_PATTERN = re.compile(
    rf"(?P<subset>[^-\s]+)-(?P<split>{'|'.join(SPLITS)})-(?P<index>[0-9]{{1,9}})"
)


class Style(StrEnum):
    """Wording of instruction and observations.

    compact: short observations, for policies that were trained on them. instructed: the same
    observations after an instruction with rules, actions and the form of an answer. agentgym:
    identical to AgentGym's. `EnvSpec.make` receives compact or agentgym.
    """

    COMPACT = "compact"
    INSTRUCTED = "instructed"
    AGENTGYM = "agentgym"


class Isolation(StrEnum):
    """The process or thread that runs the episodes of an environment.

    INLINE: the server's own process and thread; only for fast built-in code that cannot hang.
    TASK: the server's event loop; only for asynchronous environments that wait for I/O.
    WORKER: a worker process, which is killed and replaced when it hangs, leaks memory or dies.
    """

    INLINE = "inline"
    TASK = "task"
    WORKER = "worker"


class Reward(StrEnum):
    """How the return of an episode is computed from its step rewards.

    LAST: the return is the last step's reward.
    SUM: the return is the sum of all step rewards. The sum must stay in [0, 1] after every step.
        The hub's answers carry the sum so far.
    """

    LAST = "last"
    SUM = "sum"


class ServiceDown(EnvFailure):
    """A service outside of the environment, such as a judge, does not answer.

    The session ends without an outcome, and its episode is played again later. The hub opens no
    session of the environment until `EnvSpec.service` reports that the service answers.
    """


class UnknownItem(ValueError):
    """The item id names no task of this environment; the text suggests a valid one."""


class ItemId(NamedTuple):
    """A parsed item id, `"<subset>-<split>-<index>"`."""

    subset: str
    split: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetSpec:
    """Size of one subset; `max_turns` limits the turns of an episode at any horizon.

    Settings are chosen on validation items, so that the test items have chosen nothing.
    """

    num_train: int
    num_test: int
    max_turns: int
    num_validation: int = 0

    def size(self, split: str) -> int:
        """Return the number of items of a split."""
        sizes = {"validation": self.num_validation, "test": self.num_test}
        return sizes.get(split, self.num_train)


class StepResult(msgspec.Struct, kw_only=True, gc=False):  # Construction takes 1/10 of a fast step.
    """The result of one action. Its producer must not modify it after returning it.

    Attributes:
        reward: in [0, 1]. With `Reward.SUM` it is this step's share, and the sum is in `[0, 1]`
            too.
        is_valid: False when the text was not an executable action.
        is_success: the episode ended solved. If an environment leaves it None, it becomes True when
            the episode ended with reward 1, and `tells_success` becomes False.
        score: the score that AgentGym's server reports. None: `reward` times its maximum score.
        state: a text that is equal exactly for equal states of an item. The next turn is compared
            with other turns taken in the same state. "": the observation is used instead.
        is_truncated: the episode ended (`done`) at a limit of the environment itself, as
            gymnasium's `truncated`: the task would have continued, and `reward` is the score so
            far. An end that has scored the episode is no truncation, also at a limit.
        metrics: named finite numbers of the episode for the run's metrics, such as parts of its
            reward.
        facts: values in types of JSON for the rewards over a group (`groups.reward`), such as the
            item's record. Those of the last step count. JSON has no NaN and no infinity.
        seat: the seat that moves next, from 0 on; None after the end, or without seats.
        seat_rewards: the reward of each seat in [0, 1], if the environment has seats. `reward` is
            that of the seat that acted.
    """

    observation: str
    reward: float
    done: bool
    is_valid: bool
    is_success: bool | None = None
    score: float | None = None
    state: str = ""
    is_truncated: bool = False
    metrics: dict[str, float] | None = None
    facts: dict[str, Any] | None = None
    seat: int | None = None
    seat_rewards: list[float] | None = None
    tells_success: bool = True  # Set by `__post_init__`.

    def __post_init__(self) -> None:
        if self.is_success is None:
            self.tells_success = False
            try:
                self.is_success = bool(self.done and self.reward >= 1.0)
            except TypeError as error:
                raise TypeError(f"reward={self.reward!r:.80} is not a number") from error
        if self.is_truncated and not self.done:
            raise ValueError("is_truncated=True with done=False: a truncated episode has ended")
        if self.metrics:
            for name, value in self.metrics.items():
                if not (isinstance(value, int | float) and math.isfinite(value)):
                    raise ValueError(f"metric {name}={value!r:.80} is not a finite number")
        if self.facts:
            check_finite("facts", self.facts)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON for clients of the hub's own routes."""
        plain = {
            "observation": self.observation,
            "reward": self.reward,
            "done": self.done,
            "is_valid": self.is_valid,
            "is_success": self.is_success,
            "state": self.state,
            "is_truncated": self.is_truncated,
        }
        if self.metrics:
            plain["metrics"] = self.metrics
        if self.facts:
            plain["facts"] = self.facts
        if self.seat_rewards is not None:
            plain["seat"] = self.seat
            plain["seat_rewards"] = self.seat_rewards
        return plain


class Env(Protocol):
    """One live episode. Its calls never overlap; a call before `reset` may raise.

    An environment may also have a method `first_messages()`, called after `reset`. It returns the
    messages before the first observation, as {"role": ..., "content": text} each. The assistant's
    may have "tool_calls" as in OpenAI's API, and results of tools have the role "tool".

    If items have tools of their own, `EnvSpec.tools` is empty, and a method `item_tools()`, called
    after `reset`, returns the tools of the item in the form of `EnvSpec.tools`.

    An environment may be able to save an episode, with two methods. `save()` returns the state as
    plain data: None, bool, int, float, str, and lists and dicts (with str keys) of them. The hub
    copies it at once. `load(state)` is called on another episode after `reset` with the same item
    and seed, perhaps in another process. From then on equal actions have equal results. `save` is
    called between steps, never after the last one, and must not change the episode.

    In an environment with seats (`EnvSpec.seats`), several players act in turn. Seat 0 moves first,
    and `StepResult.seat` names the seat that moves next. An observation is for that seat: it holds
    all that the seat must know since its last move. `StepResult.seat_rewards` is required.

    An environment may also have a method `detail(what: str)`. It returns JSON for AgentGym's pages,
    or None for an unknown request. The result for "picture" is one of:

    - an image as a `data:` URL
    - {"map": rows with one character per cell}
    - {"parts": [[title, text], ...]}
    - {"tree": {"name", "count", "held", "parts": [trees]}, "held": {name: count}}
    """

    def reset(self, item_id: str, seed: int) -> str:
        """Start the episode of an item and return its first observation.

        Args:
            item_id: `"<subset>-<split>-<index>"`; it alone determines the task, on every machine.
            seed: seed of random events in the environment; deterministic environments ignore it.

        Raises: UnknownItem: no such subset, or the index is out of range.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Perform one action, which may be any text, and return its result."""
        ...

    def valid_actions(self) -> list[str]:
        """Return the actions that are executable now (a finite sample of an infinite set)."""
        ...

    def expert_action(self) -> str | None:
        """Return the scripted expert's next action; None when the expert has no plan."""
        ...

    def render(self) -> str:
        """Return a text picture of the whole state for people; the agent never receives it."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the full state at reset; equal states have equal hashes."""
        ...

    def close(self) -> None:
        """Release the resources of the episode; called once, also after a failure."""
        ...


class AsyncEnv(Protocol):
    """`Env` with coroutines, for environments that wait for a browser or a server."""

    async def reset(self, item_id: str, seed: int) -> str: ...
    async def step(self, action: str) -> StepResult: ...
    async def valid_actions(self) -> list[str]: ...
    async def expert_action(self) -> str | None: ...
    async def render(self) -> str: ...
    async def fingerprint(self) -> str: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task of the catalogue: a subset and its fixed lists of item ids.

    `train` and `test` list items of `subset` in reporting order. `note` is printed beside the
    task's name in every table.
    """

    scenario: str
    subset: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSet:
    """The test set of a published table: item ids by the column's subset, and the turn limit.

    `note` describes the differences from the paper; "" if there are none.
    """

    items: Mapping[str, tuple[str, ...]]
    turns: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """An environment's catalogue entry.

    Attributes:
        instruction: text before the first observation. Without an `instructed` text, that style
            has the compact one.
        make: builds one episode; an `Env`, or an `AsyncEnv` where `isolation` is not INLINE.
        isolation: where episodes run. In a worker, synchronous calls of different sessions run in
            parallel threads; calls of one session never overlap.
        sessions_per_worker: concurrent episodes of one worker; workers are reused. With TASK:
            concurrent episodes in the hub. A library that is not thread-safe needs 1. 0: 1 with
            WORKER, else 64 for an environment outside of the package.
        sessions_key: configuration key of the number of sessions; "": the code determines it.
        reward: how the return is computed from the step rewards.
        start_score: the score before the first step: a raw score of 0, mapped to [0, 1].
        takes_any_text: every text is a valid action, such as an answer in words.
        seats: number of players that act in turn, see `Env`. Such an environment needs Reward.LAST.
        is_repeatable: equal actions always have equal results and no effect outside the episode.
        has_references: `expert_action` plays a reference solution, whose return is above 0.
        expert_turns: the turns that the expert needs for the item of a number, by subset, where
            they are known without play. `envhub/catalogue/distances.py` measures other subsets.
        from_agentgym: maps AgentGym's data index to an item id; raises UnknownItem. None: no
            mapping.
        column_item: the same mapping into the subset of the paper's table; None: `from_agentgym`.
        note: remark printed with every table row; "" where the tasks match the name.
        prompts: yields the first prompt of every item, for an environment that has them before the
            start. They are then never cut: a run whose context is too small for one is refused.
        content: digests of the files and settings that determine the items, by the key that names
            them. A run continues only with equal ones. Keys that begin with `REVISION` name the
            commit of a source, which is recorded and not compared.
    """

    name: str
    subsets: Mapping[str, SubsetSpec]
    instruction: Mapping[Style, str]
    # The agent's canned answer to the instruction, where the instruction is a separate message.
    acknowledgement: Mapping[Style, str] = field(default_factory=dict[Style, str])
    make: Callable[[Style], Env | AsyncEnv]
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict[str, TaskSpec])  # Tasks by name.
    isolation: Isolation = Isolation.INLINE
    sessions_per_worker: int = 0
    max_workers: int = 1  # Worker processes.
    sessions_key: str = ""
    # Limit of resident bytes with child processes; a worker above it is replaced.
    worker_memory_bytes: int = 2 << 30
    step_timeout_s: float | None = None  # Deadline of one call; None: the hub's value.
    reward: Reward = Reward.LAST
    start_score: float = 0.0
    takes_any_text: bool = False
    seats: int = 1
    is_repeatable: bool = True
    has_references: bool = False
    expert_turns: Mapping[str, Callable[[int], int]] = field(
        default_factory=dict[str, Callable[[int], int]]
    )
    from_agentgym: Callable[[int], str] | None = None
    column_item: Callable[[int], str] | None = None
    note: str = ""
    prompts: Callable[[], Iterator[FirstPrompt]] | None = None
    content: Mapping[str, str] = field(default_factory=dict[str, str])
    paper: PaperSet | None = None
    # Tools as {"name", "description", "parameters": JSON schema} each. With tools, an action is
    # {"tool": name, "arguments": {...}}; with (), an action is any text.
    tools: tuple[Mapping[str, Any], ...] = ()
    # Returns why a service that the episodes need does not answer; "" if it does. The hub calls it
    # at its start, and repeatedly after an episode raised ServiceDown.
    service: Callable[[], Awaitable[str]] | None = None
    # Called when the process that holds the episodes ends.
    stop: Callable[[], Awaitable[None]] | None = None
    stop_timeout_s: float = 1.0


def split_item(item_id: str) -> ItemId | None:
    """Return the parts of an item id, whether or not the item exists; None when malformed."""
    match = ITEM_PATTERN.fullmatch(item_id)
    if match is None:
        return None
    return ItemId(subset=match["subset"], split=match["split"], index=int(match["index"]))


def parse_item(item_id: str, subsets: Mapping[str, SubsetSpec]) -> ItemId:
    """Return the parts of an item id that exists in `subsets`.

    Raises: UnknownItem: malformed, unknown subset, or index out of range.
    """
    item = split_item(item_id)
    if item is None:
        example = f"{next(iter(subsets))}-train-0"
        raise UnknownItem(
            f"item id {item_id[:80]!r} is not <subset>-<split>-<index>, like {example}"
        )
    spec = subsets.get(item.subset)
    if spec is None:
        raise UnknownItem(f"no subset {item.subset!r}{known_hint(item.subset, subsets)}")
    num_items = spec.size(item.split)
    if num_items == 0:
        raise UnknownItem(f"subset {item.subset!r} has no {item.split} items")
    if item.index >= num_items:
        last = f"{item.subset}-{item.split}-{num_items - 1}"
        raise UnknownItem(f"item {item_id!r} is out of range; the last is {last!r}")
    return item


def checked_reward(name: str, value: Any) -> float:
    """Return a reward as a number. Raises: ValueError: it is none, or not in [0, 1]."""
    try:
        reward = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}={value!r:.80} is not a number") from error
    if not 0.0 <= reward <= 1.0:  # A NaN is not in the range.
        raise ValueError(f"{name} {reward} is not in [0, 1]")
    return reward


def check_finite(name: str, value: object) -> None:
    """Raise ValueError if a value in types of JSON has a NaN or an infinity, with its place."""
    if (place := _place_of_infinity(value)) is not None:
        raise ValueError(f"{name}{place} is not a finite number, which JSON lacks")


def _place_of_infinity(value: object) -> str | None:
    """Return the keys to the first number that is not finite, and the number; None: none is."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"={value}"
    items: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        if (place := _place_of_infinity(item)) is not None:
            return f"[{key!r:.80}]{place}"
    return None


def action_text(text: str) -> str:
    """Return the text after the last `Action:`, or the whole text, stripped.

    After a quote or an escaped line break, `Action:` is a part of a string of the action.
    """
    labels = [label.end() for label in LABEL.finditer(text)]
    return text[labels[-1] if labels else 0 :].strip()
