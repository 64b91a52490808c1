"""What a policy is shown of its episode, as tokens: grows, and goes on with less when it is full.

full     the episode ends as context_full.
window   a new segment begins with the first message and the latest turns.
summary  the policy is asked to sum up; a new segment begins with the first message, that demand and
         its summary, and learns nothing of it again.
fold, subagent  the policy opens branches (`actor.rollout.folding`).

Before it acts it may be asked for a plan, which stays behind the first message in every segment, or
for a reflection, which belongs to the observation that it is demanded with. Then it is told to act.

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
from common.segments import TOKEN_COLUMNS, Aside

LEFT_OUT = "\n[turns that followed are left out here]"
REQUEST = (
    "The conversation has become too long. Sum up what you will need of it to go on: what you have"
    " done, what you found out, and what is left to do. Only your summary will be kept."
)
PLAN = "\n\nDo not act yet: plan first how you will go about it, in a few words."
REFLECT = "\n\nDo not act yet: think first about what has come of it, and what to do otherwise."
GO = "Now act."


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


Ask = Callable[[], Awaitable[Turn]]  # samples a turn of the policy on what it is shown
Encode = Callable[[str], list[int]]


class Render(Protocol):
    """Text to token ids and back; `actor.rollout.render.Renderer` is one."""

    def first_prompt(
        self, text: str, *, before: tuple[str, str] | None = None
    ) -> list[int]: ...  # `before`: an instruction and the agent's answer to it
    def after_action(self, observation: str, *, is_stopped: bool) -> list[int]: ...
    def after_turn(self, text: str, *, is_stopped: bool) -> list[int]: ...  # what we say
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
    asides: list[int] = field(default_factory=list)  # as in `Trajectory`

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
            while self.asides and self.asides[-2] > cut:
                del self.asides[-3:]

    def end(self, last_turn: int) -> None:
        """Drop what nobody answered; what was sampled after the last turn belongs to it."""
        self.drop_unanswered()
        self.turn_ids = [min(turn, last_turn) for turn in self.turn_ids]

    def observe(self, ids: list[int], turn: int) -> None:
        self.add(Turn(ids, [0.0] * len(ids), [-1] * len(ids)), turn, is_sampled=False)

    def add_aside(self, taken: Turn, turn: int, kind: Aside, *, is_learnt: bool) -> None:
        """Write down an answer that the environment does not see."""
        start = len(self.token_ids)
        self.asides += [start, start + len(taken.token_ids), kind]
        if is_learnt:
            self.add(taken, turn)
        else:
            self.observe(taken.token_ids, turn)

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
        self._widest = room.max_tokens - room.turn_tokens - reserved
        self.max_prompt = self._widest  # of the next turn, less what is to be thought before it
        self._turns: deque[list[int]] = deque(maxlen=room.options.context_turns)
        self._first: tuple[str, Callable[[str, str], list[int]]] = "", lambda _, __: []
        self._aside_tokens = 0
        if room.options.plan or room.options.reflects:
            self._aside_tokens = room_of_aside(render, room.turn_tokens)
        self._demand = ""  # behind the observation that is shown

    async def begin(self, text: str, encode: Encode, ask: Ask) -> bool:
        """Show the first message, cut to its room; return False if nothing of it fits.

        Where there is to be a plan it is demanded there, and stays behind it in all segments.
        """
        does_plan = self._room.options.plan
        self.max_prompt = self._widest - does_plan * self._aside_tokens
        demanded = partial(_ending, encode, PLAN if does_plan else "")
        self._first = text, lambda cut, end: encode(cut + end)
        ids = self.observations.fitted(text, demanded, max_tokens=self.max_prompt)
        self.tape.observe(ids or [], 0)
        if ids is None or not does_plan:
            return ids is not None
        plan = await self._think(Aside.PLAN, 0, ask)
        self._first = text, partial(self._planned, demanded, plan)
        return True

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
        self, observation: str, taken: Turn, turn: int, ask: Ask, *, reflects: bool = False
    ) -> bool:
        """Show what answered an action, before the next turn; return False if there is no room.

        Args:
            taken: the action that was answered, the last thing on the tape.
            turn: the next one.
            ask: samples a turn of the policy on the tape's context.
            reflects: the policy is to reflect before that turn, and is asked to.
        """
        self.max_prompt = self._widest - reflects * self._aside_tokens
        self._demand = REFLECT if reflects else ""
        if not await self._show(observation, taken, turn, ask):
            return False
        if reflects:
            start = self.tape.num_in_context
            await self._think(Aside.REFLECTION, turn, ask)
            if self._turns:
                self._turns[-1] += self.tape.context[start:]
        return True

    async def _show(self, observation: str, taken: Turn, turn: int, ask: Ask) -> bool:
        encode = self._answering(is_stopped=taken.is_stopped)
        ids = self.observations.fitted(observation, encode, max_tokens=self._half)
        if ids is None:
            self._turns.clear()
        else:
            self._turns.append([*taken.token_ids, *ids])
            if self.tape.num_in_context + len(ids) <= self.max_prompt:
                self.tape.observe(ids, turn)
                return True
        if self._kind is ContextKind.WINDOW:
            return self._slide(observation, turn)
        if self._kind is ContextKind.SUMMARY:
            return await self._sum_up(observation, taken, turn, ask)
        return False

    async def _think(self, kind: Aside, turn: int, ask: Ask) -> Turn:
        """Have the policy say what the environment does not see, then tell it to act."""
        options = self._room.options
        is_plan = kind is Aside.PLAN
        taken = await ask()
        is_learnt = options.learn_plans if is_plan else options.learn_reflections
        self.tape.add_aside(taken, turn, kind, is_learnt=is_learnt)
        self.tape.observe(self._render.after_turn(GO, is_stopped=taken.is_stopped), turn)
        return taken

    def _planned(self, demanded: Encode, plan: Turn, cut: str, end: str) -> list[int]:
        """Return the first message with the plan behind it, as it was sampled."""
        go = self._render.after_turn(GO + end, is_stopped=plan.is_stopped)
        return [*demanded(cut), *plan.token_ids, *go]

    def _answering(self, *, is_stopped: bool) -> Encode:
        """Return how an observation is encoded, with what it is to be thought about."""
        return partial(
            _ending, partial(self._render.after_action, is_stopped=is_stopped), self._demand
        )

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
            self._turns = deque(kept, maxlen=self._turns.maxlen)
        self.tape.restart([*first, *chain.from_iterable(reversed(kept))], turn)
        return True

    async def _sum_up(self, observation: str, taken: Turn, turn: int, ask: Ask) -> bool:
        room = self.max_prompt - self._room.turn_tokens  # beside the longest summary
        first = self._first_again(f"\n\n{self._request}", room // 2)
        ids = self._fitted_again(observation, is_stopped=False, room=room // 2)
        if first is None or ids is None:
            return False  # before anything is sampled for a turn that is not to come
        demand = self._render.after_turn(self._request, is_stopped=taken.is_stopped)
        self.tape.observe(demand, turn)
        summary = await ask()
        learns = self._room.options.learn_summaries
        self.tape.add_aside(summary, turn, Aside.SUMMARY, is_learnt=learns)
        room = min(self.max_prompt - len(first) - len(summary.token_ids), self._half)
        ids = self._fitted_again(observation, is_stopped=summary.is_stopped, room=room)
        assert ids is not None  # there is more room than was looked for
        self.tape.restart([*first, *summary.token_ids, *ids], turn)
        return True

    def _first_again(self, end: str, max_tokens: int) -> list[int] | None:
        """Return the first message, cut to its room, with an `end`; None if that does not fit."""
        text, encode = self._first
        return Observations().fitted(text, lambda cut: encode(cut, end), max_tokens=max_tokens)

    def _fitted_again(self, observation: str, *, is_stopped: bool, room: int) -> list[int] | None:
        """Return an observation for a new segment; that it was cut is counted already."""
        encode = self._answering(is_stopped=is_stopped)
        return Observations().fitted(observation, encode, max_tokens=room)


def _ending(encode: Encode, end: str, text: str) -> list[int]:
    return encode(text + end)


def least_prompt(render: Render, options: AgentOptions, turn_tokens: int) -> int:
    """Return the tokens before a turn that an episode takes at least, whatever becomes of it."""
    cut, thought = f"x{CUT_MARK.format(10**6)}", room_of_aside(render, turn_tokens)
    request, is_window = options.summary_request or REQUEST, options.context is ContextKind.WINDOW
    begins = len(render.first_prompt(cut + PLAN * options.plan)) + thought * options.plan
    if options.context not in (ContextKind.WINDOW, ContextKind.SUMMARY):
        return begins
    end = LEFT_OUT if is_window else f"\n\n{request}"
    first = len(render.first_prompt(cut + PLAN * options.plan + end)) + thought * options.plan
    answer = len(render.after_action(cut + REFLECT * options.reflects, is_stopped=False))
    again = 2 * max(first, answer) + thought * options.reflects
    if not is_window:
        reserved = _room_of_summary(render, request, turn_tokens)
        again, begins = again + turn_tokens + reserved, begins + reserved
    return max(begins, again)


def _room_of_summary(render: Render, request: str, turn_tokens: int) -> int:
    """Return the tokens that a demand for a summary and the summary take at most."""
    return len(render.after_turn(request, is_stopped=False)) + turn_tokens


def room_of_aside(render: Render, turn_tokens: int) -> int:
    """Return the tokens that a plan or a reflection, and being told to act, take at most."""
    return len(render.after_turn(GO, is_stopped=False)) + turn_tokens
