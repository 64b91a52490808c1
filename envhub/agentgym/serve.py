"""AgentGym's routes: its unmodified clients play the hub's environments under /agentgym/<env>."""

import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, Field, ValidationError, create_model
from starlette.routing import Route

from common.errors import EnvError
from envhub.agentgym.dialects import DIALECTS, SCIWORLD, WEBARENA, WORDLE, Dialect, Faults
from envhub.agentgym.instance import EpisodeOver, InstanceUnknown, NotReset, ServedInstance
from envhub.agentgym.instances import Instances
from envhub.agentgym.replies import (
    create_reply,
    detail_reply,
    fault_reply,
    observation_reply,
    reset_reply,
    step_reply,
)
from envhub.catalogue.registry import LOADERS
from envhub.env import UnknownItem
from envhub.envs.wordle.words import vocabulary
from envhub.errors import CapacityFull, SessionUnknown
from envhub.http.bodies import body_of, json_response, validated
from envhub.http.parts import HubParts

# Built-in environments that use another environment's protocol under their own names.
LIKE = {"minisites": WEBARENA}
MAX_NUMBER = 2**53
MAX_PROBLEMS = 5
MAX_SHOWN_CHARS = 200
UNSEEN = "'observation'"  # Error of a query before the first reset: the missing key.

Number = Annotated[int, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]


def mount(hub: HubParts) -> None:
    """Mount /agentgym/<env>/... for each environment of the registry that AgentGym has.

    A client's base URL is the hub's URL + "/agentgym/<env>". Failures that the client did not cause
    (an environment's crash, its deadline, a full hub) are answered with the hub's own status codes.

    A remote AgentGym server is not served again.
    """
    registry = hub.registry
    for name, dialect in (DIALECTS | LIKE).items():
        is_ours = name in registry.names and name in LOADERS
        if is_ours and name != registry.remote.dialect:
            spec = registry.spec(name)
            instances = Instances(spec, hub.sessions, limits=hub.limits)
            words = vocabulary(registry.options.wordle.words) if dialect is WORDLE else ()
            handlers = _DialectRoutes(dialect, instances, words=words)
            _add_routes(hub.app, name, handlers)


def _add_routes(app: FastAPI, name: str, handlers: "_DialectRoutes") -> None:
    """Add the routes of one environment."""
    dialect = handlers.dialect
    base = f"/agentgym/{name}"
    instance: dict[str, Any] = {dialect.instance_key: (Number, ...)}
    # Only TextCraft does not require a data index.
    index: dict[str, Any] = {dialect.item_key: (Number, 0 if handlers.resets_at_create else ...)}
    bodies = {
        "create": (handlers.create, {key: (Number, ...) for key in dialect.create_body or ()}),
        "reset": (handlers.reset, instance | index),
        "step": (handlers.step, instance | {"action": (str, ...)}),
        "close": (handlers.close, instance),
    }
    for verb, (handle, fields) in bodies.items():
        model = create_model(f"{dialect.name}_{verb}", **fields)
        has_body = verb != "create" or dialect.create_body is not None
        path = f"{base}/{verb}"
        route = _route(handle, model if has_body else None)
        app.post(
            path,
            tags=["agentgym"],
            operation_id=f"agentgym_{name}_{verb}",
            openapi_extra=body_of(model) if has_body else None,
        )(route)
        if verb == "step":
            # Most requests are steps, and FastAPI's route takes twice as long as the step. A plain
            # route answers instead; FastAPI's describes it in the OpenAPI document.
            app.router.routes.insert(0, Route(path, route, methods=["POST"]))
    if dialect.has_render:
        model = create_model(f"{dialect.name}_render", **instance)
        app.post(f"{base}/render", tags=["agentgym"], openapi_extra=body_of(model))(
            _route(handlers.render, model)
        )
    for path, handle in handlers.queries().items():
        operation_id = f"agentgym_{name}_{path[1:] or 'greet'}"
        app.get(base + path, tags=["agentgym"], operation_id=operation_id)(handle)


def _route(
    handle: Callable[[Any], Awaitable[Response]], model: type[BaseModel] | None
) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that parses its body as `model`; with None it ignores the body."""

    async def route(request: Request) -> Response:
        """Answer a request with a validated body; 422 for an invalid one."""
        if model is None:
            return await handle(None)
        try:
            body = validated(model, await request.body())
        except ValidationError as error:
            return json_response({"detail": _problems(error)}, status=422)
        return await handle(body)

    return route


def _problems(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors of a body in the format of AgentGym's servers, which is FastAPI's."""
    problems = error.errors(include_url=False, include_context=False)[:MAX_PROBLEMS]
    return [
        {**each, "loc": ["body", *each["loc"]], "input": _shown(each["input"])} for each in problems
    ]


def _shown(value: object) -> object:
    """Return the received value, unless it is long or not JSON."""
    is_short = isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS
    return value if is_short or isinstance(value, bool | int | float | None) else None


class _DialectRoutes:
    """The handlers of one environment's routes, in the protocol of its dialect."""

    def __init__(
        self, dialect: Dialect, instances: Instances, *, words: tuple[str, ...] = ()
    ) -> None:
        self.dialect = dialect
        self._words = words  # Wordle's vocabulary.
        self._instances = instances
        self.resets_at_create = dialect.create_body == {}

    def queries(self) -> dict[str, Callable[..., Awaitable[Response]]]:
        """Return the handlers of GET routes by their names."""
        query = Query(alias=self.dialect.instance_key, ge=-MAX_NUMBER, le=MAX_NUMBER)

        async def greet() -> Response:
            """Answer that the server is ready."""
            is_plain = self.dialect.faults is not Faults.ERROR_KEY
            return json_response("ok" if is_plain else f"This is environment {self.dialect.title}.")

        def answer(number: int, reply: Callable[[ServedInstance], object]) -> Response:
            """Return the response to a query, or its refusal."""
            try:
                return json_response(reply(self._queried(number)))
            except (InstanceUnknown, EpisodeOver) as error:
                return self._refused(str(error), is_query=True)
            except NotReset:
                return self._refused(UNSEEN, is_query=True)

        async def observation(number: int = query) -> Response:
            return answer(number, partial(observation_reply, self.dialect))

        async def filtered_vocab(number: int = query) -> Response:
            return answer(number, lambda _: list(self._words))

        async def last_reply(number: int = query) -> Response:
            return answer(number, partial(detail_reply, self.dialect))

        async def available_actions() -> Response:
            return json_response(list(self.dialect.moves))

        queries: dict[str, Callable[..., Awaitable[Response]]]
        queries = {"": greet, "/observation": observation}
        queries |= {f"/{what}": self._detail_route(what, query) for what in self.dialect.details}
        if self.dialect.has_detail:
            queries["/detail"] = last_reply
        if self.dialect.moves:
            queries["/available_actions"] = available_actions
        if self.dialect is WORDLE:
            queries["/filtered_vocab"] = filtered_vocab
        return queries

    def _detail_route(self, what: str, query: Any) -> Callable[..., Awaitable[Response]]:
        """Return a route that answers with data of the environment itself."""

        async def details_route(number: int = query) -> Response:
            """Answer with data of the environment, in the form of the dialect."""
            try:
                instance = self._queried(number)
                details = await self._instances.detail(instance, what)
                if what == "state":
                    details |= {"environment_info": detail_reply(self.dialect, instance)}
            except (InstanceUnknown, EpisodeOver, SessionUnknown) as error:
                return self._refused(str(error), is_query=True)
            except NotReset:
                return self._refused(UNSEEN, is_query=True)
            is_alone = what in ("goals", "task_description", "object_tree")
            return json_response({what: details} if is_alone else details)

        return details_route

    async def render(self, body: BaseModel) -> Response:
        """Answer with a picture of the whole grid as a `data:` URL."""
        number = self._number(body)
        try:
            picture = await self._instances.detail(self._instances.find(number), "picture")
        except (InstanceUnknown, NotReset, SessionUnknown) as error:
            return self._refused(str(error) or UNSEEN, is_query=True)
        return json_response(picture)

    async def create(self, _: BaseModel | None) -> Response:
        """Create an instance."""
        number = await self._instances.add_in_turn()
        if not self.resets_at_create:
            return json_response(create_reply(self.dialect, number))
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._instances.close, number)
            instance = await self._instances.reset(number, number)
            undo.pop_all()
        return json_response(reset_reply(self.dialect, number, instance))

    async def reset(self, body: BaseModel) -> Response:
        """Begin an episode of an item."""
        number = self._number(body)
        index = getattr(body, self.dialect.item_key)
        # This dialect reports even failures of the hub in the observation.
        reports_in_text = self.dialect.faults is Faults.OBSERVATION
        try:
            instance = await self._instances.reset(number, index)
        except (InstanceUnknown, UnknownItem) as error:
            return self._refused(str(error), is_reset=True)
        except (CapacityFull, EnvError) as error:
            if not reports_in_text:
                raise
            return self._refused(str(error), is_reset=True)
        if self.dialect is SCIWORLD:  # The first observation may already have met a goal.
            instance.score = float(await self._instances.detail(instance, "score"))
        return json_response(reset_reply(self.dialect, number, instance))

    async def step(self, body: Any) -> Response:
        """Perform an action."""
        number = self._number(body)
        refuses = self.dialect.refuses_after_done
        try:
            instance, result = await self._instances.step(
                number, body.action, refuses_after_done=refuses
            )
        except NotReset:
            return self._refused(self.dialect.error_before_reset.format(number=number))
        except (InstanceUnknown, EpisodeOver) as error:
            return self._refused(str(error))
        return json_response(step_reply(self.dialect, instance, result))

    async def close(self, body: BaseModel) -> Response:
        """Close an instance."""
        number = self._number(body)
        is_closed = await self._instances.close(number)
        # This dialect confirms the close of any number.
        reports_in_text = self.dialect.faults is Faults.OBSERVATION
        return json_response({"closed": "closed"} if reports_in_text else is_closed)

    def _queried(self, number: int) -> ServedInstance:
        """Return the instance of a query. Raises: EpisodeOver, InstanceUnknown."""
        instance = self._instances.find(number)
        if self.dialect.refuses_after_done and instance.is_over:
            raise EpisodeOver(number)
        return instance

    def _number(self, body: BaseModel) -> int:
        """Return the number of the instance in a body."""
        return getattr(body, self.dialect.instance_key)

    def _refused(self, text: str, *, is_reset: bool = False, is_query: bool = False) -> Response:
        """Return a refusal in the form of the dialect."""
        faults = self.dialect.faults
        if faults is Faults.STATUS or (is_query and faults is Faults.OBSERVATION):
            return json_response({"detail": text}, status=404)
        return json_response(fault_reply(self.dialect, text, is_reset=is_reset))
