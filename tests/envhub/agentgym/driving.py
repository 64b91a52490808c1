"""What the laws of driven AgentGym servers share: a server, its environment and its episodes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from common.config.env import RemoteOptions
from envhub.agentgym.remote import RemoteEnv, make_spec
from envhub.env import EnvFailure, EnvSpec, Style
from tests.envhub.agentgym.agentgym_clients import serve_app

T = TypeVar("T")


NUM_LISTED = 3000
_FOLDER = TemporaryDirectory()


@cache
def first_items() -> str:
    """Return a list of a server's first items, so that `all-train-7` is its item 7."""
    path = Path(_FOLDER.name) / "first.json"
    path.write_text(json.dumps(list(range(NUM_LISTED))), encoding="utf-8")
    return str(path)


def spec_of(dialect: str, url: str, **changes: Any) -> EnvSpec:
    """Return the environment that a server is here; its items are its first ones."""
    items = first_items()
    named: dict[str, Any] = {"train_items": items, "test_items": items} | changes
    return make_spec(RemoteOptions(url=url, dialect=dialect, **named))


def made(spec: EnvSpec) -> RemoteEnv:
    """Return an episode that has not begun."""
    env = spec.make(Style.AGENTGYM)
    assert isinstance(env, RemoteEnv)
    return env


async def opened(spec: EnvSpec, index: int) -> RemoteEnv:
    """Return the episode of a training item; it is closed if that cannot begin."""
    env = made(spec)
    try:
        await env.reset(f"all-train-{index}", 0)
    except EnvFailure:
        await env.close()
        raise
    return env


async def stop(spec: EnvSpec) -> None:
    """End what the episodes of an environment share."""
    assert spec.stop is not None
    await spec.stop()


def drive(app: Any, dialect: str, play: Callable[[EnvSpec], Awaitable[T]], **changes: Any) -> T:
    """Return what `play` returns for the environment that a served application is."""

    async def driven(url: str) -> T:
        spec = spec_of(dialect, url, **changes)
        try:
            return await play(spec)
        finally:
            await stop(spec)

    with serve_app(app) as url:
        return asyncio.run(driven(url))
