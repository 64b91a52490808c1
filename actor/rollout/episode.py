"""Runs one episode: sample a turn, step the environment, and record every token until the end."""

import asyncio
import hashlib
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from actor.formats.tools import Read, explained, reader_of, rendering
from actor.rollout.context import Conversing, History, Render, Room, Turn
from actor.rollout.env_client import ExpertHint, HubStepResult
from actor.rollout.folding import history_of
from common.config.actor import AgentFormat, AgentOptions
from common.config.horizon import HorizonUnit
from common.errors import EnvError, EnvPaused, EnvTimeout, HubLost
from common.formats.answers import MARK, tools_instruction, worded
from common.segments import as_context
from common.text import valid_text
from common.wire.messages import EndReason, Lease, Trajectory


def state_number(text: str) -> int:
    """Return a hash of the environment's state text, or of the observation if there is none.

    It has 32 bits. Hashes are compared only within a group: among a hundred different states, two
    collide in one of a million groups.
    """
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=4).digest()
    return int.from_bytes(digest, "little", signed=True)


def action_number(action: str) -> int:
    """Return a hash of an action as it is sent to the environment, without surrounding space.

    The policy's reasoning before the action is not included. "" means an answer without an action.
    """
    return state_number(action.strip())


class ContextFull(Exception):
    """Raised by `Act`: the conversation exceeds the policy's context."""


class PolicyFailed(Exception):
    """Raised by `Act`: a remote policy gave no answer. It does not count against the policy."""


class EnvSession(Protocol):
    """One episode of an environment; `actor.rollout.env_client.HubSession` is one."""

    first_observation: str
    first_state: str  # See `HubStepResult.state`.
    start_score: float  # Score before the first step, in [0, 1].

    async def step(self, action: str) -> HubStepResult: ...
    async def hint(self) -> ExpertHint: ...
    async def close(self) -> None: ...


WHOLE = AgentOptions()
# (token ids of the conversation, session) -> the next turn
Act = Callable[[list[int], EnvSession], Awaitable[Turn]]
OpenSession = Callable[[], Awaitable[EnvSession]]
OnTokens = Callable[[Turn], None]  # Receives further tokens of a turn in progress.


class StreamingAct(Protocol):
    """Samples a turn as `Act` does, and may report its tokens as they are sampled.

    An error of `on_tokens` ends the turn, and propagates. The last tokens are not reported.
    """

    def __call__(
        self, ids: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Awaitable[Turn]: ...


@dataclass(slots=True)
class EpisodeState:
    """The state of a running episode."""

    keeps_last: bool
    history: History
    end: EndReason = EndReason.HORIZON
    error: str = ""
    reward: float = 0.0
    start_score: float = 0.0  # Score before the first turn.
    is_success: bool = False
    num_turns: int = 0
    # Arrays, as an episode may have 1,000 turns.
    invalid_turns: "array[int]" = field(default_factory=partial(array, "b"))
    scores: "array[float]" = field(default_factory=partial(array, "f"))
    # Hash of the state before each turn, and of its action.
    states: "array[int]" = field(default_factory=partial(array, "i"))
    actions: "array[int]" = field(default_factory=partial(array, "i"))
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    generate_s: float = 0.0
    env_s: float = 0.0
    turn_s: float = 0.0  # Seconds of the current turn, without waiting for other episodes.
    turns_s: float = 0.0  # Seconds of all completed turns.
    num_sampled: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # Those of the last step.
    facts: str = ""  # Those of the last step, as JSON.
    earlier_s: float = 0.0  # Seconds of the recorded turns and steps of an earlier attempt.

    async def ask(self, act: Act, session: EnvSession) -> Turn:
        """Sample a turn of the policy for the current context, and record its cost."""
        taken = await self.sample(act, session, self.history.tape.context)
        self.history.tape.record_experts(taken)
        return taken

    async def sample(self, act: Act, session: EnvSession, ids: list[int]) -> Turn:
        """Sample a turn of the policy for a prompt, and record its cost.

        The seconds of turns that are sampled at once add up.
        """
        asked = time.monotonic()
        taken = await act(ids, session)
        self.count(taken, time.monotonic() - asked)
        return taken

    def count(self, taken: Turn, took_s: float) -> None:
        """Record the cost of a sampled turn, whose call took these seconds."""
        took_s += taken.earlier_s
        self.earlier_s += taken.earlier_s
        self.generate_s += took_s
        self.turn_s += took_s - taken.waited_s
        self.num_sampled += len(taken.token_ids)
        self.num_prompt_tokens += taken.num_prompt
        self.num_cached_tokens += taken.num_cached

    def begin(self, session: EnvSession) -> None:
        """Record the environment's first state and its score."""
        self.states.append(state_number(session.first_state or session.first_observation))
        self.start_score = session.start_score
        self.reward = session.start_score

    def answered(
        self, action: str, result: HubStepResult, took_s: float, *, is_read: bool = True
    ) -> None:
        """Record an action and its result. `is_read`: an action could be parsed from the answer."""
        self.actions.append(action_number(action))
        self.env_s += took_s
        self.turns_s += max(0.0, self.turn_s + took_s)
        self.turn_s = 0.0
        self.num_turns += 1
        self.invalid_turns.append(not (result.is_valid and is_read))
        self.reward = result.reward
        self.metrics = result.metrics
        self.facts = result.facts
        self.scores.append(result.reward)
        self.states.append(state_number(result.state or result.observation))
        if result.done:
            self.end = EndReason.TRUNCATED if result.is_truncated else EndReason.DONE
            self.is_success = result.is_success

    def is_to_reflect(self, options: AgentOptions) -> bool:
        """Return whether the policy must reflect on the result of its last action."""
        every = options.reflect_every
        return bool(every and self.num_turns % every == 0) or (
            options.reflect_on_invalid and bool(self.invalid_turns[-1])
        )

    def may_go_on(self, lease: Lease, turn_tokens: int) -> bool:
        """Return whether the horizon allows another turn."""
        if self.num_turns >= (lease.max_turns or lease.horizon):
            return False
        match lease.horizon_unit:
            case HorizonUnit.TURNS:
                return True
            case HorizonUnit.TOKENS:
                return self.num_sampled + turn_tokens <= lease.horizon
            case HorizonUnit.SECONDS:
                return self.turns_s + self.turn_s < lease.horizon


def task_text(
    format: AgentFormat, instruction: str, *, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """Return the text before the first observation: tools of the session, task, answer format."""
    if tools:
        instruction = first_text(tools_instruction(tools), instruction)
    return worded(format, instruction)


def first_text(instruction: str, observation: str) -> str:
    """Return the text of the first turn. An empty `instruction` is left out."""
    return f"{instruction}\n\n{observation}" if instruction else observation


def opening(
    render: Render,
    observation: str,
    *,
    messages: list[dict[str, Any]],
    instruction: str,
    acknowledgement: str,
) -> tuple[str, Callable[[str], list[int]]]:
    """Return the message with the first observation, and its encoder.

    Args:
        messages: the messages before the first observation.
    """
    if messages and isinstance(render, Conversing):
        return first_text(instruction, observation), partial(_opened, render, messages)
    if acknowledgement:
        before = instruction, acknowledgement
        return observation, partial(render.first_prompt, before=before)
    return first_text(instruction, observation), render.first_prompt


def _opened(render: Conversing, messages: list[dict[str, Any]], text: str) -> list[int]:
    """Return the ids of an item's messages. Raises: EnvError: the chat template refuses them."""
    try:
        return render.opened(messages, text)
    except ValueError as error:
        raise EnvError(f"the item's messages cannot be shown: {error}") from error


async def run_episode(
    lease: Lease,
    *,
    open_session: OpenSession,
    act: Act,
    render: Render,
    instruction: str,
    acknowledgement: str = "",
    max_tokens: int,
    turn_tokens: int,
    actor: str,
    may_repeat: bool = False,
    keeps_last: bool = False,
    options: AgentOptions = WHOLE,
    on_turn: Callable[[EpisodeState], None] = lambda _: None,
) -> Trajectory:
    """Play the leased episode to its end and return it. It has at least one turn at any horizon.

    A failure of the environment or of a remote policy ends the episode, as does the lease's
    deadline. The trajectory records the reason, and the failure is never a reward. All other errors
    propagate.

    Args:
        act: maps the conversation's token ids to the next turn.
        instruction: text before the first observation; with an `acknowledgement`, a separate
            message.
        max_tokens: context limit; observations are cut to it. When the next turn could exceed it,
            the episode ends or continues with a smaller context, as `options` define.
        turn_tokens: maximum number of tokens that one turn samples.
        may_repeat: the caller replays the episode when its hub is lost, so that it is no failure.
        keeps_last: append the prompt after the last turn of an episode that is cut short, for a
            critic.
        on_turn: called after each turn that another one follows, when the context ends with the
            prompt of that turn.

    Raises: EnvPaused. HubLost: if `may_repeat`.
    """
    room = Room(max_tokens=max_tokens, turn_tokens=turn_tokens, options=options)
    task = task_text(options.format, instruction)
    read = reader_of(render, options.format, is_whole=MARK in instruction)
    started = time.monotonic()
    play = EpisodeState(keeps_last=keeps_last, history=history_of(render, room))
    session: EnvSession | None = None
    try:
        async with record_end_reason(play, lease, may_repeat=may_repeat):
            session = await open_session()
            if tools := getattr(session, "tools", []):
                render = rendering(render, lease.env, tools)
                task = task_text(options.format, instruction, tools=tools)
                read = reader_of(render, options.format, is_whole=False)
                play.history = history_of(render, room)
            play.begin(session)
            text, encode = opening(
                render,
                session.first_observation,
                messages=getattr(session, "first_messages", []),
                instruction=task,
                acknowledgement=acknowledgement,
            )
            play.env_s = time.monotonic() - started
            if not await play.history.begin(text, encode, partial(play.ask, act, session)):
                raise ContextFull(
                    "even the beginning of the first observation does not fit into the context"
                )
            await _turns(lease, session, play, act, read, room, render, on_turn)
    finally:
        if session is not None:
            await session.close()
    wall_s = time.monotonic() - started + play.earlier_s
    return trajectory_of(lease, play, actor=actor, wall_s=wall_s)


@asynccontextmanager
async def record_end_reason(
    play: EpisodeState, lease: Lease, *, may_repeat: bool
) -> AsyncIterator[None]:
    """Limit an episode to its lease's time, and record why it ended early.

    Raises:
        EnvPaused: the episode has no outcome, and is played again later.
        HubLost: if `may_repeat`. Errors that are unrelated to the episode propagate.
    """
    try:
        async with asyncio.timeout(lease.deadline_s) as deadline:
            yield
    except ContextFull as error:
        play.end = EndReason.CONTEXT_FULL
        is_sampled = play.history.tape.columns()["loss_mask"]
        if not is_sampled.any():  # The learner refuses it with this reason.
            play.error = f"{error}; raise actor.max_model_len"
    except PolicyFailed as error:
        play.end, play.error = EndReason.ABORTED, str(error)
    except EnvTimeout as error:
        play.end, play.error = EndReason.ENV_TIMEOUT, str(error)
    except EnvError as error:
        if isinstance(error, EnvPaused) or (may_repeat and isinstance(error, HubLost)):
            raise
        play.end, play.error = EndReason.ENV_ERROR, str(error)
    except TimeoutError:
        if not deadline.expired():  # The engine timed out, not the lease.
            raise
        play.end, play.error = (
            EndReason.DEADLINE,
            f"the episode did not end within {lease.deadline_s:g} s",
        )


async def _turns(
    lease: Lease,
    session: EnvSession,
    play: EpisodeState,
    act: Act,
    read: Read,
    room: Room,
    render: Render,
    on_turn: Callable[[EpisodeState], None],
) -> None:
    """Play the turns of an opened episode until it ends."""
    history = play.history
    ask = partial(play.ask, act, session)
    may_go_on = partial(play.may_go_on, lease)
    while True:
        taken, turn = await ask(), play.num_turns
        history.tape.add(taken, turn)
        text, action = read(taken.token_ids)
        if history.takes(text, taken, turn):
            if turn and not may_go_on(room.turn_tokens):  # An episode has at least one turn.
                break
            continue
        answered = time.monotonic()
        result = await session.step(action or "")  # The environment rejects an empty action.
        # A misplaced branch or return is sent to the environment and counts as invalid.
        is_read = action is not None and not history.is_own(text)
        took_s = time.monotonic() - answered + result.earlier_s
        play.earlier_s += result.earlier_s
        play.answered(action or "", result, took_s, is_read=is_read)
        reflects = play.is_to_reflect(room.options)
        is_accepted = action is not None and result.is_valid
        seen = result.observation if is_accepted else explained(render, taken.token_ids, result)
        if result.done:
            if result.is_truncated and play.keeps_last:
                history.last(seen, taken, turn, reflects=reflects)
            break
        if may_go_on(room.turn_tokens * (1 + reflects)):
            if await history.go_on(seen, taken, turn + 1, ask, reflects=reflects):
                if may_go_on(room.turn_tokens):
                    on_turn(play)
                    continue
                break  # The summary used up the rest of the horizon.
            play.end = EndReason.CONTEXT_FULL
        if play.keeps_last:  # No turn follows this observation, so the policy never receives it.
            history.last(seen, taken, turn, reflects=reflects)
        break
    history.tape.end(play.num_turns - 1, keeps_next=play.keeps_last)


def part_so_far(lease: Lease, play: EpisodeState, *, actor: str) -> Trajectory:
    """Return the turns so far of a running episode. The prompt of the next turn is its last one's.

    A summary or reflection in that prompt is context here: the next turn trains it. `wall_s` is 0:
    the time of the whole episode is that of its own trajectory.
    """
    part = trajectory_of(lease, play, actor=actor, wall_s=0.0)
    is_next = part.turn_ids >= play.num_turns
    columns = {name: getattr(part, name) for name in ("loss_mask", "logprobs", "versions")}
    as_prompt = as_context(columns)
    return replace(
        part,
        end_reason=EndReason.UNFINISHED,
        is_success=False,
        turn_ids=np.minimum(part.turn_ids, play.num_turns - 1),
        **{name: np.where(is_next, as_prompt[name], column) for name, column in columns.items()},
    )


def trajectory_of(lease: Lease, play: EpisodeState, *, actor: str, wall_s: float) -> Trajectory:
    """Return the trajectory of an episode that has ended."""
    tape = play.history.tape
    observations = play.history.observations
    expert_ids, expert_mask = tape.expert_columns()
    return Trajectory(
        **lease.identity(),
        actor=actor,
        end_reason=play.end,
        error=valid_text(play.error)[:1_000],
        reward=0.0 if play.end.is_infrastructure_failure else play.reward,
        is_success=play.is_success,
        num_turns=play.num_turns,
        num_invalid_actions=sum(play.invalid_turns),
        num_prompt_tokens=play.num_prompt_tokens,
        num_cached_tokens=play.num_cached_tokens,
        num_cut_observations=observations.num_cut,
        num_repaired_texts=observations.num_repaired,
        generate_s=play.generate_s,
        env_s=play.env_s,
        wall_s=wall_s,
        **tape.columns(),
        invalid_turns=np.array(play.invalid_turns, dtype=bool),
        turn_scores=np.array(play.scores, dtype=np.float32),
        start_score=play.start_score,
        metrics={} if play.end.is_infrastructure_failure else play.metrics,
        facts="" if play.end.is_infrastructure_failure else play.facts,
        turn_states=np.array(play.states[: play.num_turns], dtype=np.int32),
        turn_actions=np.array(play.actions, dtype=np.int32),
        segment_starts=np.array(tape.starts if len(tape.starts) > 1 else [], dtype=np.int32),
        segment_prefixes=np.array(tape.prefixes if any(tape.prefixes[1::2]) else [], np.int32),
        asides=np.array(tape.asides, dtype=np.int32),
        expert_ids=expert_ids,
        expert_mask=expert_mask,
    )
