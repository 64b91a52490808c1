"""What a policy is shown of its episode, as tokens: grows, and goes on with less when it is full.

full     the episode ends as context_full.
window   a new segment begins with the first message and the latest turns.
summary  the policy is asked to sum up; a new segment begins with the first message, that demand and
         its summary, and learns nothing of it again.
fold, subagent  the policy opens branches (`actor.rollout.folding`).

A new segment is made of the very tokens that were sampled before and of what was observed: nothing
sampled is ever encoded from its text.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

from actor.rollout.observations import CUT_MARK, Observations
from common.config.evaluation import AgentOptions, ContextKind
from common.segments import TOKEN_COLUMNS

LEFT_OUT = "\n[turns that followed are left out here]"
REQUEST = (
    "The conversation has become too long. Sum up what you will need of it to go on: what you have"
    " done, what you found out, and what is left to do. Only your summary will be kept."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a policy sampled for one turn."""

    token_ids: list[int]  # [num_sampled]
    logprobs: list[float]  # [num_sampled] nats, of the distribution that was sampled from
    versions: list[int]  # [num_sampled] weights that sampled each token
    is_stopped: bool = True  # ended by an end-of-turn token, which is the last of token_ids
    num_prompt: int = 0  # tokens of the conversation before, as the engine was given them
    num_cached: int = 0  # of them, those whose keys and values it had already
    waited_s: float = 0.0  # for others, or for new weights, while it was asked for


class Render(Protocol):
    """Text to token ids and back; `actor.rollout.render.Renderer` is one."""

    def first_prompt(
        self, text: str, *, before: tuple[str, str] | None = None
    ) -> list[int]: ...  # `before`: an instruction and the agent's answer to it
    def after_action(self, text: str, *, is_stopped: bool) -> list[int]: ...
    def action_text(self, token_ids: list[int]) -> str: ...


@dataclass(slots=True)
class Tape:
    """The growing sequence. One place appends, so the columns cannot fall out of step."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])  # of segments

    @property
    def context(self) -> list[int]:
        """What the policy is shown: the segment so far."""
        return self.token_ids[self.starts[-1] :]

    @property
    def num_in_context(self) -> int:
        return len(self.token_ids) - self.starts[-1]

    def restart(self, ids: list[int], turn: int) -> None:
        """Begin a new segment, before a turn."""
        self.starts.append(len(self.token_ids))
        self.observe(ids, turn)

    def show(self, ids: list[int], turn: int) -> None:
        """Show exactly these tokens: they go on from the segment, or begin a new one."""
        num_shown = self.num_in_context
        if not num_shown or self.context == ids[:num_shown]:
            self.observe(ids[num_shown:], turn)
        else:
            self.restart(ids, turn)

    def drop_unanswered(self) -> None:
        """Take back the last segment if nothing was sampled in it and there are others."""
        cut = self.starts[-1]
        if cut and not any(self.loss_mask[cut:]):
            self.starts.pop()
            for name in TOKEN_COLUMNS:
                del getattr(self, name)[cut:]

    def end(self, last_turn: int) -> None:
        """Drop what nobody answered; what was sampled after the last turn belongs to it."""
        self.drop_unanswered()
        self.turn_ids = [min(turn, last_turn) for turn in self.turn_ids]

    def observe(self, ids: list[int], turn: int) -> None:
        self.add(Turn(ids, [0.0] * len(ids), [-1] * len(ids)), turn, is_sampled=False)

    def add(self, taken: Turn, turn: int, *, is_sampled: bool = True) -> None:
        num_tokens = len(taken.token_ids)
        self.token_ids += taken.token_ids
        self.loss_mask += [is_sampled] * num_tokens
        self.logprobs += taken.logprobs
        self.versions += taken.versions
        self.turn_ids += [turn] * num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a policy may be shown, and what becomes of an episode that needs more."""

    max_tokens: int  # of prompt and answer
    turn_tokens: int  # most of them that one turn samples
    options: AgentOptions = field(default_factory=AgentOptions)


class History:
    """What one episode's policy has been shown. Whoever plays tells it what happens, in order.

    Example (window of 1 turn): `begin` the page p; after action a the observation o has no room:
    `go_on` makes a new segment of p, "[turns that followed are left out here]", a and o.
    """

    def __init__(self, render: Render, room: Room) -> None:
        """Make an empty one. `render` makes tokens of what is observed."""
        self.tape = Tape()
        self.observations = Observations()
        self._render = render
        self._room = room
        self._kind = room.options.context
        self._request = room.options.summary_request or REQUEST
        self._half = room.max_tokens // 2  # most of it that an observation takes
        reserved = 0
        if self._kind is ContextKind.SUMMARY:  # the demand must find room whenever it is made
            reserved = _room_of_summary(render, self._request, room.turn_tokens)
        self.max_prompt = room.max_tokens - room.turn_tokens - reserved
        self._turns: deque[list[int]] = deque(maxlen=room.options.context_turns)
        self._first: tuple[str, Callable[[str], list[int]]] = "", render.first_prompt

    def begin(self, text: str, encode: Callable[[str], list[int]]) -> bool:
        """Show the first message, cut to its room; return False if nothing of it fits."""
        self._first = text, encode
        ids = self.observations.fitted(text, encode, max_tokens=self.max_prompt)
        self.tape.observe(ids or [], 0)
        return ids is not None

    def is_own(self, action: str) -> bool:
        """Return whether an action is of a kind that `takes` may take."""
        return False

    def takes(self, action: str, taken: Turn, turn: int) -> bool:
        """Return whether an action changed what is shown, and is none of the environment's.

        Args:
            action: the text of `taken`, the last thing on the tape.
            turn: the one that it is a part of.
        """
        return False

    async def go_on(
        self, observation: str, taken: Turn, turn: int, ask: Callable[[], Awaitable[Turn]]
    ) -> bool:
        """Show what answered an action, before the next turn; return False if there is no room.

        Args:
            taken: the action that was answered, the last thing on the tape.
            turn: the next one.
            ask: samples a turn of the policy on the tape's context.
        """
        encode = partial(self._render.after_action, is_stopped=taken.is_stopped)
        ids = self.observations.fitted(observation, encode, max_tokens=self._half)
        if ids is not None:
            self._turns.append([*taken.token_ids, *ids])
            if self.tape.num_in_context + len(ids) <= self.max_prompt:
                self.tape.observe(ids, turn)
                return True
        if self._kind is ContextKind.WINDOW:
            return self._slide(observation, turn)
        if self._kind is ContextKind.SUMMARY:
            return await self._sum_up(observation, taken, turn, ask)
        return False

    def last(self, observation: str, taken: Turn, turn: int) -> None:
        """Take up, as far as there is room, what no turn will answer. It is not counted as cut."""
        encode = partial(self._render.after_action, is_stopped=taken.is_stopped)
        room = self._room.max_tokens - self.tape.num_in_context
        self.tape.observe(Observations().fitted(observation, encode, max_tokens=room) or [], turn)

    def _slide(self, observation: str, turn: int) -> bool:
        first = self._first_again(LEFT_OUT, self.max_prompt // 2)
        if first is None:
            return False
        room = self.max_prompt - len(first)
        kept: list[list[int]] = []  # newest first
        for part in reversed(self._turns):
            if len(part) > room:
                break
            kept.append(part)
            room -= len(part)
        if not kept:  # an empty answer stands for the action
            ids = self._fitted_again(observation, is_stopped=False, room=room)
            if ids is None:
                return False
            kept.append(ids)
        self.tape.restart([*first, *chain.from_iterable(reversed(kept))], turn)
        return True

    async def _sum_up(
        self, observation: str, taken: Turn, turn: int, ask: Callable[[], Awaitable[Turn]]
    ) -> bool:
        room = self.max_prompt - self._room.turn_tokens  # beside the longest summary
        first = self._first_again(f"\n\n{self._request}", room // 2)
        ids = self._fitted_again(observation, is_stopped=False, room=room // 2)
        if first is None or ids is None:
            return False  # before anything is sampled for a turn that is not to come
        demand = self._render.after_action(self._request, is_stopped=taken.is_stopped)
        self.tape.observe(demand, turn)
        summary = await ask()
        if self._room.options.learn_summaries:
            self.tape.add(summary, turn)
        else:
            self.tape.observe(summary.token_ids, turn)
        room = min(self.max_prompt - len(first) - len(summary.token_ids), self._half)
        ids = self._fitted_again(observation, is_stopped=summary.is_stopped, room=room)
        assert ids is not None  # there is more room than was looked for
        self.tape.restart([*first, *summary.token_ids, *ids], turn)
        return True

    def _first_again(self, end: str, max_tokens: int) -> list[int] | None:
        """Return the first message, cut to its room, with an `end`; None if that does not fit."""
        text, encode = self._first
        return Observations().fitted(text, lambda cut: encode(cut + end), max_tokens=max_tokens)

    def _fitted_again(self, observation: str, *, is_stopped: bool, room: int) -> list[int] | None:
        """Return an observation for a new segment; that it was cut is counted already."""
        encode = partial(self._render.after_action, is_stopped=is_stopped)
        return Observations().fitted(observation, encode, max_tokens=room)


def least_again(render: Render, options: AgentOptions, turn_tokens: int) -> int:
    """Return the tokens before a turn that a new segment takes at least; 0 where there is none."""
    cut = f"x{CUT_MARK.format(10**6)}"
    if options.context not in (ContextKind.WINDOW, ContextKind.SUMMARY):
        return 0
    is_window = options.context is ContextKind.WINDOW
    request = options.summary_request or REQUEST
    end = LEFT_OUT if is_window else f"\n\n{request}"
    halves = 2 * max(
        len(render.first_prompt(cut + end)), len(render.after_action(cut, is_stopped=False))
    )
    if is_window:
        return halves
    return halves + turn_tokens + _room_of_summary(render, request, turn_tokens)


def _room_of_summary(render: Render, request: str, turn_tokens: int) -> int:
    """Return the tokens that a demand for a summary and the summary take at most."""
    return len(render.after_action(request, is_stopped=False)) + turn_tokens
