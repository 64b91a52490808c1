"""A taskset of verifiers as an environment: `verifiers:words.yaml`."""

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.formats.answers import TOOL_FORM, tools_text
from common.host.loopback import direct_loopback
from common.text import json_bytes
from envhub.env import (
    EnvFailure,
    EnvSpec,
    Isolation,
    StepResult,
    Style,
    SubsetSpec,
    action_text,
    parse_item,
)
from envhub.interop.remote_episode import RemoteEpisode
from envhub.interop.texts import (
    BadAction,
    RewardRule,
    Rewards,
    check_sendable,
    is_call,
    parse_tool_call,
    sample_call,
    shortened,
)
from envhub.interop.yaml_environments import SUBSET, read_description, rule_of, run_coroutine

PLAYER = Path(__file__).parent / "verifiers_process" / "player.py"
CLOSE_S = 5.0  # Time limit for the process to end.
MAX_LINE_BYTES = 64 << 20


class VerifiersFailure(EnvFailure):
    """verifiers, the taskset or its scoring failed; the text names the taskset."""


@dataclass(kw_only=True)
class TasksetOptions:
    """Options in the YAML file of a taskset of verifiers."""

    python: str = "python"  # Interpreter of a Python environment with verifiers.
    path: str = ""  # Additional folder for modules, relative to this file.
    # Id and options of the taskset.
    taskset: dict[str, Any] = field(default_factory=dict[str, Any])
    test: dict[str, Any] = field(default_factory=dict[str, Any])  # Options of the test items.
    # Id of the environment, and the agent of each seat.
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    seat: str = ""  # The policy's seat, if it has several.
    success: str = ""  # Metric or reward that means success if it is 1; "": the whole reward.
    num_test: int = -1  # Number of last items for testing, without `test`; -1: a tenth.
    max_items: int = 10_000  # Maximum items of each split.
    min_reward: float = 0.0
    max_reward: float = 1.0
    max_turns: int = 10
    max_chars: int = 8_000  # Maximum characters of one observation.
    max_sessions: int = 32  # Maximum number of live episodes.
    timeout_s: float = 120.0  # Seconds from an answer to the next request.
    start_timeout_s: float = 120.0  # Seconds to load the taskset.

    @property
    def shown(self) -> str:
        """Name of the taskset in texts for people."""
        return f"verifiers taskset {self.taskset.get('id', '')!r}"


class PlayerProcess:
    """One process and its episodes.

    Example: an episode waits for the result of its answer and the process dies. This and all other
    episodes get VerifiersFailure immediately, and the next episode starts another process.
    """

    def __init__(self, options: TasksetOptions, process: asyncio.subprocess.Process) -> None:
        self._options = options
        self._process = process
        self._lines: dict[str, asyncio.Queue[dict[str, Any] | None]] = {"": asyncio.Queue()}
        self._reader = asyncio.create_task(self._read())
        self.num_items: tuple[int, int] = (0, 0)  # Numbers of training and test items.
        self.is_lost = False

    @classmethod
    async def start(cls, options: TasksetOptions, folder: Path) -> "PlayerProcess":
        """Return a process that is ready. Raises: VerifiersFailure: it does not start."""
        # Variables of this process that the player must not inherit.
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        if options.path:
            environment["PYTHONPATH"] = str((folder / options.path).resolve())
        environment |= direct_loopback(environment)
        try:
            process = await asyncio.create_subprocess_exec(
                options.python,
                str(PLAYER),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=MAX_LINE_BYTES,
            )
        except OSError as error:
            raise VerifiersFailure(
                f"{options.shown}: python={options.python}: {error.strerror}"
            ) from error
        player = cls(options, process)
        player._send(asdict(options))
        try:
            ready = await player._next("", "the start", timeout_s=options.start_timeout_s)
        except VerifiersFailure:
            await player.close()
            raise
        player.num_items = (ready["ready"][0], ready["ready"][1])
        return player

    async def begin(self, episode: str, split: str, index: int) -> dict[str, Any]:
        """Return the first line of an episode. Raises: VerifiersFailure."""
        self._lines[episode] = asyncio.Queue()
        self._send({"start": episode, "split": split, "index": index})
        return await self._next(episode, f"the start of {split} item {index}")

    async def answer(self, episode: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line that follows the policy's answer. Raises: VerifiersFailure."""
        self._send({"answer": episode, "message": message})
        return await self._next(episode, "a turn")

    def end(self, episode: str) -> None:
        """Abort an episode."""
        if self._lines.pop(episode, None) is not None:
            self._send({"end": episode})

    async def close(self) -> None:
        """End the process."""
        self.is_lost = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.kill()
        await asyncio.wait([self._reader], timeout=CLOSE_S)
        self._reader.cancel()

    def _send(self, line: Mapping[str, Any]) -> None:
        """Send a line to the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # `_next` reports a lost process.
            self._process.stdin.write(json_bytes(line) + b"\n")

    async def _next(self, episode: str, what: str, *, timeout_s: float = 0.0) -> dict[str, Any]:
        """Return the next line of an episode; "" is the process itself."""
        timeout_s = timeout_s or self._options.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._lines[episode].get() if not self.is_lost else None
        except TimeoutError as error:
            raise VerifiersFailure(
                f"{self._options.shown}: {what} took longer than {timeout_s:g} s"
            ) from error
        if line is None:
            code = self._process.returncode
            raise VerifiersFailure(
                f"{self._options.shown}: its process has ended"
                f"{'' if code is None else f' with exit code {code}'}; the log has its output"
            )
        if "error" in line:
            raise VerifiersFailure(f"{self._options.shown}: {line['error']:.1500}")
        return line

    async def _read(self) -> None:
        """Queue each line for its episode until the output ends."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # A line that is too long or not JSON.
            while text := await self._process.stdout.readline():
                line = json.loads(text)
                if (queue := self._lines.get(line.get("episode", ""))) is not None:
                    queue.put_nowait(line)
        self.is_lost = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._process.wait()
        for queue in self._lines.values():
            queue.put_nowait(None)


NO_TOOLS_NOW = "There are no tools any more."
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
        self._functions: list[dict[str, Any]] = []  # Tools of the last request.
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
        self._first = self._request_text(line)
        self._observation = self._first
        return self._first

    async def step(self, action: str) -> StepResult:
        """Answer with the text after the last "Action:". Raises: VerifiersFailure, EnvFailure."""
        if self._is_done or self._player is None:
            raise RuntimeError("step before reset, or after the episode has ended")
        try:
            message = self._message(action)
        except BadAction as error:
            return self._result(str(error), is_valid=False)
        line = await self._player.answer(self._name, message)
        if "ask" in line:
            self._known.append(message)
            return self._result(self._request_text(line), is_valid=True)
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

    def _message(self, action: str) -> dict[str, Any]:
        """Return the chat message for an action. Raises: BadAction."""
        text = action_text(action)
        if not text:
            raise BadAction("The answer is empty.")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._tools and is_call(action):
            name, arguments = parse_tool_call(action, self._tools)
            check_sendable(arguments)
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": uuid.uuid4().hex, "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
        check_sendable(message)
        return message

    def _request_text(self, line: Mapping[str, Any]) -> str:
        """Return the new messages of a request as text, after its tools if they have changed."""
        return f"{self._changed_tools(line)}{self._messages_text(line)}"

    def _changed_tools(self, line: Mapping[str, Any]) -> str:
        """Offer the tools of a request; return their list, "" if it is that of the last request."""
        functions = [tool["function"] for tool in line["tools"]]
        if functions == self._functions:
            return ""
        self._functions = functions
        self._tools = [function["name"] for function in functions]
        self._calls = [sample_call(each["name"], each.get("parameters", {})) for each in functions]
        if not functions:
            return f"{NO_TOOLS_NOW}\n"
        listed = [each | {"input_schema": each.get("parameters", {})} for each in functions]
        return f"{TURN_FORM}\n{tools_text(listed)}\n"

    def _messages_text(self, line: Mapping[str, Any]) -> str:
        """Return the new messages of a request as text."""
        messages: list[Mapping[str, Any]] = line["ask"]
        start = len(self._known)
        if _roles(messages[:start]) != _roles(self._known):
            start = 0  # The taskset has rewritten its history.
        self._known = list(messages)
        return _latest([*filter(None, map(_words, messages[start:]))], self._options.max_chars)


def _latest(texts: Sequence[str], most: int) -> str:
    """Return texts of at most `most` characters: the last one, and the end of those before it.

    A note has the number of characters that are cut.
    """
    whole = "\n\n".join(texts)
    before = "\n\n".join(texts[:-1])
    if not before or len(whole) <= most:
        return shortened(whole, most)
    last = texts[-1]
    cut = len(before) - max(0, most - len(last))
    valid = before.encode(errors="replace").decode()
    return f"[{cut} earlier characters] {valid[cut:]}\n\n{shortened(last, most)}"


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[tuple[Any, str]]:
    """Return role and text of each message."""
    return [(message["role"], _words(message)) for message in messages]


def _words(message: Mapping[str, Any]) -> str:
    """Return the text of a message; assistant messages are labelled."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", f"[{part.get('type')}]") for part in content)
    return f"Assistant: {content}" if message["role"] == "assistant" else content


FORM = 'Answer. Where there is an "Action:", what follows it is the answer.'


def make_spec(reference: str) -> EnvSpec:
    """Return the entry of the taskset that a file describes, named after the file.

    Raises: ConfigError: the file is wrong, or the taskset cannot be loaded.
    """
    path, options = read_description(reference, TasksetOptions)
    if not options.taskset.get("id"):
        raise ConfigError(f"{reference}: taskset.id must name a taskset")
    rule = rule_of(reference, options.min_reward, options.max_reward)

    async def count() -> tuple[int, int]:
        """Return the numbers of the taskset's training and test items."""
        player = await PlayerProcess.start(options, path.parent)
        await player.close()
        return player.num_items

    try:
        num_train, num_test = run_coroutine(count, timeout_s=options.start_timeout_s + 3 * CLOSE_S)
    except VerifiersFailure as error:
        raise ConfigError(f"{reference}: {error}") from error
    subset = SubsetSpec(num_train=num_train, num_test=num_test, max_turns=options.max_turns)
    shared = Shared(options=options, folder=path.parent, subset=subset, rule=rule)

    def make(_: Style) -> VerifiersEpisode:
        return VerifiersEpisode(shared)

    return EnvSpec(
        name=path.stem,
        subsets={SUBSET: subset},
        instruction=dict.fromkeys(Style, FORM),
        make=make,
        isolation=Isolation.TASK,  # The player's process already isolates the episodes.
        sessions_per_worker=options.max_sessions,
        step_timeout_s=2 * options.start_timeout_s + options.timeout_s + CLOSE_S,
        is_repeatable=False,
        start_score=rule.start_score,
        stop=shared.stop,
        stop_timeout_s=3 * CLOSE_S,
    )
