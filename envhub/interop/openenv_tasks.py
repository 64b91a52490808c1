"""OpenEnv's task routes: the items of an environment by split."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field

from common.text import counted, known_hint
from envhub.catalogue.registry import Registry
from envhub.env import EnvSpec, UnknownItem
from envhub.errors import UnknownEnv
from envhub.http.bodies import MAX_NAME_CHARS, BadBody, json_response, parse_body

MAX_LISTED = 1_000  # Maximum tasks of one answer; `num_tasks` counts all.
SPLITS = ("train", "test")


class SplitRequest(BaseModel):
    """Body of the task routes; unknown fields are ignored."""

    split: str = Field(max_length=MAX_NAME_CHARS)
    index: int | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The items of one split, in order."""

    kind: Literal["train", "test"]
    num: int
    item: Callable[[int], str]


def splits_of(spec: EnvSpec) -> dict[str, Split]:
    """Return an environment's splits by name.

    `train` and `test` hold the items of all its tasks, or of its first subset if it has no tasks.
    Each subset also has the splits `<subset>-train` and `<subset>-test`.
    """
    found: dict[str, Split] = {}
    subsets: dict[str, Split] = {}
    for kind in SPLITS:
        listed = [item for task in spec.tasks.values() for item in getattr(task, kind)]
        unique = [*dict.fromkeys(listed)]
        for name, subset in spec.subsets.items():
            num = subset.num_train if kind == "train" else subset.num_test
            if num:
                prefix = f"{name}-{kind}"
                subsets[prefix] = Split(
                    kind=kind, num=num, item=lambda i, prefix=prefix: f"{prefix}-{i}"
                )
        first = next((each for each in subsets.values() if each.kind == kind), None)
        if unique:
            found[kind] = Split(kind=kind, num=len(unique), item=unique.__getitem__)
        elif first is not None:
            found[kind] = first
    return found | subsets


def add_task_routes(app: FastAPI, registry: Registry) -> None:
    """Mount the routes that list tasks; each path names the environment twice, as in OpenEnv."""
    base = "/openenv/{env}"

    @app.get(f"{base}/list_environments", tags=["openenv"])
    async def list_environments(env: str) -> Response:
        return json_response([registry.spec(env).name])

    @app.get(f"{base}/{{name}}/splits", tags=["openenv"])
    async def list_splits(env: str, name: str) -> Response:
        found = splits_of(_same(registry, env, name))
        return json_response([{"name": each, "type": found[each].kind} for each in found])

    @app.post(f"{base}/{{name}}/tasks", tags=["openenv"])
    async def list_tasks(env: str, name: str, request: Request) -> Response:
        """List the tasks of a split."""
        body, split = await _asked(registry, env, name, request)
        tasks = [_task(body.split, split, i) for i in range(min(split.num, MAX_LISTED))]
        return json_response({"tasks": tasks, "env_name": env})

    @app.post(f"{base}/{{name}}/num_tasks", tags=["openenv"])
    async def num_tasks(env: str, name: str, request: Request) -> Response:
        _, split = await _asked(registry, env, name, request)
        return json_response({"num_tasks": split.num})

    @app.post(f"{base}/{{name}}/task", tags=["openenv"])
    async def get_task(env: str, name: str, request: Request) -> Response:
        """Return one task by its index."""
        body, split = await _asked(registry, env, name, request)
        if body.index is None:
            raise BadBody("index: Field required")
        return json_response({"task": _task(body.split, split, index_in(split, body.index))})

    @app.post(f"{base}/{{name}}/task_range", tags=["openenv"])
    async def get_task_range(env: str, name: str, request: Request) -> Response:
        """List the tasks of a range of indices."""
        body, split = await _asked(registry, env, name, request)
        wanted = range(split.num)[body.start : body.stop][:MAX_LISTED]
        return json_response({"tasks": [_task(body.split, split, i) for i in wanted]})


def _same(registry: Registry, env: str, name: str) -> EnvSpec:
    """Return the environment, which the path names twice. Raises: UnknownEnv."""
    if name.lower() != env.lower():
        raise UnknownEnv(f"no environment {name!r} at /openenv/{env}")
    return registry.spec(env)


async def _asked(
    registry: Registry, env: str, name: str, request: Request
) -> tuple[SplitRequest, Split]:
    """Return a request and its split. Raises: UnknownEnv, UnknownItem, BadBody."""
    spec = _same(registry, env, name)
    body = parse_body(SplitRequest, await request.body())
    return body, split_of(spec, body.split)


def split_of(spec: EnvSpec, name: str) -> Split:
    """Return a split by name. Raises: UnknownItem: no such split."""
    known = splits_of(spec)
    if name not in known:
        raise UnknownItem(f"no split {name!r}{known_hint(name, known)}")
    return known[name]


def index_in(split: Split, index: int) -> int:
    """Return an existing index, counted from the end if negative. Raises: UnknownItem."""
    if not -split.num <= index < split.num:
        num = counted(split.num, "task")
        raise UnknownItem(f"index {index} is out of range; the split has {num}")
    return index % split.num


def _task(name: str, split: Split, index: int) -> dict[str, Any]:
    """Return a task with its id, index and split."""
    return {"id": split.item(index), "index": index, "split": name}
