"""The context of one episode as tokens, and how it continues when the context is full.

full     the episode ends as context_full.
window   a new segment begins with the first message and the latest turns.
summary  the policy is asked for a summary; a new segment begins with the first message, the request
         and the summary. The summary is masked from the loss there.
fold, subagent  the policy opens branches (`actor.rollout.folding`).

Before an action the policy may be asked for a plan or a reflection, and is then asked to act. The
plan follows the first message in every segment. A reflection belongs to the observation that asks
for it.

A new segment reuses the sampled token ids and encodes observations: sampled text is never encoded
again.
"""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from common.config.actor import AgentOptions, ContextKind, KeepThinking
from common.segments import TOKEN_COLUMNS, Aside
from common.text import valid_text

CUT_MARK = "\n[cut here: {} more characters]"
MAX_CHARS_PER_TOKEN = (
    64  # A text with more characters per token of room is cut before it is encoded.
)

# Type of a column in a trajectory, by the code of its array.
DTYPES = {"b": np.bool_, "f": np.float32, "i": np.int32}


@dataclass(slots=True)
class Observations:
    """The observations of one episode, with counts of the changed ones."""

    num_repaired: int = 0
    num_cut: int = 0

    def fitted(
        self, text: str, encode: Callable[[str], list[int]], *, max_tokens: int
    ) -> list[int] | None:
        """Return the token ids of an observation or of its beginning; None if nothing of it fits.

        Args:
            encode: returns the ids of a text as part of the conversation, framing included. It is
                called again only for a text that is too long.
        """
        whole = valid_text(text)
        self.num_repaired += whole != text
        num_kept = min(len(whole), max(0, max_tokens) * MAX_CHARS_PER_TOKEN)
        if num_kept == len(whole) and len(ids := encode(whole)) <= max_tokens:
            return ids
        self.num_cut += 1
        while num_kept > 0:
            ids = encode(whole[:num_kept] + CUT_MARK.format(len(whole) - num_kept))
            if len(ids) <= max_tokens:
                return ids
            num_kept = min(num_kept - 1, num_kept * max_tokens // len(ids))
        return None


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
    """The tokens that the policy sampled for one turn."""

    token_ids: list[int]  # [num_sampled]
    logprobs: list[float]  # [num_sampled] nats, under the distribution that was sampled from
    versions: list[int]  # [num_sampled] version of the weights that sampled each token
    is_stopped: bool = True  # The turn ended with an end-of-turn token, the last of `token_ids`.
    num_prompt: int = 0  # Tokens of the prompt that the engine received.
    num_cached: int = 0  # Tokens of the prompt that were in the engine's prefix cache.
    # Seconds of the call spent waiting for other episodes or for new weights.
    waited_s: float = 0.0
    earlier_s: float = 0.0  # Seconds of a recorded turn's call; 0: this call sampled it.
    # [num_prompt + num_sampled - 1, layer, chosen] experts of each token but the last; None: the
    # engine records none.
    experts: np.ndarray | None = None

    @property
    def end(self) -> int | None:
        """The sampled token that ended the turn; None: the turn was cut."""
        return self.token_ids[-1] if self.is_stopped and self.token_ids else None


Ask = Callable[[], Awaitable[Turn]]  # Samples a turn of the policy for the current context.
Encode = Callable[[str], list[int]]


class Render(Protocol):
    """Encodes text to token ids and decodes them; `actor.formats.renderer.Renderer` is one."""

    def first_prompt(
        self, text: str, *, before: tuple[str, str] | None = None
    ) -> list[int]: ...  # `before`: an instruction and the agent's answer to it
    # `end`: the sampled token that ended the turn; None: the template's own
    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]: ...
    # `text`: the next message of the user's role
    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]: ...
    def action_text(self, token_ids: list[int]) -> str: ...


@runtime_checkable
class Forgetting(Protocol):
    """A renderer that can drop the thoughts of past answers."""

    def without_thoughts(
        self, shown: list[int], answer: list[int]
    ) -> tuple[list[int], list[int]]: ...


@runtime_checkable
class AnswerDependent(Protocol):
    """A renderer whose observations depend on the answer before them."""

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None, answer: list[int]
    ) -> list[int]: ...

    def called(self, token_ids: list[int]) -> str | None: ...


@runtime_checkable
class Conversing(Protocol):
    """A renderer of conversations that begin with several messages."""

    def opened(self, messages: list[dict[str, Any]], text: str) -> list[int]: ...


@dataclass(slots=True)
class Tape:
    """The token columns of an episode. Only `add` appends, so that the columns stay aligned.

    An episode may have 100,000 tokens. The arrays have 17 bytes for each token of the current
    segment. `restart` compresses those of the earlier segments, and `end` restores them.
    """

    token_ids: "array[int]" = field(default_factory=partial(array, "i"))
    loss_mask: "array[int]" = field(default_factory=partial(array, "b"))
    logprobs: "array[float]" = field(default_factory=partial(array, "f"))
    versions: "array[int]" = field(default_factory=partial(array, "i"))
    turn_ids: "array[int]" = field(default_factory=partial(array, "i"))
    # Compressed parts of each column before the arrays, and the number of their tokens.
    earlier: dict[str, list[bytes]] = field(
        default_factory=lambda: {name: [] for name in TOKEN_COLUMNS}
    )
    num_earlier: int = 0
    # Oldest version of each turn's sampled tokens.
    oldest_versions: "array[int]" = field(default_factory=partial(array, "i"))
    # Index of the first token of each segment.
    starts: list[int] = field(default_factory=lambda: [0])
    # Pairs (earlier segment, number of its first tokens), as in `Trajectory`.
    prefixes: list[int] = field(default_factory=list)
    # Triples (start, end, kind), as in `Trajectory`.
    asides: list[int] = field(default_factory=list)
    # Experts of the tokens that have a record, [layer, chosen], by the place of the token.
    experts: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray])

    @property
    def context(self) -> list[int]:
        """The policy's next prompt: the tokens of the current segment."""
        return self.token_ids[self.starts[-1] - self.num_earlier :].tolist()

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all segments."""
        return self.num_earlier + len(self.token_ids)

    @property
    def num_in_context(self) -> int:
        return self.num_tokens - self.starts[-1]

    def columns(self) -> dict[str, Any]:
        """Return the columns of all segments by name: arrays, as in `Trajectory`."""
        columns: dict[str, Any] = {}
        for name, earlier in self.earlier.items():
            column = getattr(self, name)
            values = b"".join([*map(zlib.decompress, earlier), column.tobytes()])
            columns[name] = np.frombuffer(values, DTYPES[column.typecode])
        return columns

    def restart(self, ids: list[int], turn: int) -> None:
        """Begin a new segment before a turn."""
        self.starts.append(self.num_tokens)
        self.num_earlier = self.num_tokens
        for name, parts in self.earlier.items():
            column = getattr(self, name)
            parts.append(zlib.compress(column.tobytes(), level=1))
            del column[:]
        self.observe(ids, turn)

    def _restore(self) -> None:
        """Put the columns of all segments into the arrays."""
        for name, column in self.columns().items():
            values = getattr(self, name)
            values[:] = array(values.typecode, column.tobytes())
            self.earlier[name].clear()
        self.num_earlier = 0

    def show(self, ids: list[int], turn: int) -> None:
        """Make `ids` the context: extend the segment that they continue, or begin a new one."""
        num_shown = self.num_in_context
        if not num_shown or self.context == ids[:num_shown]:
            self.observe(ids[num_shown:], turn)
        else:
            self.restart(ids, turn)

    def drop_unanswered(self) -> None:
        """Remove the last segment if it holds no sampled token and is not the only one."""
        cut = self.starts[-1]
        if cut and not any(self.loss_mask[cut:]):
            self.starts.pop()
            for name in TOKEN_COLUMNS:
                del getattr(self, name)[cut:]
            self.experts = {at: chosen for at, chosen in self.experts.items() if at < cut}
            while self.asides and self.asides[-2] > cut:
                del self.asides[-3:]

    def end(self, last_turn: int, *, keeps_next: bool = False) -> None:
        """Assign tokens after the last turn to that turn.

        Args:
            keeps_next: keep an unanswered segment, the prompt that would have followed.
        """
        self._restore()
        if not keeps_next:
            self.drop_unanswered()
        first = bisect_right(self.turn_ids, last_turn)  # The turns never decrease.
        self.turn_ids[first:] = array("i", [last_turn]) * (len(self.turn_ids) - first)

    def observe(self, ids: list[int], turn: int) -> None:
        """Append observed tokens."""
        self.add(Turn(ids, [0.0] * len(ids), [-1] * len(ids)), turn, is_sampled=False)

    def _note_version(self, version: int, turn: int) -> None:
        """Record the oldest version of a turn's sampled tokens."""
        while len(self.oldest_versions) <= turn:
            self.oldest_versions.append(version)
        self.oldest_versions[turn] = min(self.oldest_versions[turn], version)

    def add_aside(self, taken: Turn, turn: int, kind: Aside, *, is_learnt: bool) -> None:
        """Append an answer that is not sent to the environment."""
        start = self.num_tokens
        self.asides += [start, start + len(taken.token_ids), kind]
        if is_learnt:
            self.add(taken, turn)
        else:
            self.observe(taken.token_ids, turn)

    def record_experts(self, taken: Turn) -> None:
        """Record the experts of the context's tokens, which the engine chose for a turn.

        The first record of a token is kept: it was made when the token's successor was sampled.
        """
        if taken.experts is None:
            return
        start = self.starts[-1]
        rows = taken.experts[: self.num_in_context]
        missing = [at for at in range(len(rows)) if start + at not in self.experts]
        # Rows of a copy: those of the turn would keep the record of its whole context in memory.
        places = (start + at for at in missing)
        self.experts.update(zip(places, rows[missing], strict=True))

    def expert_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `expert_ids` and `expert_mask` of a trajectory, empty without records."""
        if not self.experts:
            return np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=bool)
        places = sorted(self.experts)
        mask = np.zeros(self.num_tokens, dtype=bool)
        mask[places] = True
        recorded = np.stack([self.experts[at] for at in places])
        ids = np.zeros((len(mask), *recorded.shape[1:]), dtype=recorded.dtype)
        ids[mask] = recorded
        return ids, mask

    def add(self, taken: Turn, turn: int, *, is_sampled: bool = True) -> None:
        """Append the tokens of an answer or an observation to every column."""
        num_tokens = len(taken.token_ids)
        if taken.experts is not None:
            chosen = taken.experts[self.num_in_context :][:num_tokens].copy()
            self.experts.update(enumerate(chosen, self.num_tokens))
        if is_sampled and num_tokens:
            self._note_version(min(taken.versions), turn)
        self.token_ids.extend(taken.token_ids)
        self.loss_mask.extend(array("b", [is_sampled]) * num_tokens)
        self.logprobs.extend(taken.logprobs)
        self.versions.extend(taken.versions)
        self.turn_ids.extend(array("i", [turn]) * num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The context limit of a policy, and the options for episodes that exceed it."""

    max_tokens: int  # Context limit: tokens of prompt and answer together.
    turn_tokens: int  # Maximum number of tokens that one turn samples.
    options: AgentOptions = field(default_factory=AgentOptions)


@dataclass(slots=True)
class Step:
    """An answer, and the tokens that follow it up to the next answer."""

    answer: list[int]
    shown: list[int]

    @property
    def ids(self) -> list[int]:
        return [*self.answer, *self.shown]


class History:
    """The context of one episode. The episode loop reports each event in order.

    Example (window of 1 turn): `begin` shows page p. After action a, observation o does not fit:
    `go_on` starts a new segment with p, "[turns that followed are left out here]", a and o.
    """

    def __init__(self, render: Render, room: Room) -> None:
        """Create an empty history. `render` encodes its observations."""
        self.tape = Tape()
        self.observations = Observations()
        self._render = render
        self._room = room
        self._kind = room.options.context
        self._request = room.options.summary_request or REQUEST
        self._half = room.max_tokens // 2  # Maximum number of tokens of one observation.
        reserved = 0
        if self._kind is ContextKind.SUMMARY:  # The request for a summary must always fit.
            reserved = _room_of_summary(render, self._request, room.turn_tokens)
        self._widest = room.max_tokens - room.turn_tokens - reserved
        # Longest prompt of the next turn, without room for a plan or reflection.
        self.max_prompt = self._widest
        self._keeps = room.options.keep_thinking
        self._page: list[int] = []  # Tokens of the segment before its first answer.
        self._turns: list[Step] = []  # Turns of the current segment.
        self._first: tuple[str, Callable[[str, str], list[int]]] = "", lambda _, __: []
        self._aside_tokens = 0
        if room.options.plan or room.options.reflects:
            self._aside_tokens = room_of_aside(render, room.turn_tokens)
        self._demand = ""  # Text that is appended to the current observation.

    @property
    def first_room(self) -> int:
        """Maximum number of tokens of the first prompt."""
        return self._widest - self._room.options.plan * self._aside_tokens

    def demanding(self, encode: Encode) -> Encode:
        """Return the encoder of the first message, with the request for a plan if it is due."""
        return partial(_ending, encode, PLAN if self._room.options.plan else "")

    async def begin(self, text: str, encode: Encode, ask: Ask) -> bool:
        """Show the first message, cut to its room; return False if not even a part of it fits.

        With `options.plan`, the policy is asked for a plan here. The plan follows the first message
        in all segments.
        """
        does_plan = self._room.options.plan
        self.max_prompt = self.first_room
        demanded = self.demanding(encode)
        self._first = text, lambda cut, end: encode(cut + end)
        ids = self.observations.fitted(text, demanded, max_tokens=self.max_prompt)
        self._page = ids or []
        self.tape.observe(self._page, 0)
        if ids is None or not does_plan:
            return ids is not None
        plan = await self._think(Aside.PLAN, 0, ask)
        self._first = text, partial(self._planned, demanded, plan)
        return True

    def is_own(self, action: str) -> bool:
        """Return whether an action has a form that `takes` handles."""
        return False

    def takes(self, action: str, taken: Turn, turn: int) -> bool:
        """Return whether the history consumed the action.

        A consumed action is not sent to the environment.

        Args:
            action: the text of `taken`, the last entry of the tape.
            turn: the turn that `taken` is a part of.
        """
        return False

    async def go_on(
        self, observation: str, taken: Turn, turn: int, ask: Ask, *, reflects: bool = False
    ) -> bool:
        """Show the observation that follows an action; return False if it does not fit.

        Args:
            taken: the action before the observation, the last entry of the tape.
            turn: the next turn.
            ask: samples a turn of the policy on the tape's context.
            reflects: ask the policy for a reflection before that turn.
        """
        self._expect(reflects)
        if not self._extend(observation, taken, turn):
            if self._kind is not ContextKind.SUMMARY:
                return False
            if not await self._start_summary(observation, taken, turn, ask):
                return False
        if reflects:
            start = self.tape.num_in_context
            await self._think(Aside.REFLECTION, turn, ask)
            if self._turns:
                self._turns[-1].shown += self.tape.context[start:]
        return True

    def last(self, observation: str, taken: Turn, turn: int, *, reflects: bool = False) -> None:
        """Show the observation after the last turn as the next prompt would, as far as it fits.

        A critic reads the value of the episode's end there, so the prompt has a form that is
        trained. Cuts and repairs of the observation are not counted.
        """
        is_tried = bool(self._turns) and self._turns[-1].answer is taken.token_ids
        if not is_tried and self._shows(observation, taken, turn, reflects=reflects):
            return
        context = self.tape.context
        if self._keeps is not KeepThinking.ALL:
            before = [each for each in self._turns if each.answer is not taken.token_ids]
            context = self._without_thoughts(self._page, [*before, Step(taken.token_ids, [])])
        room = min(self._room.max_tokens - len(context), self._half)
        ids = self._fitted_again(observation, taken, room=room)
        if ids is not None:
            self.tape.show([*context, *ids], turn)

    def _shows(self, observation: str, taken: Turn, turn: int, *, reflects: bool) -> bool:
        """Show an observation without counting it; return False if it does not fit."""
        self._expect(reflects)
        counted = self.observations
        self.observations = Observations()
        is_shown = self._extend(observation, taken, turn)
        self.observations = counted
        return is_shown

    def _expect(self, reflects: bool) -> None:
        """Set the limit and the ending of the next observation."""
        self.max_prompt = self._widest - reflects * self._aside_tokens
        self._demand = REFLECT if reflects else ""

    def _extend(self, observation: str, taken: Turn, turn: int) -> bool:
        """Append the observation, or slide the window; False if the context is full."""
        encode = self._answering(taken)
        ids = self.observations.fitted(observation, encode, max_tokens=self._half)
        if ids is None:
            self._turns.clear()
        else:
            self._turns.append(Step(taken.token_ids, ids))
            if self._keeps is not KeepThinking.ALL:
                context = self._without_thoughts(self._page, self._turns)
                if len(context) <= self.max_prompt:
                    self.tape.show(context, turn)
                    return True
            elif self.tape.num_in_context + len(ids) <= self.max_prompt:
                self.tape.observe(ids, turn)
                return True
        return self._kind is ContextKind.WINDOW and self._slide(observation, taken, turn)

    async def _think(self, kind: Aside, turn: int, ask: Ask) -> Turn:
        """Sample a plan or a reflection, then ask for an action; the environment gets neither."""
        options = self._room.options
        is_plan = kind is Aside.PLAN
        taken = await ask()
        is_learnt = options.learn_plans if is_plan else options.learn_reflections
        self.tape.add_aside(taken, turn, kind, is_learnt=is_learnt)
        self.tape.observe(self._after(taken, GO), turn)
        return taken

    def _after(self, taken: Turn, text: str) -> list[int]:
        """Return the ids between an answer and the next one, with a message of the user's role."""
        return self._render.after_turn(text, is_stopped=taken.is_stopped, end=taken.end)

    def _planned(self, demanded: Encode, plan: Turn, cut: str, end: str) -> list[int]:
        """Return the first message followed by the plan's sampled tokens."""
        go = self._after(plan, GO + end)
        return [*demanded(cut), *plan.token_ids, *go]

    def _answering(self, taken: Turn | None, called: Turn | None = None) -> Encode:
        """Return the encoder of an observation, with the request for a reflection if it is due.

        Args:
            taken, called: as in `observing`.
        """
        return partial(_ending, observing(self._render, taken, called), self._demand)

    def _without_thoughts(self, page: list[int], steps: Sequence[Step]) -> list[int]:
        """Return a context in which past answers have only the thoughts that are kept."""
        num_kept = 1 if self._keeps is KeepThinking.LAST else 0
        forgets = self._render if isinstance(self._render, Forgetting) else None
        shown = page
        context: list[int] = []
        for number, step in enumerate(steps):
            answer = step.answer
            if forgets is not None and number < len(steps) - num_kept:
                shown, answer = forgets.without_thoughts(shown, answer)
            context += [*shown, *answer]
            shown = step.shown
        return [*context, *shown]

    def _slide(self, observation: str, taken: Turn, turn: int) -> bool:
        """Start a segment with the first message and the newest turns; False if it does not fit."""
        first = self._first_again(LEFT_OUT, self.max_prompt // 2)
        if first is None:
            return False
        room = self.max_prompt - len(first)
        latest: list[Step] = []  # Newest first.
        for step in reversed(self._turns[-self._room.options.context_turns :]):
            if len(step.ids) > room:
                break
            latest.append(step)
            room -= len(step.ids)
        if not latest:  # The action is dropped, so an empty assistant turn replaces it.
            ids = self._fitted_again(observation, None, room=room, called=taken)
            if ids is None:
                return False
            latest.append(Step([], ids))
        self._turns = latest[::-1]
        self._page = first
        self.tape.restart(self._without_thoughts(first, self._turns), turn)
        return True

    async def _start_summary(self, observation: str, taken: Turn, turn: int, ask: Ask) -> bool:
        """Sample a summary and start a segment with it; False if it does not fit."""
        room = self.max_prompt - self._room.turn_tokens  # Room that the longest summary leaves.
        first = self._first_again(f"\n\n{self._request}", room // 2)
        ids = self._fitted_again(observation, None, room=room // 2, called=taken)
        if first is None or ids is None:
            return False  # Checked first: a summary is useless if no turn can follow it.
        self.tape.observe(self._after(taken, self._request), turn)
        summary = await ask()
        learns = self._room.options.learn_summaries
        self.tape.add_aside(summary, turn, Aside.SUMMARY, is_learnt=learns)
        room = min(self.max_prompt - len(first) - len(summary.token_ids), self._half)
        ids = self._fitted_again(observation, summary, room=room, called=taken)
        assert ids is not None  # The check above used a smaller room.
        self._turns.clear()
        self.tape.restart([*first, *summary.token_ids, *ids], turn)
        return True

    def _first_again(self, end: str, max_tokens: int) -> list[int] | None:
        """Return the first message, cut to its room and followed by `end`; None if none fits."""
        text, encode = self._first
        return Observations().fitted(text, lambda cut: encode(cut, end), max_tokens=max_tokens)

    def _fitted_again(
        self, observation: str, taken: Turn | None, *, room: int, called: Turn | None = None
    ) -> list[int] | None:
        """Return an observation for a new segment. A cut is not counted a second time.

        Args:
            taken, called: as in `observing`.
        """
        encode = self._answering(taken, called)
        return Observations().fitted(observation, encode, max_tokens=room)


def observing(render: Render, taken: Turn | None, called: Turn | None = None) -> Encode:
    """Return the encoder of an observation that follows an answer; None: an empty one.

    Args:
        called: the answer whose tool the observation belongs to; None: the same answer.
    """
    called = called or taken
    is_stopped = taken is not None and taken.is_stopped
    end = None if taken is None else taken.end
    if called is None or not _depends_on_answers(type(render)):
        return partial(render.after_action, is_stopped=is_stopped, end=end)
    after_answer = cast(AnswerDependent, render).after_action
    return partial(after_answer, is_stopped=is_stopped, end=end, answer=called.token_ids)


@cache  # The check of a protocol is slow.
def _depends_on_answers(kind: type) -> bool:
    """Return whether a renderer's observations depend on the answer before them."""
    return issubclass(kind, AnswerDependent)


def _ending(encode: Encode, end: str, text: str) -> list[int]:
    """Return the encoder of an observation to which `end` is appended."""
    return encode(text + end)


def least_prompt(render: Render, options: AgentOptions, turn_tokens: int) -> int:
    """Return the smallest limit of prompt tokens under which every episode can continue."""
    cut = f"x{CUT_MARK.format(10**6)}"
    thought = room_of_aside(render, turn_tokens)
    request = options.summary_request or REQUEST
    is_window = options.context is ContextKind.WINDOW
    begins = len(render.first_prompt(cut + PLAN * options.plan)) + thought * options.plan
    if options.context not in (ContextKind.WINDOW, ContextKind.SUMMARY):
        return begins
    end = LEFT_OUT if is_window else f"\n\n{request}"
    first = len(render.first_prompt(cut + PLAN * options.plan + end)) + thought * options.plan
    answer = len(render.after_action(cut + REFLECT * options.reflects, is_stopped=False))
    again = 2 * max(first, answer) + thought * options.reflects
    if not is_window:
        reserved = _room_of_summary(render, request, turn_tokens)
        again = again + turn_tokens + reserved
        begins = begins + reserved
    return max(begins, again)


def _room_of_summary(render: Render, request: str, turn_tokens: int) -> int:
    """Return the maximum tokens of the request for a summary and the summary together."""
    return len(render.after_turn(request, is_stopped=False)) + turn_tokens


def room_of_aside(render: Render, turn_tokens: int) -> int:
    """Return the maximum tokens of a plan or a reflection and the request to act together."""
    return len(render.after_turn(GO, is_stopped=False)) + turn_tokens
