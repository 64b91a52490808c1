"""One episode whose agent is a program: it asks for answers and acts, and all of it is captured."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from actor.agents.requests import ApiError, Asked, Message
from actor.rollout.context import Turn
from actor.rollout.env_client import StepResult
from actor.rollout.episode import Act, ContextFull, Play, PolicyFailed, Session, first_text
from actor.rollout.render import Renderer
from common.errors import EnvError, LongstrideError
from common.states import state_number
from common.wire.messages import EndReason, Lease

logger = logging.getLogger(__name__)

Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent is told that the policy said."""

    text: str
    is_stopped: bool  # False: cut at the limit of tokens
    num_prompt: int
    num_sampled: int


class AgentEpisode:
    """What an agent's key opens: the policy, on any history it likes, and the environment.

    The prompt of an answer is encoded once. Where it goes on from the segment's own tokens, these
    are kept as they were sampled; a history that was rewritten begins a new segment. One answer or
    step at a time: an agent that asks for several at once gets them one after the other.

    Example: the agent asks with [user p], is told "a", steps with "a", asks with [user p,
    assistant "a", user o]: one segment. It asks with [user "in short: ..."]: a second one.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        session: Session,
        act: Act,
        play: Play,
        renderer: Renderer,
        room: tuple[int, int],  # most tokens of prompt and answer, and of an answer
        task: tuple[str, str],  # the environment's instruction, the agent's answer to it or ""
    ) -> None:
        """Make one whose agent has not asked for anything; `play` is what becomes known of it."""
        self.key = secrets.token_urlsafe(24)
        self.ended = asyncio.Event()  # nothing more is answered
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False  # the environment, or the horizon, says so
        self.is_taken = False  # by an agent
        self.is_full = False  # what was asked for last had no room
        self.refused: Counter[str] = Counter()  # requests, by the error's code
        self._lease, self._session, self._act = lease, session, act
        self._play, self._renderer = play, renderer
        self._max_tokens, self._turn_tokens = room
        self._task = task
        self._said: list[Message] = []  # the conversation of this segment, as the agent knows it
        self._is_stopped = True  # its last answer is
        self._is_left = False  # by its agent
        self._complaint = ""  # of an agent that gave up
        self._turn = asyncio.Lock()
        play.states.append(state_number(session.first_state or session.first_observation))

    def first(self) -> dict[str, object]:
        """Return what the agent is to do: the messages that our own loop would begin with."""
        instruction, acknowledgement = self._task
        observation = self._session.first_observation
        messages = [{"role": "user", "content": first_text(instruction, observation)}]
        if acknowledgement:
            messages = [
                {"role": "user", "content": instruction},
                {"role": "assistant", "content": acknowledgement},
                {"role": "user", "content": observation},
            ]
        told = {"observation": observation, "instruction": instruction, "messages": messages}
        return {**told, "env": self._lease.env, "item_id": self._lease.item_id}

    async def answer(self, asked: Asked) -> Answer:
        """Return the policy's answer. Raises: ApiError."""
        async with self._turn:
            self._check_open()
            if self.has_sampled and not self._play.may_go_on(self._lease, self._turn_tokens):
                self.is_over = True  # what it asked for without a step took the horizon
                self.ended.set()
                self._check_open()
            ids = self._prompt_of(asked)
            tape, turn = self._play.history.tape, self._play.num_turns
            self.is_full = len(ids) + self._turn_tokens > self._max_tokens
            if self.is_full:
                text = f"{len(ids)} tokens and {self._turn_tokens} of an answer; the maximum"
                told = f"{text} context length is {self._max_tokens}"
                raise ApiError(400, "context_length_exceeded", told, "messages")
            tape.show(ids, turn)
            taken = _cut(await self._guarded(self._play.ask(self._act, self._session)), asked)
            self._check_open()  # its agent may have gone meanwhile: the books are closed
            tape.add(taken, turn)
            text = self._renderer.action_text(taken.token_ids)
            self._said = []
            if asked.messages is not None:
                self._said = [*asked.messages, {"role": "assistant", "content": text}]
            self._is_stopped = taken.is_stopped
            num_sampled = len(taken.token_ids)
            return Answer(
                text=text, is_stopped=taken.is_stopped, num_prompt=len(ids), num_sampled=num_sampled
            )

    async def step(self, action: str) -> dict[str, object]:
        """Act in the environment; return what came of it. Raises: ApiError."""
        async with self._turn:
            self._check_open()
            started = time.monotonic()
            result: StepResult = await self._guarded(self._session.step(action))
            self._play.answered(result, time.monotonic() - started)
            is_cut = not result.done and not self._play.may_go_on(self._lease, self._turn_tokens)
            if result.done or is_cut:
                self.is_over = True
                self.ended.set()
            return {
                **{"observation": result.observation, "reward": result.reward},
                **{"done": result.done, "truncated": is_cut, "is_success": result.is_success},
            }

    async def end(self, complaint: str) -> None:
        """Take the agent's word that it does no more; a complaint says why it could not."""
        async with self._turn:
            self._check_open()
            self._complaint = complaint
            self.ended.set()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def is_closed(self) -> bool:
        """Whether it answers nothing any more."""
        return self.ended.is_set() or self.failed.done() or self._is_left

    @property
    def has_sampled(self) -> bool:
        """Whether the policy has said anything."""
        return any(self._play.history.tape.loss_mask)

    def leave(self, death: str = "") -> None:
        """Learn that the agent is gone; what it has not done by now it never will.

        Args:
            death: of an agent that failed, and how.

        Raises: ContextFull: its last request had no room. PolicyFailed: it failed.
        """
        play, self._is_left = self._play, True
        if self.refused:
            refused = dict(self.refused)
            logger.warning(
                "agent was refused episode=%s requests=%s", self._lease.episode_id, refused
            )
        if self.is_full and not self.is_over:  # whatever its agent makes of that
            if self.has_sampled:
                self._close_rows()
            raise ContextFull("the agent's last request has no room")
        if (death or self._complaint) and not self.is_over:
            raise PolicyFailed(death or f"the agent gave up: {self._complaint}")
        if not self.has_sampled:
            raise PolicyFailed("the agent never asked the policy for anything")
        if not self.is_over:
            play.end = EndReason.DONE  # of its own will
        self._close_rows()

    def _close_rows(self) -> None:
        """Let what was sampled after the last step belong to that."""
        play = self._play
        if not play.num_turns:  # it never acted: one turn, which was none
            play.num_turns, play.invalid_turns, play.scores = 1, [True], [0.0]
        play.history.tape.end(play.num_turns - 1)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ApiError(410, "episode_ended", "this key's episode has ended")

    def _prompt_of(self, asked: Asked) -> list[int]:
        """Return the tokens of a prompt; those that this segment has are taken from it."""
        if asked.messages is None:
            return self._bare(asked.prompt or "")
        messages, said = asked.messages, self._said
        *_, last = messages
        if said and messages[:-1] == said and last["role"] == "user":
            after = self._renderer.after_action(last["content"], is_stopped=self._is_stopped)
            return [*self._play.history.tape.context, *after]
        roles, texts = zip(*((each["role"], each["content"]) for each in messages), strict=True)
        if roles == ("user", *("assistant", "user") * (len(roles) // 2)):
            return self._renderer.conversation(texts)
        try:
            return self._renderer.of_messages(messages)
        except ValueError as error:
            raise ApiError(400, "invalid_value", str(error), "messages") from error

    def _bare(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._renderer.completion(prompt)
        if min(prompt) < 0 or max(prompt) >= self._renderer.num_tokens:
            text = f"prompt: token ids below {self._renderer.num_tokens}"
            raise ApiError(400, "invalid_value", text, "prompt")
        return prompt

    async def _guarded(self, work: Awaitable[Taken]) -> Taken:
        """Await what is not the agent's to fail: if it does, whoever plays the episode is told."""
        try:
            return await work
        except (LongstrideError, TimeoutError) as error:
            self.fail(error)
            code = "environment_failed" if isinstance(error, EnvError) else "policy_failed"
            raise ApiError(503, code, str(error)) from error

    def fail(self, error: Exception) -> None:
        """End it by what is no end of its own; whoever plays it is told."""
        if not self.failed.done():
            self.failed.set_exception(error)


def _cut(taken: Turn, asked: Asked) -> Turn:
    """Return the beginning of a turn that the agent wants shorter; it was sampled all the same."""
    num = asked.max_tokens
    if num is None or num >= len(taken.token_ids):
        return taken
    return Turn(taken.token_ids[:num], taken.logprobs[:num], taken.versions[:num], is_stopped=False)
