"""One episode whose agent is a program. All of its requests and steps are recorded."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from actor.agents.lineages import Lineage, Lineages
from actor.api.parts import AnswerComplete, PartialAnswer
from actor.api.prompts import (
    check_tools,
    continued,
    cut_answer,
    encode_messages,
    log_hidden_thoughts,
    logprobs_of,
    matched,
    read_turn,
    thoughts_of,
)
from actor.api.requests import (
    AnswerHead,
    AnswerPart,
    ApiError,
    ContextExceeded,
    Message,
    PolicyAnswer,
    PolicyRequest,
    invalid,
    with_system,
)
from actor.formats.renderer import Renderer
from actor.rollout.context import Tape, Turn
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import (
    ContextFull,
    EnvSession,
    EpisodeState,
    PolicyFailed,
    StreamingAct,
    action_number,
    first_text,
    task_text,
)
from common.config.actor import AgentFormat
from common.wire.messages import EndReason, Lease

logger = logging.getLogger(__name__)


class AnswerListener(Protocol):
    """Receives the answers to a request as they are sampled."""

    def open(self, heads: Sequence[AnswerHead]) -> None:
        """Receive the heads of all answers, before their first tokens."""
        ...

    def add(self, index: int, part: AnswerPart) -> None:
        """Receive a further part of an answer."""
        ...


class _OpenAnswer:
    """An answer that the policy samples."""

    def __init__(
        self,
        asked: PolicyRequest,
        ids: list[int],
        thoughts: dict[int, str],
        index: int,
        listener: AnswerListener | None,
        renderer: Renderer,
    ) -> None:
        """`thoughts`: those of the sampled answers in the request, as in `Lineage`."""
        self.asked = asked
        self.ids = ids  # Tokens of the prompt.
        self.thoughts = thoughts
        self.listener = listener
        self.head = AnswerHead(number=secrets.token_hex(12), num_prompt=len(ids))
        self.partial = PartialAnswer(renderer.of_streams, asked, num_prompt=len(ids))
        self.asked_at = 0.0
        self._index = index

    def takes_parts(self, turn_tokens: int) -> bool:
        """Return whether a token before the end of a turn of `turn_tokens` may concern the request.

        It has a stream, or its own limit of tokens or stop text may end the answer earlier.
        """
        limit = self.asked.max_tokens
        is_shorter = limit is not None and limit < turn_tokens
        return self.listener is not None or is_shorter or bool(self.asked.stop)

    def add(self, new: Turn) -> None:
        """Receive tokens. Raises: AnswerComplete: the request takes no further one."""
        part = self.partial.add(new)
        if self.listener is not None:
            self.listener.add(self._index, part)


class AgentEpisode:
    """The policy and the environment that an agent's key gives access to.

    The agent may ask the policy with any history, and with several at once. A history continues the
    longest conversation that it begins with, whose tokens are reused as they were sampled. Another
    continuation of the same conversation, or a rewritten history, is a row of its own (`Lineages`).
    Steps of the environment are executed one after the other.

    Example: the agent asks with [user p], receives "a", steps with "a", asks with [user p,
    assistant "a", user o]: one row. It asks with [user "in short: ..."]: a second one.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        session: EnvSession,
        act: StreamingAct,
        play: EpisodeState,
        renderer: Renderer,
        room: tuple[int, int],  # Maximum tokens of prompt and answer together, and of an answer.
        # Instruction of the environment, and the agent's answer to it or "".
        task: tuple[str, str],
    ) -> None:
        """Create an episode without requests; `play` records it."""
        self.key = secrets.token_urlsafe(24)
        self.ended = asyncio.Event()  # No request is answered any more.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_over = False  # The environment or the horizon ended the episode.
        self.is_taken = False  # An agent has taken the episode.
        self.is_full = False  # The last request did not fit the context.
        self.refused: Counter[str] = Counter()  # error code -> number of requests
        self._lease = lease
        self._session = session
        self._act = act
        self._play = play
        self._renderer = renderer
        self._max_tokens, self._turn_tokens = room
        instruction, acknowledgement = task
        tools = getattr(session, "tools", [])
        instruction = task_text(AgentFormat.PLAIN, instruction, tools=tools)
        self._task = instruction, acknowledgement
        self._lineages = Lineages()
        self._num_in_flight = 0  # Requests that the policy is sampling.
        self._open: list[_OpenAnswer] = []  # Their answers.
        self._sampled = asyncio.Condition()  # A request has ended.
        self._kept: dict[str, list[Message]] = {}  # answer id -> the conversation up to that answer
        self._is_left = False  # The agent has left.
        self._complaint = ""  # The error that the agent reported.
        self._excess = ""  # By how much the last request exceeded the context.
        self._stepping = asyncio.Lock()
        play.begin(session)

    def first(self) -> dict[str, object]:
        """Return the agent's task: the messages that the built-in loop would begin with."""
        instruction, acknowledgement = self._task
        observation = self._session.first_observation
        messages = [{"role": "user", "content": first_text(instruction, observation)}]
        before: list[dict[str, str]] = getattr(self._session, "first_messages", [])
        if before:
            messages = [*before, *messages]
        elif acknowledgement:
            messages = [
                {"role": "user", "content": instruction},
                {"role": "assistant", "content": acknowledgement},
                {"role": "user", "content": observation},
            ]
        reply = {"observation": observation, "instruction": instruction, "messages": messages}
        return {**reply, "env": self._lease.env, "item_id": self._lease.item_id}

    async def answers(
        self, asked: PolicyRequest, listener: AnswerListener | None = None
    ) -> list[PolicyAnswer]:
        """Return the policy's answers to a request, sampled at once.

        A cancelled call ends the sampling. The tokens that a listener has received of unfinished
        answers are recorded as answers that were cut there.

        Args:
            listener: receives the answers as they are sampled; None: the request has no stream.

        Raises: ApiError.
        """
        asked, earlier, ids = self._read(asked)
        self.is_full = len(ids) + self._turn_tokens > self._max_tokens
        if self.is_full:
            error = ContextExceeded(
                num_prompt=len(ids), num_answer=self._turn_tokens, max_tokens=self._max_tokens
            )
            self._excess = error.reason
            raise error
        thoughts = {} if earlier is None else earlier.thoughts
        open_answers = [
            _OpenAnswer(asked, ids, thoughts, index, listener, self._renderer)
            for index in range(asked.num_answers)
        ]
        if listener is not None:
            listener.open([each.head for each in open_answers])
        return await asyncio.gather(*map(self._answer, open_answers))

    def num_prompt_tokens(self, asked: PolicyRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises: ApiError."""
        return len(self._read(asked)[2])

    def _read(self, asked: PolicyRequest) -> tuple[PolicyRequest, Lineage | None, list[int]]:
        """Return a request with its whole conversation; see `_encoded`. Raises: ApiError."""
        self._check_open()
        if asked.prompt is None:
            asked = matched(with_system(asked, self._before(asked)))
            log_hidden_thoughts(self._renderer, asked)
            check_tools(self._renderer, asked)
        return self._encoded(asked)

    async def _answer(self, opened: _OpenAnswer) -> PolicyAnswer:
        """Return one answer to a prompt, and record it."""
        await self._enter()
        self._open.append(opened)
        try:
            return self._finished(opened, await self._sample(opened))
        except asyncio.CancelledError:
            self._record_part(opened)
            raise
        finally:
            if opened in self._open:
                self._open.remove(opened)
            await self._leave()

    def _finished(self, opened: _OpenAnswer, taken: Turn) -> PolicyAnswer:
        """Return a sampled turn as an answer, and record it. Raises: ApiError: too late."""
        if self._is_left or self.failed.done():  # The episode is final.
            raise ended_error()
        asked = opened.asked
        taken, stop = self._cut(taken, asked)
        answer = self._as_answer(opened, taken, stop)
        self._record(opened, taken, answer)
        if asked.is_kept:
            earlier = asked.messages[1 if asked.instructions else 0 :]
            self._kept[f"resp_{answer.number}"] = [*earlier, answer.message_with_ids("call")]
        return answer

    async def _sample(self, opened: _OpenAnswer) -> Turn:
        """Return the sampled tokens of an answer, as far as its request takes them."""
        if not opened.takes_parts(self._turn_tokens):
            return await self._play.sample(self._act, self._session, opened.ids)
        act = partial(self._act, on_tokens=opened.add)
        opened.asked_at = time.monotonic()
        try:
            return await self._play.sample(act, self._session, opened.ids)
        except AnswerComplete:
            return self._count_part(opened)

    def _count_part(self, opened: _OpenAnswer) -> Turn:
        """Return the tokens that have arrived of an answer, and record their cost."""
        taken = opened.partial.taken
        self._play.count(taken, time.monotonic() - opened.asked_at)
        return taken

    def _record_part(self, opened: _OpenAnswer) -> None:
        """Record the tokens of a stream that ends before its last token, at most once."""
        if opened not in self._open:
            return
        self._open.remove(opened)
        if opened.listener is not None and opened.partial.token_ids:
            sent = opened.partial
            taken = self._count_part(opened)
            answer = replace(
                self._as_answer(opened, taken, None),
                **{"text": sent.text, "calls": [], "thoughts": sent.thoughts},
            )
            self._record(opened, taken, answer)

    def _record(self, opened: _OpenAnswer, taken: Turn, answer: PolicyAnswer) -> None:
        """Append an answer to the conversations."""
        asked = opened.asked
        is_chat = asked.prompt is None
        place = len(asked.messages)
        self._lineages.add(
            opened.ids,
            taken,
            self._play.num_turns,
            messages=[*asked.messages, answer.message] if is_chat else [],
            thoughts={**opened.thoughts, place: answer.thoughts} if is_chat else {},
            tools=asked.tools,
        )

    async def _enter(self) -> None:
        """Wait until the horizon allows one more answer beside those in progress.

        Raises: ApiError: the answers so far have used up the horizon, or the episode has ended.
        """
        async with self._sampled:
            while self._lineages or self._num_in_flight:
                self._check_open()
                reserved = self._turn_tokens * (self._num_in_flight + 1)
                if self._play.may_go_on(self._lease, reserved):
                    break
                if not self._num_in_flight:
                    self.is_over = True  # Answers without a step have used up the horizon.
                    self.ended.set()
                else:
                    await self._sampled.wait()
            self._check_open()
            self._num_in_flight += 1

    async def _leave(self) -> None:
        """Count a request that is no longer in progress."""
        self._num_in_flight -= 1  # At once, also if the request is cancelled.
        async with self._sampled:
            self._sampled.notify_all()

    def _as_answer(self, opened: _OpenAnswer, taken: Turn, stop: str | None) -> PolicyAnswer:
        """Return a sampled turn as the answer to a request."""
        asked = opened.asked
        is_streamed = opened.listener is not None
        renderer = self._renderer.of_streams if is_streamed else self._renderer
        text, calls = read_turn(renderer, taken.token_ids, asked, stop)
        thoughts = thoughts_of(renderer, taken.token_ids, asked)
        sent = opened.partial
        is_same = text.startswith(sent.text) and thoughts.startswith(sent.thoughts)
        if is_streamed and not is_same:
            logger.warning(
                "the text of a stream differs from its answer episode=%s sent=%r answer=%r",
                *(self._lease.episode_id, sent.text[-80:], text[-80:]),
            )
            text = sent.text  # The agent has it in its history.
            thoughts = sent.thoughts
        return PolicyAnswer(
            number=opened.head.number,
            text=text,
            calls=calls,
            thoughts=thoughts,
            logprobs=logprobs_of(renderer, taken.token_ids, taken.logprobs, asked),
            is_stopped=taken.is_stopped,
            stop=stop,
            num_prompt=len(opened.ids),
            num_sampled=len(taken.token_ids),
        )

    async def step(self, action: str) -> dict[str, object]:
        """Execute an action in the environment and return its result. Raises: ApiError."""
        async with self._stepping:
            self._check_open()
            started = time.monotonic()
            result: HubStepResult = await self._session.step(action)
            self._play.answered(action, result, time.monotonic() - started)
            is_over = result.done or not self._play.may_go_on(self._lease, self._turn_tokens)
            is_done = result.done and not result.is_truncated
            if is_over:
                self.is_over = True
                self.ended.set()
            return {
                "observation": result.observation,
                "reward": result.reward,
                "done": is_done,
                "truncated": is_over and not is_done,
                "is_success": result.is_success,
            }

    async def end(self, complaint: str) -> None:
        """End the episode at the agent's request. A complaint is the reason for giving up."""
        async with self._stepping:
            self._check_open()
            self._complaint = complaint
            self.ended.set()

    @property
    def lease(self) -> Lease:
        return self._lease

    @property
    def is_closed(self) -> bool:
        """Whether the episode accepts no more requests."""
        return self.ended.is_set() or self.failed.done() or self._is_left

    @property
    def has_sampled(self) -> bool:
        """Whether the policy has sampled any token."""
        return bool(self._lineages)

    def leave(self, death: str = "") -> None:
        """Finish the episode after its agent has left.

        Args:
            death: how the agent failed; "": it did not.

        Raises: ContextFull: its last request did not fit. PolicyFailed: the agent failed.
        """
        play = self._play
        self._record_parts()
        self._is_left = True
        if self.refused:
            refused = dict(self.refused)
            logger.warning(
                "refused requests of an agent episode=%s requests=%s",
                self._lease.episode_id,
                refused,
            )
        if self.is_full and not self.is_over:  # Independent of the agent's reaction to that error.
            if self.has_sampled:
                self._close_rows()
            raise ContextFull(f"the agent's request exceeds the context: {self._excess}")
        if (death or self._complaint) and not self.is_over:
            raise PolicyFailed(death or f"the agent reported an error: {self._complaint}")
        if not self.has_sampled:
            raise PolicyFailed("the agent ended the episode without a request to the policy")
        if not self.is_over:
            play.end = EndReason.DONE  # The agent ended the episode itself.
        self._close_rows()

    def _close_rows(self) -> None:
        """Record the rows of an episode that counts."""
        play = self._play
        if not play.num_turns:  # The agent never acted: record one invalid turn.
            play.num_turns = 1
            play.invalid_turns.append(True)
            play.scores.append(play.start_score)
            play.actions.append(action_number(""))
        self.close()

    def close(self) -> None:
        """Record the rows so far, after which the episode is final."""
        self._record_parts()
        self._is_left = True
        self._play.history.tape = self.tape()

    def _record_parts(self) -> None:
        """Record the tokens that streams have sent of unfinished answers."""
        for opened in list(self._open):
            self._record_part(opened)

    def tape(self) -> Tape:
        """Return the rows so far. Tokens sampled after the last step belong to its turn."""
        return self._lineages.tape(last_turn=max(0, self._play.num_turns - 1))

    def fail(self, error: BaseException) -> None:
        """Report an error that the agent did not cause to the task that plays the episode."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ended_error()

    def _before(self, asked: PolicyRequest) -> list[Message]:
        """Return the conversation that a request continues; [] for a new one. Raises: ApiError."""
        if asked.previous not in self._kept and asked.previous:
            text = f"previous_response_id={asked.previous:.60}: not a response of this episode"
            raise ApiError(400, "previous_response_not_found", text, "previous_response_id")
        return self._kept.get(asked.previous, [])

    def _encoded(self, asked: PolicyRequest) -> tuple[PolicyRequest, Lineage | None, list[int]]:
        """Return a request, the lineage that it continues, and the tokens of its prompt.

        The tokens of the lineage are reused. Its answers replace those of the request.
        """
        if asked.prompt is not None:
            return asked, None, self._prompt_ids(asked.prompt)
        earlier = self._lineages.continued(asked)
        if earlier is None:
            return asked, None, encode_messages(self._renderer, asked.messages, tools=asked.tools)
        merged = continued(asked, earlier.messages, earlier.thoughts)
        assert merged is not None
        new = merged.messages[len(earlier.messages) :]
        try:
            return merged, earlier, [*earlier.token_ids, *self._after(earlier, new)]
        except ValueError as error:
            if all(message["role"] != "assistant" for message in new):
                raise invalid(str(error), "messages") from error
        return asked, None, encode_messages(self._renderer, asked.messages, tools=asked.tools)

    def _after(self, earlier: Lineage, new: list[Message]) -> list[int]:
        """Return the ids between the answer of a lineage and the next one, with new messages.

        Raises: ValueError: the chat template refuses them.
        """
        taken = earlier.taken
        if [message["role"] for message in new] == ["user"]:
            return self._renderer.after_turn(
                new[0]["content"], is_stopped=taken.is_stopped, end=taken.end
            )
        calls = earlier.messages[-1].get("tool_calls") or []
        return self._renderer.after_calls(
            new,
            tools=earlier.tools,
            is_stopped=taken.is_stopped,
            end=taken.end,
            has_calls=bool(calls),
            calls=calls,
        )

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        """Return the ids of a bare prompt: of its text, or as given."""
        ids = self._renderer.completion(prompt) if isinstance(prompt, str) else prompt
        if ids and (min(ids) < 0 or max(ids) >= self._renderer.num_tokens):
            text = f"prompt: token ids must be >= 0 and < {self._renderer.num_tokens}"
            raise invalid(text, "prompt")
        if problem := self._renderer.sense_problem(ids):
            raise invalid(f"prompt: {problem}", "prompt")
        return ids

    def _cut(self, taken: Turn, asked: PolicyRequest) -> tuple[Turn, str | None]:
        """Return the start of a turn that the agent limits, and the stop text that ended it."""
        ids = taken.token_ids
        cut = cut_answer(self._renderer.plain_text, ids, asked)
        num = cut.num_tokens
        if num == len(ids) and cut.stop is None:
            return taken, None
        shorter = Turn(
            ids[:num],
            taken.logprobs[:num],
            taken.versions[:num],
            is_stopped=False,
            num_prompt=taken.num_prompt,
            experts=taken.experts,
        )
        return shorter, cut.stop


def ended_error() -> ApiError:
    """Return the error for a request to an episode that has ended."""
    return ApiError(410, "episode_ended", "the episode of this API key has ended")
