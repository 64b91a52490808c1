"""One episode: ask the policy, step the environment, until it ends, and write down every token."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol

import numpy as np

from actor.rollout.env_client import Hint, StepResult
from actor.rollout.observations import Observations
from common.config.curriculum import HorizonUnit
from common.errors import EnvError, EnvTimeout, HubLost
from common.states import state_number
from common.text import valid_text
from common.wire.messages import EndReason, Lease, Trajectory


class ContextFull(Exception):
    """Raised by an act: the conversation has outgrown the policy's context."""


class PolicyFailed(Exception):
    """Raised by an act: no answer from a policy that others run. Says nothing about the policy."""


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


class Session(Protocol):
    """One episode of an environment; `actor.rollout.env_client.HubSession` is one."""

    first_observation: str
    first_state: str  # as in `StepResult.state`

    async def step(self, action: str) -> StepResult: ...
    async def hint(self) -> Hint: ...
    async def close(self) -> None: ...


class Render(Protocol):
    """Text to token ids and back; `actor.rollout.render.Renderer` is one."""

    def first_prompt(
        self, text: str, *, before: tuple[str, str] | None = None
    ) -> list[int]: ...  # `before`: an instruction and the agent's answer to it
    def after_action(self, text: str, *, is_stopped: bool) -> list[int]: ...
    def action_text(self, token_ids: list[int]) -> str: ...


Act = Callable[[list[int], Session], Awaitable[Turn]]  # whole conversation so far -> one turn
OpenSession = Callable[[], Awaitable[Session]]


@dataclass(slots=True)
class _Tape:
    """The growing sequence. One place appends, so the columns cannot fall out of step."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    turn_ids: list[int] = field(default_factory=list)

    def observe(self, ids: list[int], turn: int) -> None:
        self.add(Turn(ids, [0.0] * len(ids), [-1] * len(ids)), turn, is_sampled=False)

    def add(self, taken: Turn, turn: int, *, is_sampled: bool = True) -> None:
        num_tokens = len(taken.token_ids)
        self.token_ids += taken.token_ids
        self.loss_mask += [is_sampled] * num_tokens
        self.logprobs += taken.logprobs
        self.versions += taken.versions
        self.turn_ids += [turn] * num_tokens


@dataclass(slots=True)
class _Play:
    keeps_last: bool
    tape: _Tape = field(default_factory=_Tape)
    observations: Observations = field(default_factory=Observations)
    end: EndReason = EndReason.HORIZON
    error: str = ""
    reward: float = 0.0
    is_success: bool = False
    num_turns: int = 0
    invalid_turns: list[bool] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # that each turn was taken in
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    generate_s: float = 0.0
    env_s: float = 0.0
    turns_s: float = 0.0  # what its turns took, without waiting for others
    num_sampled: int = 0

    def may_go_on(self, lease: Lease, turn_tokens: int) -> bool:
        """Return whether the horizon lets a further turn begin."""
        if self.num_turns >= (lease.max_turns or lease.horizon):
            return False
        match lease.horizon_unit:
            case HorizonUnit.TURNS:
                return True
            case HorizonUnit.TOKENS:
                return self.num_sampled + turn_tokens <= lease.horizon
            case HorizonUnit.SECONDS:
                return self.turns_s < lease.horizon


def first_text(instruction: str, observation: str) -> str:
    """Return the text of the first turn; an instruction may be "" for none."""
    return f"{instruction}\n\n{observation}" if instruction else observation


def _opening(
    render: Render, session: Session, instruction: str, acknowledgement: str
) -> tuple[str, Callable[[str], list[int]]]:
    """Return the message that the observation is in, and how it is encoded with those before."""
    if acknowledgement:
        before = instruction, acknowledgement
        return session.first_observation, partial(render.first_prompt, before=before)
    return first_text(instruction, session.first_observation), render.first_prompt


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
) -> Trajectory:
    """Play the leased episode to its end and return it. One turn is played at any horizon.

    A failure of the environment or of a policy that others run, or the lease's deadline, ends the
    episode and is recorded on it with its reason, never as a reward. All else propagates.

    Args:
        act: maps the conversation's token ids to the next turn.
        instruction: before the first observation; apart from it if there is an `acknowledgement`.
        max_tokens: context limit; an episode that could exceed it in its next turn ends there,
            and observations are cut to it (`actor.rollout.observations`).
        turn_tokens: most tokens that one turn may sample.
        may_repeat: the caller plays it again if its hub is gone, so that it is no failure.
        keeps_last: of an episode that is cut short take up the last observation, for a critic.

    Raises: HubLost: if `may_repeat`.
    """
    started, play = time.monotonic(), _Play(keeps_last=keeps_last)
    session: Session | None = None
    try:
        async with asyncio.timeout(lease.deadline_s) as deadline:
            session = await open_session()
            text, encode = _opening(render, session, instruction, acknowledgement)
            play.env_s, max_prompt = time.monotonic() - started, max_tokens - turn_tokens
            ids = play.observations.fitted(text, encode, max_tokens=max_prompt)
            if ids is None:
                raise ContextFull(f"not even the first page's beginning fits into {max_prompt}")
            play.tape.observe(ids, 0)
            await _turns(lease, session, play, act, render, max_tokens, max_prompt)
    except ContextFull:
        play.end = EndReason.CONTEXT_FULL
    except PolicyFailed as error:
        play.end, play.error = EndReason.ABORTED, str(error)
    except EnvTimeout as error:
        play.end, play.error = EndReason.ENV_TIMEOUT, str(error)
    except EnvError as error:
        if may_repeat and isinstance(error, HubLost):
            raise
        play.end, play.error = EndReason.ENV_ERROR, str(error)
    except TimeoutError:
        if not deadline.expired():  # the engine's, not the lease's
            raise
        play.end, play.error = EndReason.DEADLINE, f"not ended within {lease.deadline_s:g}s"
    finally:
        if session is not None:
            await session.close()
    return _trajectory(lease, play, actor=actor, wall_s=time.monotonic() - started)


async def _turns(
    lease: Lease,
    session: Session,
    play: _Play,
    act: Act,
    render: Render,
    max_tokens: int,
    max_prompt: int,
) -> None:
    play.states.append(state_number(session.first_state or session.first_observation))
    for turn in count():
        asked = time.monotonic()
        taken = await act(play.tape.token_ids, session)
        answered = time.monotonic()
        play.tape.add(taken, turn)
        result = await session.step(render.action_text(taken.token_ids))
        play.generate_s += answered - asked
        ended = time.monotonic()
        play.env_s += ended - answered
        play.turns_s += max(0.0, ended - asked - taken.waited_s)
        play.num_sampled += len(taken.token_ids)
        play.num_turns += 1
        play.num_prompt_tokens += taken.num_prompt
        play.num_cached_tokens += taken.num_cached
        play.invalid_turns.append(not result.is_valid)
        play.reward = result.reward
        play.scores.append(result.reward)
        play.states.append(state_number(result.state or result.observation))
        if result.done:
            play.end = EndReason.DONE
            play.is_success = result.is_success
            return
        encode = partial(render.after_action, is_stopped=taken.is_stopped)
        num_tokens = len(play.tape.token_ids)
        if play.may_go_on(lease, max_tokens - max_prompt):
            ids = play.observations.fitted(result.observation, encode, max_tokens=max_tokens // 2)
            if ids is not None and num_tokens + len(ids) <= max_prompt:
                play.tape.observe(ids, turn + 1)
                continue
            play.end = EndReason.CONTEXT_FULL
        if play.keeps_last:  # of no turn, and seen by no policy, so it is not counted as cut
            room = max_tokens - num_tokens
            last = Observations().fitted(result.observation, encode, max_tokens=room)
            play.tape.observe(last or [], turn)
        return


def _trajectory(lease: Lease, play: _Play, *, actor: str, wall_s: float) -> Trajectory:
    tape = play.tape
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
        num_cut_observations=play.observations.num_cut,
        num_repaired_texts=play.observations.num_repaired,
        generate_s=play.generate_s,
        env_s=play.env_s,
        wall_s=wall_s,
        token_ids=np.array(tape.token_ids, dtype=np.int32),
        loss_mask=np.array(tape.loss_mask, dtype=bool),
        logprobs=np.array(tape.logprobs, dtype=np.float32),
        versions=np.array(tape.versions, dtype=np.int32),
        turn_ids=np.array(tape.turn_ids, dtype=np.int32),
        invalid_turns=np.array(play.invalid_turns, dtype=bool),
        turn_scores=np.array(play.scores, dtype=np.float32),
        turn_states=np.array(play.states[: play.num_turns], dtype=np.int32),
    )
