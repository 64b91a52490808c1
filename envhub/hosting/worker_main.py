"""A worker process: runs episodes of one environment and answers the hub over a socket.

`worker.py` starts it as `python -m envhub.hosting.worker_main FD LEVEL NAME`. Synchronous
environments run in threads, one call per session at a time; asynchronous ones in the event loop.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import isawaitable
from typing import Any

from common.log import configure_logging
from common.text import kind_of
from envhub.catalogue.registry import load_spec, parse_options
from envhub.env import (
    EnvFailure,
    EnvSpec,
    ServiceDown,
    StepResult,
    Style,
    UnknownItem,
    check_finite,
    checked_reward,
)
from envhub.errors import EnvRaised, StateUnsaved
from envhub.hosting.env_calls import call_environment
from envhub.hosting.saved import can_save, state_text

logger = logging.getLogger(__name__)


MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")


def encode_frame(message: dict[str, Any]) -> bytes:
    """Return the bytes of one message.

    Raises: ValueError: longer than MAX_FRAME_BYTES, or not serializable as JSON.
    """
    try:
        # Lone surrogates are encoded unchanged; the hub repairs them in observations.
        body = json.dumps(message, ensure_ascii=False).encode(errors="surrogatepass")
    except TypeError as error:
        raise ValueError(f"a message is not JSON: {error}") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {len(body)} bytes; the maximum is {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the peer closed the connection.
        ValueError: not a valid message.
    """
    (num_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if num_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a message has {num_bytes} bytes; the maximum is {MAX_FRAME_BYTES}")
    return json.loads(await reader.readexactly(num_bytes))


MAX_THREADS = 32
DETAIL_CHARS = 2000
MAX_LOGGED = 50  # Kinds of failures that are logged.
# Errors that are reported as their text alone, without the exception's name.
REPORTED = (UnknownItem, EnvFailure)


class Host:
    """The episodes of one worker, by the hub's session numbers."""

    def __init__(self, env_name: str) -> None:
        self.name = env_name
        self._spec: EnvSpec | None = None
        self._envs: dict[int, Any] = {}
        self._logged: set[str] = set()  # Kinds of failures that are in the log.

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one call: a result or an error with its kind."""
        reply = {"id": message["id"]}
        handle = getattr(self, f"_{message['op']}")
        try:
            result = await call_environment(self.name, lambda: handle(message), passes=REPORTED)
        except UnknownItem as error:
            return reply | {"error": "unknown_item", "detail": str(error)}
        except ServiceDown as error:
            return {**self.refusal(message, str(error)), "error": "paused"}
        except EnvFailure as error:
            detail = f"{self.name}: {error}"
            self._log_first(detail, error)
        except EnvRaised as error:
            detail = str(error)
        else:
            return reply | {"result": result}
        return self.refusal(message, detail)

    def _log_first(self, detail: str, error: EnvFailure) -> None:
        """Log the first failure of each kind, with the place in the user's code that caused it."""
        kind = kind_of(detail)
        if kind not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(kind)
            logger.warning("environment failed: %s", detail, exc_info=error.__cause__)

    def refusal(self, message: dict[str, Any], detail: str) -> dict[str, Any]:
        """Return the reply for a failed call."""
        return {"id": message["id"], "error": "raised", "detail": detail[:DETAIL_CHARS]}

    async def _init(self, message: dict[str, Any]) -> int:
        """Load the environment; return the process id."""
        options, remote = parse_options(message["options"])
        self._spec = load_spec(message["reference"], options, remote)
        num_threads = min(self._spec.sessions_per_worker, MAX_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=self._spec.name)
        return os.getpid()

    async def _open(self, message: dict[str, Any]) -> list[Any]:
        """Begin an episode.

        Returns: [observation, state, first messages, own tools, whether it can be saved].
        """
        assert self._spec is not None
        env: Any = self._spec.make(Style(message["style"]))
        self._envs[message["session"]] = env
        observation = str(await self._run(env.reset, message["item_id"], message["seed"]))
        state = str(await self._run(env.state_text)) if hasattr(env, "state_text") else ""
        messages, tools = [
            await self._run(getattr(env, name)) if hasattr(env, name) else []
            for name in ("first_messages", "item_tools")
        ]
        return [observation, state, messages, tools, can_save(env)]

    async def _step(self, message: dict[str, Any]) -> dict[str, Any]:
        env = self._envs[message["session"]]
        return as_json(await self._run(env.step, message["action"]))

    async def _hint(self, message: dict[str, Any]) -> list[Any]:
        """Return the valid actions and the expert's action."""
        env = self._envs[message["session"]]
        valid_actions = await self._run(env.valid_actions)
        return [list(valid_actions), await self._run(env.expert_action)]

    async def _render(self, message: dict[str, Any]) -> list[str]:
        env = self._envs[message["session"]]
        return [str(await self._run(env.render)), str(await self._run(env.fingerprint))]

    async def _detail(self, message: dict[str, Any]) -> Any:
        detail = getattr(self._envs[message["session"]], "detail", None)
        return None if detail is None else await self._run(detail, message["what"])

    async def _save(self, message: dict[str, Any]) -> dict[str, str]:
        """Return the state of an episode as JSON, or the reason why it cannot be saved."""
        try:
            return {"text": state_text(await self._run(self._envs[message["session"]].save))}
        except StateUnsaved as error:
            return {"reason": str(error)}

    async def _load(self, message: dict[str, Any]) -> None:
        await self._run(self._envs[message["session"]].load, message["state"])

    async def _close(self, message: dict[str, Any]) -> None:
        """Close an episode."""
        env = self._envs.pop(message["session"], None)
        close = getattr(env, "close", None)
        if close is not None:
            await self._run(close)

    async def _stop(self, _: dict[str, Any]) -> None:
        """Close all episodes and their shared resources."""
        for number in list(self._envs):
            with contextlib.suppress(EnvRaised, *REPORTED):
                closing = partial(self._close, {"session": number})
                await call_environment(self.name, closing, passes=REPORTED)
        if self._spec is not None and self._spec.stop is not None:
            await self._spec.stop()

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Await a coroutine function here; run an ordinary function in a thread."""
        if asyncio.iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, function, *arguments)
        return await result if isawaitable(result) else result


def as_json(result: StepResult) -> dict[str, Any]:
    """Return a step's result in plain types. Raises: ValueError: a reward is not in [0, 1]."""
    reward = checked_reward("reward", result.reward)
    seat_rewards = result.seat_rewards
    if seat_rewards is not None:
        rewards = enumerate(seat_rewards)
        seat_rewards = [checked_reward(f"seat_rewards[{seat}]", each) for seat, each in rewards]
    score = None if result.score is None else float(result.score)
    check_finite("score", score)
    return {
        "observation": str(result.observation),
        "reward": reward,
        "done": bool(result.done),
        "is_valid": bool(result.is_valid),
        "is_success": bool(result.is_success),
        "score": score,
        "state": str(result.state),
        "is_truncated": bool(result.is_truncated),
        "metrics": result.metrics,
        "facts": result.facts,
        "seat": result.seat,
        "seat_rewards": seat_rewards,
    }


async def serve(connection: socket.socket, host: Host) -> None:
    """Answer the hub until it closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME_BYTES)
    running: set[asyncio.Task[None]] = set()

    async def reply(message: dict[str, Any]) -> None:
        """Answer one call."""
        answer = await host.answer(message)
        try:
            frame = encode_frame(answer)
        except ValueError as error:
            frame = encode_frame(host.refusal(message, f"{host.name}: {error}"))
        writer.write(frame)

    try:
        while True:
            task = asyncio.create_task(reply(await read_frame(reader)))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        # The hub has died or no longer needs this worker: kill the whole process group.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve on the socket whose descriptor is argument 1; log level and name follow."""
    descriptor = int(sys.argv[1])
    level = sys.argv[2]
    env_name = sys.argv[3]
    # Otherwise a JVM or browser would inherit it and keep it open.
    os.set_inheritable(descriptor, False)
    os.dup2(2, 1)  # Output of third-party code belongs in the log.
    configure_logging("worker", level)
    asyncio.run(serve(socket.socket(fileno=descriptor), Host(env_name)))


if __name__ == "__main__":
    main()
