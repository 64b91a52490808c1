"""One episode whose agent is a program. All of its requests and steps are recorded."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from typing import Any

from actor.api.prompts import (
    check_thoughts,
    check_tools,
    continued,
    cut_answer,
    encode_messages,
    matched,
    read_turn,
    thoughts_of,
)
from actor.api.requests import ApiError, Message, PolicyAnswer, PolicyRequest, invalid, with_system
from actor.formats.renderer import Renderer
from actor.rollout.context import Turn
from actor.rollout.env_client import HubStepResult
from actor.rollout.episode import (
    Act,
    ContextFull,
    EnvSession,
    EpisodeState,
    PolicyFailed,
    action_number,
    first_text,
)
from common.wire.messages import EndReason, Lease

logger = logging.getLogger(__name__)


class AgentEpisode:
    """The policy and the environment that an agent's key gives access to.

    The agent may ask the policy with any history. If the history continues the current segment, the
    segment's tokens are reused as they were sampled. A rewritten history begins a new segment.
    Concurrent requests and steps of an agent are executed one after the other.

    Example: the agent asks with [user p], receives "a", steps with "a", asks with [user p,
    assistant "a", user o]: one segment. It asks with [user "in short: ..."]: a second one.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        session: EnvSession,
        act: Act,
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
        self._task = task
        self._conversation: list[Message] = []  # The segment's conversation, as the agent has it.
        self._thoughts: dict[int, str] = {}  # Place of a sampled answer in it -> its thoughts.
        self._own_thoughts: set[str] = set()  # Thoughts of all sampled answers.
        self._tools: list[dict[str, Any]] = []  # The tools of that conversation.
        self._kept: dict[str, list[Message]] = {}  # answer id -> the conversation up to that answer
        self._taken: Turn | None = None  # The last answer.
        self._is_left = False  # The agent has left.
        self._complaint = ""  # The error that the agent reported.
        self._excess = ""  # By how much the last request exceeded the context.
        self._turn = asyncio.Lock()
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

    async def answer(self, asked: PolicyRequest) -> PolicyAnswer:
        """Return the policy's answer. Raises: ApiError."""
        async with self._turn:
            self._check_open()
            if self.has_sampled and not self._play.may_go_on(self._lease, self._turn_tokens):
                self.is_over = True  # Answers without a step have used up the horizon.
                self.ended.set()
                self._check_open()
            continues = False
            if asked.prompt is None:
                asked = matched(with_system(asked, self._before(asked)))
                is_same = asked.tools == self._tools
                request = continued(asked, self._conversation, self._thoughts) if is_same else None
                asked, continues = request or asked, request is not None
            ids = self._prompt_of(asked, continues=continues)
            tape = self._play.history.tape
            turn = self._play.num_turns
            self.is_full = len(ids) + self._turn_tokens > self._max_tokens
            if self.is_full:
                need = f"The prompt has {len(ids)} tokens, the answer up to {self._turn_tokens}"
                reason = f"{need}; the maximum context length is {self._max_tokens} tokens"
                self._excess = reason
                raise ApiError(400, "context_length_exceeded", reason, "messages")
            tape.show(ids, turn)
            taken, stop = self._cut(await self._play.ask(self._act, self._session), asked)
            # The agent may have left during the call; the episode is then final.
            self._check_open()
            tape.add(taken, turn)
            answer = self._answer(asked, taken, stop, num_prompt=len(ids))
            self._keep(asked, answer, continues=continues)
            self._taken = taken
            return answer

    def _keep(self, asked: PolicyRequest, answer: PolicyAnswer, *, continues: bool) -> None:
        """Keep the conversation up to an answer."""
        if not continues:
            self._thoughts = {}
        self._tools = asked.tools
        self._conversation = []
        if asked.prompt is None:
            self._thoughts[len(asked.messages)] = answer.thoughts
            self._own_thoughts.add(answer.thoughts)
            self._conversation = [*asked.messages, answer.message]
        if asked.is_kept:
            first = 1 if asked.instructions else 0
            earlier = self._conversation[first:-1]
            self._kept[f"resp_{answer.number}"] = [*earlier, answer.message_with_ids("call")]

    def _answer(
        self, asked: PolicyRequest, taken: Turn, stop: str | None, *, num_prompt: int
    ) -> PolicyAnswer:
        """Return a sampled turn as the answer to a request."""
        text, calls = read_turn(self._renderer, taken.token_ids, asked, stop)
        return PolicyAnswer(
            number=secrets.token_hex(12),
            text=text,
            calls=calls,
            thoughts=thoughts_of(self._renderer, taken.token_ids, asked),
            is_stopped=taken.is_stopped,
            stop=stop,
            num_prompt=num_prompt,
            num_sampled=len(taken.token_ids),
        )

    async def step(self, action: str) -> dict[str, object]:
        """Execute an action in the environment and return its result. Raises: ApiError."""
        async with self._turn:
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
        async with self._turn:
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
        return any(self._play.history.tape.loss_mask)

    def leave(self, death: str = "") -> None:
        """Finish the episode after its agent has left.

        Args:
            death: how the agent failed; "": it did not.

        Raises: ContextFull: its last request did not fit. PolicyFailed: the agent failed.
        """
        play = self._play
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
        """Assign tokens sampled after the last step to that step's turn."""
        play = self._play
        if not play.num_turns:  # The agent never acted: record one invalid turn.
            play.num_turns, play.invalid_turns, play.scores = 1, [True], [play.start_score]
            play.actions = [action_number("")]
        play.history.tape.end(play.num_turns - 1)

    def fail(self, error: BaseException) -> None:
        """Report an error that the agent did not cause to the task that plays the episode."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ApiError(410, "episode_ended", "the episode of this API key has ended")

    def _before(self, asked: PolicyRequest) -> list[Message]:
        """Return the conversation that a request continues; [] for a new one. Raises: ApiError."""
        if asked.previous not in self._kept and asked.previous:
            text = f"previous_response_id={asked.previous:.60}: not a response of this episode"
            raise ApiError(400, "previous_response_not_found", text, "previous_response_id")
        return self._kept.get(asked.previous, [])

    def _prompt_of(self, asked: PolicyRequest, *, continues: bool) -> list[int]:
        """Return the tokens of a prompt. Those of the current segment are reused."""
        if asked.prompt is not None:
            return self._prompt_ids(asked.prompt)
        tools = asked.tools
        check_tools(self._renderer, asked)
        if not continues:
            check_thoughts(self._renderer, asked, self._own_thoughts)
            return encode_messages(self._renderer, asked.messages, tools=tools)
        try:
            new = asked.messages[len(self._conversation) :]
            return [*self._play.history.tape.context, *self._after(new, tools)]
        except ValueError as error:
            raise invalid(str(error), "messages") from error

    def _after(self, new: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Return the ids between the last answer and the next one, with new messages."""
        is_stopped = self._taken is not None and self._taken.is_stopped
        end = None if self._taken is None else self._taken.end
        if [each["role"] for each in new] == ["user"]:
            return self._renderer.after_turn(new[0]["content"], is_stopped=is_stopped, end=end)
        calls = self._conversation[-1].get("tool_calls") or []
        return self._renderer.after_calls(
            new, tools=tools, is_stopped=is_stopped, end=end, has_calls=bool(calls), calls=calls
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
