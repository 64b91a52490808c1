"""A worker process: holds episodes of one environment and answers the hub over a socket.

Started by `workers.py` as `python -m envhub.hosting.worker_main FD LEVEL`. Synchronous
environments run in threads, one call of a session at a time; asynchronous ones in the event loop.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import isawaitable
from typing import Any

from common.log import configure_logging
from envhub.catalogue.registry import load_spec, parse_options
from envhub.env import EnvFailure, EnvSpec, StepResult, Style, UnknownItem
from envhub.hosting.frames import MAX_FRAME_BYTES, encode_frame, read_frame

MAX_THREADS = 32
DETAIL_CHARS = 2000


class Host:
    """The episodes of one worker by the hub's numbers for them."""

    def __init__(self, spec: EnvSpec) -> None:
        self._spec = spec
        self._envs: dict[int, Any] = {}
        num_threads = min(spec.sessions_per_worker, MAX_THREADS)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=spec.name)

    async def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to one call: a result, or what kind of error came of it."""
        try:
            result = await getattr(self, f"_{message['op']}")(message)
        except UnknownItem as error:
            return {"id": message["id"], "error": "unknown_item", "detail": str(error)}
        except EnvFailure as error:
            return {"id": message["id"], "error": "failure", "detail": str(error)[:DETAIL_CHARS]}
        except Exception as error:
            logging.exception("environment raised op=%s", message["op"])
            detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS]
            return {"id": message["id"], "error": "raised", "detail": detail}
        return {"id": message["id"], "result": result}

    async def _open(self, message: dict[str, Any]) -> str:
        """Make the episode and return its first observation."""
        env: Any = self._spec.make(Style(message["style"]))
        self._envs[message["session"]] = env
        return str(await self._run(env.reset, message["item_id"], message["seed"]))

    async def _step(self, message: dict[str, Any]) -> dict[str, Any]:
        env = self._envs[message["session"]]
        return _as_json(await self._run(env.step, message["action"]))

    async def _hint(self, message: dict[str, Any]) -> list[Any]:
        env = self._envs[message["session"]]
        valid_actions = await self._run(env.valid_actions)
        return [list(valid_actions), await self._run(env.expert_action)]

    async def _render(self, message: dict[str, Any]) -> list[str]:
        env = self._envs[message["session"]]
        return [str(await self._run(env.render)), str(await self._run(env.fingerprint))]

    async def _close(self, message: dict[str, Any]) -> None:
        env = self._envs.pop(message["session"], None)
        close = getattr(env, "close", None)
        if close is not None:
            await self._run(close)

    async def _stop(self, _: dict[str, Any]) -> None:
        """Close all episodes and what they share."""
        for number in list(self._envs):
            with contextlib.suppress(Exception):
                await self._close({"session": number})
        if self._spec.stop is not None:
            await self._spec.stop()

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Call a coroutine function here and an ordinary one in a thread."""
        if asyncio.iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, function, *arguments)
        return await result if isawaitable(result) else result


def _as_json(result: StepResult) -> dict[str, Any]:
    """Return a step's result in plain types.

    Raises:
        ValueError: the reward is not in [0, 1].
    """
    reward = float(result.reward)
    if not (math.isfinite(reward) and 0.0 <= reward <= 1.0):
        raise ValueError(f"reward {reward} is not in [0, 1]")
    return {
        "observation": str(result.observation),
        "reward": reward,
        "done": bool(result.done),
        "is_valid": bool(result.is_valid),
    }


async def serve(connection: socket.socket) -> None:
    """Answer the hub until it says stop or is gone."""
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_FRAME_BYTES)
    running: set[asyncio.Task[None]] = set()
    host: Host | None = None

    async def reply(message: dict[str, Any]) -> None:
        assert host is not None
        answer = await host.answer(message)
        try:
            frame = encode_frame(answer)
        except ValueError as error:
            frame = encode_frame({"id": message["id"], "error": "raised", "detail": str(error)})
        writer.write(frame)

    try:
        while True:
            message = await read_frame(reader)
            if message["op"] == "init":
                host = _make_host(message, writer)
                continue
            task = asyncio.create_task(reply(message))
            running.add(task)
            task.add_done_callback(running.discard)
    except (asyncio.IncompleteReadError, ConnectionError):
        # The hub is gone, or has finished with us: whatever runs below us goes as well.
        os.killpg(os.getpgrp(), signal.SIGKILL)


def _make_host(message: dict[str, Any], writer: asyncio.StreamWriter) -> Host | None:
    """Load the environment; tell the hub how that went."""
    try:
        options, remote = parse_options(message["options"])
        host = Host(load_spec(message["reference"], options, remote))
    except Exception as error:
        logging.exception("environment does not load reference=%s", message["reference"])
        detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS]
        writer.write(encode_frame({"id": message["id"], "error": "failure", "detail": detail}))
        return None
    writer.write(encode_frame({"id": message["id"], "result": os.getpid()}))
    return host


def main() -> None:
    """Serve on the socket whose number is the first argument; the second is the log's level."""
    descriptor, level = int(sys.argv[1]), sys.argv[2]
    os.set_inheritable(descriptor, False)  # else a JVM or browser would keep it open
    os.dup2(2, 1)  # what third-party code prints belongs in the log
    configure_logging("worker", level)
    asyncio.run(serve(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
