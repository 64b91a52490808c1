"""An episode of a task of verifiers: model requests are observations, steps are answers."""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.formats.answers import TOOL_FORM, tools_text
from envhub.env import StepResult, SubsetSpec, action_text, parse_item
from envhub.interop.remote_episode import RemoteEpisode
from envhub.interop.texts import (
    BadAction,
    RewardRule,
    Rewards,
    check_sendable,
    parse_tool_call,
    sample_call,
    shortened,
)
from envhub.interop.verifiers.link import PlayerProcess, TasksetOptions, VerifiersFailure
from envhub.interop.yaml_environments import SUBSET

TURN_FORM = f"{TOOL_FORM}\nWhat is no call is your answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Data shared by the episodes of one taskset; the last player is the active one."""

    options: TasksetOptions
    folder: Path
    subset: SubsetSpec
    rule: RewardRule
    players: list[PlayerProcess] = field(default_factory=list[PlayerProcess])
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def player(self) -> PlayerProcess:
        """Return the active process; start one if there is none. Raises: VerifiersFailure."""
        async with asyncio.timeout(2 * self.options.start_timeout_s), self.starting:
            for lost in [each for each in self.players if each.is_lost]:
                self.players.remove(lost)
                await lost.close()
            if not self.players:
                self.players.append(await PlayerProcess.start(self.options, self.folder))
            return self.players[-1]

    async def stop(self) -> None:
        """End all processes."""
        for player in self.players:
            await player.close()


class VerifiersEpisode(RemoteEpisode):
    """One task; its own scoring determines the reward at the end."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared.rule.start_score)
        self._shared = shared
        self._options = shared.options
        self._player: PlayerProcess | None = None
        self._name = uuid.uuid4().hex
        self._tools: list[str] = []
        self._calls: list[str] = []  # One example call per tool.
        self._known: list[Mapping[str, Any]] = []  # Messages that the agent has already received.

    async def reset(self, item_id: str, seed: int) -> str:
        """Begin a task of its split. Raises: UnknownItem, VerifiersFailure."""
        item = parse_item(item_id, {SUBSET: self._shared.subset})
        self._player = await self._shared.player()
        line = await self._player.begin(self._name, item.split, item.index)
        if "ask" not in line:
            raise VerifiersFailure(f"{self._options.shown}: {item_id} ended without a question")
        functions = [tool["function"] for tool in line["tools"]]
        self._tools = [function["name"] for function in functions]
        self._calls = [sample_call(each["name"], each.get("parameters", {})) for each in functions]
        self._first = self._messages_text(line)
        if functions:
            listed = [each | {"input_schema": each.get("parameters", {})} for each in functions]
            self._first = f"{TURN_FORM}\n{tools_text(listed)}\n{self._first}"
        self._observation = self._first
        return self._first

    async def step(self, action: str) -> StepResult:
        """Answer with the text after the last "Action:". Raises: VerifiersFailure, EnvFailure."""
        if self._is_done or self._player is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            message = self._message(action_text(action))
        except BadAction as error:
            return self._result(str(error), is_valid=False)
        line = await self._player.answer(self._name, message)
        if "ask" in line:
            self._known.append(message)
            return self._result(self._messages_text(line), is_valid=True)
        outcome = line["paid"]
        self._reward = Rewards(self._shared.rule).add(outcome["reward"], is_last=True)
        self._is_done = True
        self._is_success = outcome.get("is_success", self._reward >= 1.0)
        # The rubric has scored a trace at a limit, too: the reward is final.
        return self._result(
            f"The episode has ended and pays {outcome['reward']:g}.",
            is_valid=True,
            metrics={"at_limit": float(outcome["is_truncated"])},
        )

    async def valid_actions(self) -> list[str]:
        """Return a sample answer, and one call of each tool with example arguments."""
        return ["I do not know.", *self._calls]

    async def close(self) -> None:
        player = self._player
        self._player = None
        if player is not None:
            player.end(self._name)

    def _message(self, text: str) -> dict[str, Any]:
        """Return the chat message for a text. Raises: BadAction."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._tools and "{" in text:
            name, arguments = parse_tool_call(text, self._tools)
            check_sendable(arguments)
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": uuid.uuid4().hex, "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        check_sendable(message)
        return message

    def _messages_text(self, line: Mapping[str, Any]) -> str:
        """Return the new messages of a request as text."""
        messages: list[Mapping[str, Any]] = line["ask"]
        start = len(self._known)
        if _roles(messages[:start]) != _roles(self._known):
            start = 0  # The taskset has rewritten its history.
        self._known = list(messages)
        text = "\n\n".join(filter(None, map(_words, messages[start:])))
        return shortened(text, self._options.max_chars)


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, str]]:
    """Return role and text of each message."""
    return [(message["role"], _words(message)) for message in messages]


def _words(message: Mapping[str, Any]) -> str:
    """Return the text of a message; assistant messages are labelled."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)
    return f"Assistant: {content}" if message["role"] == "assistant" else content
