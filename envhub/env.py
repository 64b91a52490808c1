"""What an environment must offer, and the words the hub uses about it."""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgspec

ITEM_PATTERN = re.compile(r"(?P<subset>[^-\s]+)-(?P<split>train|test)-(?P<index>[0-9]{1,9})")


class Style(StrEnum):
    """How observations are worded: short for small models, or as AgentGym words them."""

    COMPACT = "compact"
    AGENTGYM = "agentgym"


class Isolation(StrEnum):
    """Where the episodes of an environment live.

    INLINE: in the server's own process and thread; only for quick code of ours that cannot hang.
    TASK: in the server's event loop; only for asynchronous environments that wait for others.
    WORKER: in a worker process, which is killed and replaced when it hangs, leaks or dies.
    """

    INLINE = "inline"
    TASK = "task"
    WORKER = "worker"


class Reward(StrEnum):
    """What an episode is worth, of what its steps pay.

    LAST: what the last step paid. SUM: all steps' pay added up; each must leave the sum in [0, 1],
    and who asks the hub is told the sum so far.
    """

    LAST = "last"
    SUM = "sum"


class EnvFailure(RuntimeError):
    """The machinery of the environment failed (a dead JVM, no browser, a server's silence).

    Never the agent's doing and never a reward: the session ends with this text.
    """


class UnknownItem(ValueError):
    """The item id names no task of this environment; the text says what would."""


class ItemId(NamedTuple):
    """A parsed item id, `"<subset>-<split>-<index>"`."""

    subset: str
    split: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetSpec:
    """Size of one subset; `max_turns` is the most turns an episode may use at any horizon."""

    num_train: int
    num_test: int
    max_turns: int


class StepResult(msgspec.Struct, kw_only=True, gc=False):  # made in a tenth of a quick step
    """What one action led to; whoever made it hands it over and changes it no more.

    `reward` is in [0, 1] (what one step pays, where the `EnvSpec` says `Reward.SUM`: the sum is).
    `is_valid` is False when the text was no executable action. `is_success` says whether the
    episode has ended solved; where an environment does not say (None), it has if it ended worth 1,
    and `tells_success` is False. `is_truncated` marks an end (`done`) at a limit of the
    environment's own, as gymnasium's `truncated`: the task would have gone on. `state` is the same
    text for equal states of an item, and another for unequal ones: the agent's next turn is
    compared with others that were taken in it; where it is "", the observation stands for it.
    """

    observation: str
    reward: float
    done: bool
    is_valid: bool
    is_success: bool | None = None
    score: float | None = None  # what AgentGym's server pays; None: `reward` of its best score
    state: str = ""
    is_truncated: bool = False
    tells_success: bool = True  # set by itself

    def __post_init__(self) -> None:
        if self.is_success is None:
            self.tells_success = False
            self.is_success = bool(self.done and self.reward >= 1.0)
        if self.is_truncated and not self.done:
            raise ValueError("is_truncated=True with done=False: a truncated episode has ended")

    def told(self) -> dict[str, Any]:
        """Return what a client of the hub's own routes is told, as JSON."""
        return {
            "observation": self.observation,
            "reward": self.reward,
            "done": self.done,
            "is_valid": self.is_valid,
            "is_success": self.is_success,
            "state": self.state,
            "is_truncated": self.is_truncated,
        }


class Env(Protocol):
    """One live episode. Calls come one at a time; a call before `reset` may raise.

    An environment may have a method `detail(what: str)` besides: JSON that AgentGym's pages ask
    for, or None for what it does not know. Of "picture" that is an image as a `data:` URL;
    {"map": rows of one sign a cell}; {"parts": [[title, text], ...]}; or {"tree": {"name", "count",
    "held", "parts": [trees]}, "held": {name: count}}.
    """

    def reset(self, item_id: str, seed: int) -> str:
        """Start the episode of an item and return its first observation.

        Args:
            item_id: `"<subset>-<split>-<index>"`; it alone fixes the task, on every machine.
            seed: for chance inside the environment; deterministic environments ignore it.

        Raises: UnknownItem: no such subset, or the index is out of range.
        """
        ...

    def step(self, action: str) -> StepResult:
        """Perform one action, any text at all, and return what came of it."""
        ...

    def valid_actions(self) -> list[str]:
        """Return actions that would be executed now (a finite sample if there are endless)."""
        ...

    def expert_action(self) -> str | None:
        """Return what the scripted expert does now; None when it knows no way."""
        ...

    def render(self) -> str:
        """Return a picture of the whole state for people; never shown to the agent."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of the full state at reset; equal states have equal hashes."""
        ...

    def close(self) -> None:
        """Give back what the episode holds; called once, also after a failure."""
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

    `train` and `test` name items of `subset`, in the order in which results are reported; `note`
    is what every table says beside the task's name.
    """

    scenario: str
    subset: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperSet:
    """The test set of a published table: item ids by column's subset, and the turns they have.

    `note` is what of it is not as in the paper, "" where nothing is.
    """

    items: Mapping[str, tuple[str, ...]]
    turns: int
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """An environment's catalogue entry.

    Attributes:
        make: builds one episode; an `Env`, or an `AsyncEnv` where `isolation` is not INLINE.
        isolation: where episodes live. In a worker, synchronous calls of different sessions run
            in threads side by side; calls of one session never overlap.
        sessions_per_worker: episodes that one worker holds at a time; workers are reused. With
            TASK: episodes that there may be at a time.
        reward: what an episode is worth, of what its steps pay.
        start_score: the score before the first step: what a raw score of 0 is in [0, 1].
        is_repeatable: whether the same actions always lead to the same, and touch nobody else.
        from_agentgym: item id of AgentGym's data index; raises UnknownItem. None: there is none.
        column_item: the same, in the subset of the paper's table; None: `from_agentgym`.
        note: what every table says of its rows; "" where the tasks are those of its name.
    """

    name: str
    subsets: Mapping[str, SubsetSpec]
    instruction: Mapping[Style, str]
    # The agent's canned answer to it, where the instruction is a message of its own.
    acknowledgement: Mapping[Style, str] = field(default_factory=dict[Style, str])
    make: Callable[[Style], Env | AsyncEnv]
    tasks: Mapping[str, TaskSpec] = field(default_factory=dict[str, TaskSpec])  # by name
    isolation: Isolation = Isolation.INLINE
    sessions_per_worker: int = 1
    max_workers: int = 1  # processes
    worker_memory_bytes: int = 2 << 30  # resident, with its children; above, it is replaced
    step_timeout_s: float | None = None  # of one call; None: the hub's
    reward: Reward = Reward.LAST
    start_score: float = 0.0
    is_repeatable: bool = True
    from_agentgym: Callable[[int], str] | None = None
    column_item: Callable[[int], str] | None = None
    note: str = ""
    paper: PaperSet | None = None
    # What actions call, as {"name", "description", "parameters": JSON schema} each; an action is
    # then {"tool": name, "arguments": {...}}. (): an action is any text.
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: Callable[[], Awaitable[None]] | None = None  # when the process that holds episodes ends
    stop_timeout_s: float = 1.0


def nearest(word: str, words: list[str]) -> str:
    """Return the word most like `word`, or the first of `words` when none is alike."""
    alike = get_close_matches(word, words, n=1, cutoff=0.0)
    return alike[0] if alike else words[0]


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
        raise UnknownItem(f"item id {item_id[:80]!r} is not <subset>-<split>-<index>, as {example}")
    spec = subsets.get(item.subset)
    if spec is None:
        known = nearest(item.subset, list(subsets))
        raise UnknownItem(f"no subset {item.subset!r}; the nearest is {known!r}")
    num_items = spec.num_train if item.split == "train" else spec.num_test
    if num_items == 0:
        raise UnknownItem(f"subset {item.subset!r} has no {item.split} items")
    if item.index >= num_items:
        last = f"{item.subset}-{item.split}-{num_items - 1}"
        raise UnknownItem(f"item {item_id!r} is out of range; the last is {last!r}")
    return item


def action_text(text: str) -> str:
    """Return what follows the last `Action:`, or the whole text, stripped."""
    return text.rpartition("Action:")[2].strip()
