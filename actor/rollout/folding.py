"""Branches: the policy works on a subtask in a separate context, of which only the result is kept.

`<branch>subtask</branch>` opens a branch and `<return>result</return>` closes it. The environment
receives neither. In a branch the context is

fold      the caller's context, followed by the branch's turns
subagent  the first message, the call and the latest observation, followed by the branch's turns

After the branch a new segment holds the caller's context, the call, the returned result and the
latest observation, all with their sampled token ids. Branches do not nest. A branch has at least
one turn of the environment and at most `actor.branch_turns`; it is ended when it reaches that limit
or its context is full. A misplaced call or return is an ordinary action, which the environment
should refuse.

Source: context folding (arXiv 2510.11967), whose branch and return are tool calls. Here a branch of
`fold` stays in the caller's training row, since nothing of that context was removed yet.
"""

from dataclasses import dataclass

from actor.rollout.context import (
    CUT_MARK,
    LEFT_OUT,
    Ask,
    Encode,
    History,
    Render,
    Room,
    Turn,
    observing,
)
from common.config.actor import AgentOptions, ContextKind
from common.segments import Aside

HOW = (
    "\n\nYou may work on a part of the task in a branch: answer <branch>what is to be done</branch>"
    " to begin it, act, and answer <return>what came of it</return>. Only that will be kept."
)
OPENED = "[the branch begins]"
CLOSED = "[turns of the branch are left out here]"
ENDED = "[the branch was ended without a return]\n"
CALL = "branch"
RETURN = "return"


@dataclass(slots=True)
class _Call:
    """The action that opened a branch."""

    ids: list[int]  # The caller's context, including the call.
    taken: Turn
    num_turns: int = 0  # Turns of the branch that the environment has answered.


class Folding(History):
    """The history of a policy that may open branches.

    Example (fold): the page p, the call c, then action a with observation o, the return r. Rows:
    [p c "[the branch begins]" a o r], [p c "[turns ... are left out here]" r o ...].
    """

    def __init__(self, render: Render, room: Room) -> None:
        super().__init__(render, room)
        self._how = room.options.branch_instruction or HOW
        self._most = room.options.branch_turns
        self._call: _Call | None = None
        self._latest = ""  # Latest observation; "" if it is part of the first message.

    async def begin(self, text: str, encode: Encode, ask: Ask) -> bool:
        return await super().begin(text, lambda cut: encode(cut + self._how), ask)

    def is_own(self, action: str) -> bool:
        return _has_block(action, CALL) or _has_block(action, RETURN)

    def takes(self, action: str, taken: Turn, turn: int) -> bool:
        """Open or close a branch if the action is a call or a return; return whether it did."""
        is_call = _has_block(action, CALL)
        is_return = _has_block(action, RETURN)
        end = self.tape.num_tokens
        is_closing = self._call is not None
        if self._call is None:
            is_taken = is_call and not is_return and self._open(taken, turn)
        elif is_taken := is_return and not is_call and self._call.num_turns > 0:
            self._close(turn, taken)
        if is_taken:
            kind = Aside.RETURN if is_closing else Aside.BRANCH
            self.tape.asides += [end - len(taken.token_ids), end, kind]
        return is_taken

    async def go_on(
        self, observation: str, taken: Turn, turn: int, ask: Ask, *, reflects: bool = False
    ) -> bool:
        self._latest = observation
        if self._call is None:
            return await super().go_on(observation, taken, turn, ask)
        self._call.num_turns += 1
        is_last = self._call.num_turns >= self._most
        if is_last or not await super().go_on(observation, taken, turn, ask):
            self._close(turn)
        return True

    def last(self, observation: str, taken: Turn, turn: int, *, reflects: bool = False) -> None:
        self._latest = observation
        if self._call is None:
            super().last(observation, taken, turn, reflects=reflects)
            return
        is_last = self._call.num_turns + 1 >= self._most
        if is_last or not self._shows(observation, taken, turn, reflects=reflects):
            self._close(turn)

    def _open(self, taken: Turn, turn: int) -> bool:
        """Begin a branch if it fits, and the segment after it as well."""
        call = _Call(self.tape.context, taken)
        # Tokens to keep free for the segment after the branch.
        reserved = self._room.turn_tokens + _least(self._render, taken)
        if len(call.ids) + reserved > self.max_prompt:
            return False
        if self._kind is ContextKind.FOLD:
            self.tape.observe(observing(self._render, taken)(OPENED), turn)
        else:
            first = self._first_again(LEFT_OUT, self.max_prompt // 2)
            room = self.max_prompt - len(first or []) - len(taken.token_ids)
            text = f"{OPENED}\n{self._latest}" if self._latest else OPENED
            ids = self._fitted_again(text, taken, room=room)
            if first is None or ids is None:
                return False
            self.tape.restart([*first, *taken.token_ids, *ids], turn)
        self._call = call
        return True

    def _close(self, turn: int, returned: Turn | None = None) -> None:
        """Continue in the caller's context. `returned` is None if the branch was ended."""
        assert self._call is not None
        call = self._call
        self._call = None
        context = None if returned is None else self._with_return(call, returned)
        if context is None:
            observed = self._after(call.ids, ENDED + self._latest, call.taken)
            assert observed is not None  # `_open` reserved the room.
            context = observed
        self.tape.restart(context, turn)

    def _with_return(self, call: _Call, returned: Turn) -> list[int] | None:
        """Return the caller's context with a branch's result, None if it does not fit."""
        note = observing(self._render, call.taken)(CLOSED)
        return self._after([*call.ids, *note, *returned.token_ids], self._latest, returned)

    def _after(self, ids: list[int], text: str, taken: Turn) -> list[int] | None:
        """Return a context followed by the observation that fits behind it; None: none fits."""
        observed = self._fitted_again(text, taken, room=self.max_prompt - len(ids))
        return None if observed is None else [*ids, *observed]


def _has_block(action: str, tag: str) -> bool:
    """Return whether an action contains a complete block of a tag with some content."""
    _, _, rest = action.partition(f"<{tag}>")
    inner, closed, _ = rest.partition(f"</{tag}>")
    return bool(closed and inner.strip())


def history_of(render: Render, room: Room) -> History:
    """Return an empty history of the class that the options require."""
    return (Folding if room.options.has_branches else History)(render, room)


def least_of_branches(render: Render, options: AgentOptions, turn_tokens: int) -> int:
    """Return the smallest prompt limit, in tokens, for a branch and its return; 0: no branches."""
    if not options.has_branches:
        return 0
    instruction = options.branch_instruction or HOW
    first = len(render.first_prompt(f"x{CUT_MARK.format(10**6)}{LEFT_OUT}{instruction}"))
    return 2 * (first + turn_tokens) + _least(render)


def _least(render: Render, taken: Turn | None = None) -> int:
    """Return the tokens of the notes on a branch and of the shortest observation after it.

    Args:
        taken: the answer that opens the branch.
    """
    encode = observing(render, None, taken)
    return len(encode(CLOSED)) + len(encode(f"{ENDED}x{CUT_MARK.format(10**6)}"))
