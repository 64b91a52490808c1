"""An episode on a server of MCP tools."""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envhub.env import StepResult, SubsetSpec, action_text, parse_item
from envhub.interop.mcp.link import Link, McpFailure, McpOptions
from envhub.interop.texts import (
    SUCCESS_KEYS,
    TRUNCATED_KEYS,
    BadAction,
    RewardRule,
    Rewards,
    check_sendable,
    parse_tool_call,
    reported_truth,
    sample_call,
    shortened,
)
from envhub.interop.yaml_environments import SUBSET, optional_package


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """Data shared by the episodes on one server."""

    options: McpOptions
    items: list[dict[str, Any]]
    places: Mapping[str, list[int]]  # Positions of each split's items.
    subset: SubsetSpec
    rule: RewardRule
    tools: Mapping[str, dict[str, Any]]  # The agent's tools, by name.
    # Whether the tool that ends an episode belongs to the server, and its result is the reward.
    grades: bool
    # The single connection of all sessions, if an argument identifies the session.
    shared: list[Link]
    # Only one session at a time opens it.
    connecting: asyncio.Lock = field(default_factory=asyncio.Lock)


class McpEpisode:
    """One episode: tool calls, until one call ends it.

    An error of a tool is an observation. A call that no tool accepts is an invalid action.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._options = tasks.options
        self._link: Link | None = None
        self._item: dict[str, Any] = {}
        self._session: dict[str, str] = {}
        self._first = self._text = ""
        self._is_done = self._is_truncated = False

    async def reset(self, item_id: str, seed: int) -> str:
        """Begin a session of the item. Raises: UnknownItem, McpFailure."""
        tasks = self._tasks
        options = self._options
        item = parse_item(item_id, {SUBSET: tasks.subset})
        self._item = tasks.items[tasks.places[item.split][item.index]]
        self._link = await self._connect()
        beginning = ""
        if options.session:
            self._session = {options.session: uuid.uuid4().hex}
        if options.begin:
            given = self._item.get("arguments", {})
            begun = await self._link.call(options.begin, dict(given))
            beginning = self._tool_text(begun)
            if begun.is_error:
                raise McpFailure(f"{options.shown}: {options.begin!r} failed: {beginning:.500}")
            if options.session:
                handle = _field(begun, options.session)
                self._session = {
                    options.session: beginning.strip() if handle is None else str(handle)
                }
                beginning = str(_field(begun, "observation") or "")
        parts = filter(None, [str(self._item["prompt"]), beginning])
        self._first = self._text = "\n".join(parts)
        return self._first

    async def step(self, action: str) -> StepResult:
        """Call one tool. Raises: McpFailure: the server failed, or reported no reward."""
        if self._is_done or self._link is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            name, arguments = self._parse(action)
            self._check(name, arguments)
            if name == self._options.submit and not self._tasks.grades:
                return await self._submit(str(arguments["answer"]))
            result = await self._link.call(name, arguments | self._session)
        except BadAction as error:
            return self._result(str(error), is_valid=False)
        except McpFailure as error:
            if not error.is_refusal:
                raise
            return self._result(str(error).partition(": ")[2], is_valid=False)
        if name == self._options.submit and not result.is_error:
            return self._rewarded(result)
        return self._result(self._tool_text(result))

    async def _submit(self, answer: str) -> StepResult:
        """Return the result for an answer: from the item's `check` tool, or by comparison."""
        check = self._item.get("check")
        if check is not None:
            given = {"answer": answer, **check.get("arguments", {}), **self._session}
            assert self._link is not None
            return self._rewarded(await self._link.call(str(check["tool"]), given))
        right = self._item["answer"]
        accepted = right if isinstance(right, list) else [right]
        is_right = _plain(answer) in {_plain(str(each)) for each in accepted}
        self._is_done = True
        return self._result(
            "Right." if is_right else "Wrong.", reward=float(is_right), is_success=is_right
        )

    def _rewarded(self, result: Any) -> StepResult:
        """Return the end of an episode; its reward is a number or JSON in the tool's result."""
        text = self._tool_text(result)
        if result.is_error:
            raise McpFailure(f"{self._options.shown}: the grading tool failed: {text:.500}")
        reward = _field(result, "reward")
        if reward is None:
            reward = _field(result, "result")  # The package wraps a plain number in this field.
        if reward is None:
            try:
                reward = float(text)
            except ValueError as error:
                raise McpFailure(
                    f"{self._options.shown}: no reward in {text:.200!r}; return a number, or JSON"
                    ' with "reward"'
                ) from error
        total = Rewards(self._tasks.rule).add(reward, is_last=True)
        content = _content(result)
        reported = reported_truth(content, SUCCESS_KEYS)
        self._is_done = True
        self._is_truncated = reported_truth(content, TRUNCATED_KEYS) is True
        is_success = total >= 1.0 if reported is None else reported
        return self._result(text, reward=total, is_success=is_success)

    async def valid_actions(self) -> list[str]:
        """Return one call of each tool, with example arguments."""
        tools = self._tasks.tools.items()
        return [sample_call(name, tool["input_schema"]) for name, tool in tools]

    async def expert_action(self) -> str | None:
        """Return the correct answer if the item has one."""
        right = self._item.get("answer")
        if self._tasks.grades or right is None:
            return None
        answer = str(right[0] if isinstance(right, list) else right)
        return json.dumps({"tool": self._options.submit, "arguments": {"answer": answer}})

    async def render(self) -> str:
        return self._text

    async def fingerprint(self) -> str:
        """Return the hash of the item, the only part of the state available here."""
        return hashlib.sha256(json.dumps(self._item, sort_keys=True).encode()).hexdigest()

    async def close(self) -> None:
        link = self._link
        self._link = None
        if link is not None and link not in self._tasks.shared:
            await link.close()

    async def _connect(self) -> Link:
        """Return a connection: the episode's own, or a shared one if an argument is the session.

        The connection is retried while a server restarts.
        """
        until_s = time.monotonic() + self._options.start_timeout_s
        if not self._options.session:
            return await Link.open(self._options, until_s=until_s)
        shared = self._tasks.shared
        async with self._tasks.connecting:
            for lost in [link for link in shared if link.is_lost]:
                shared.remove(lost)
                await lost.close()
            if not shared:
                shared.append(await Link.open(self._options, until_s=until_s))
            return shared[-1]

    def _parse(self, action: str) -> tuple[str, dict[str, Any]]:
        """Return the tool that a text calls, and its arguments. Raises: BadAction."""
        text = action_text(action)
        if self._options.plain_answers and text and "{" not in text:
            return self._options.submit, {"answer": text}
        return parse_tool_call(text, list(self._tasks.tools))

    def _check(self, name: str, arguments: dict[str, Any]) -> None:
        """Raise BadAction if the arguments do not match the tool's schema or JSON."""
        check_sendable(arguments)
        schema: Any = optional_package("jsonschema", "mcp")
        checker = schema.Draft202012Validator(self._tasks.tools[name]["input_schema"])
        try:
            wrong = next(checker.iter_errors(arguments), None)
        except (ArithmeticError, RecursionError, ValueError) as error:
            raise BadAction(f"{name}: the arguments cannot be checked: {error}"[:500]) from error
        if wrong is not None:
            where = ".".join(map(str, wrong.path))
            raise BadAction(f"{name}: {f'{where}: ' if where else ''}{wrong.message}"[:500])

    def _tool_text(self, result: Any) -> str:
        """Return a tool's result as valid Unicode text of limited length."""
        parts = [block_text(each) for each in result.content]
        if not parts and result.structured_content is not None:
            parts = [json.dumps(result.structured_content, ensure_ascii=False)]
        return shortened("\n".join(parts), self._options.max_chars)

    def _result(
        self,
        text: str,
        *,
        is_valid: bool = True,
        reward: float | None = None,
        is_success: bool = False,
    ) -> StepResult:
        """Return the result of a step; without a reward, the start score is used."""
        self._text = text
        return StepResult(
            observation=text,
            reward=self._tasks.rule.start_score if reward is None else reward,
            done=self._is_done,
            is_valid=is_valid,
            is_success=is_success,
            is_truncated=self._is_truncated,
        )


def block_text(block: Any) -> str:
    """Return the text of one part of a result, as the agent receives it."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    return f"[{block.type} {getattr(block, 'uri', getattr(block, 'mime_type', ''))}]"


def _content(result: Any) -> dict[str, Any]:
    """Return a result's JSON object; {} if it has none."""
    content = result.structured_content
    if content is None and len(result.content) == 1 and result.content[0].type == "text":
        try:
            content = json.loads(result.content[0].text)
        except (ValueError, RecursionError):
            return {}
    return content if isinstance(content, dict) else {}


def _field(result: Any, name: str) -> Any:
    """Return a field of a result's JSON; None if it is missing."""
    return _content(result).get(name)


def _plain(text: str) -> str:
    """Return a text in the normalized form in which answers are compared."""
    return " ".join(text.split()).casefold()
