"""AgentGym's routes: its unmodified clients play the hub's environments under /agentgym/<env>."""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, Field, ValidationError, create_model
from starlette.routing import Route

from common.errors import EnvError
from envhub.agentgym.dialects import DIALECTS, SCIWORLD, WEBARENA, WORDLE, Dialect, Faults
from envhub.agentgym.replies import (
    EpisodeOver,
    InstanceUnknown,
    NotReset,
    ServedInstance,
    create_reply,
    detail_reply,
    fault_reply,
    observation_reply,
    reset_reply,
    step_reply,
)
from envhub.catalogue.registry import LOADERS
from envhub.env import EnvSpec, Isolation, StepResult, Style, UnknownItem
from envhub.envs.wordle.env import vocabulary
from envhub.errors import CapacityFull, EnvRaised, SessionUnknown
from envhub.hosting.expiry import ExpiringTable
from envhub.hosting.sessions import Sessions
from envhub.http.bodies import body_of, json_response, validated
from envhub.http.parts import AgentGymLimits, HubParts

T = TypeVar("T")

POLL_S = 0.1  # Seconds between two attempts to get a free session.
MAX_ASIDE = 4_096  # Maximum instances of an environment whose episodes can be suspended.
# Maximum characters of an episode's actions; a longer episode keeps its session.
MAX_REPEATED_CHARS = 100_000
ID_BITS = 53  # Bits that a JSON number represents exactly everywhere.


class Instances:
    """The instances of one environment, each with at most one session of the hub.

    Example: two requests step instance 5 at the same time. The second waits for the first, then
    takes the next step. A third request closes 5: it waits as well, and later requests find no
    instance 5.

    An instance without requests lives `limits.idle_s`; expired instances are removed at the next
    create or reset. If no session is free, requests wait in order, at most `limits.queue_s`.
    Instances with an ended episode give up their sessions for them.

    If sessions occupy worker processes and the environment is repeatable, an idle episode is
    suspended in favour of a requested one. At its next step its actions are repeated in a new
    session. Thus 8 sessions can serve 128 instances, slowly.
    """

    def __init__(self, spec: EnvSpec, sessions: Sessions, *, limits: AgentGymLimits) -> None:
        self._spec = spec
        self._sessions = sessions
        self._limits = limits
        self._turns: deque[object] = deque()  # Requests that wait for an instance, in order.
        self._puts_aside = spec.is_repeatable and spec.isolation is not Isolation.INLINE
        # The order selects the episode to suspend.
        self._instances: ExpiringTable[int, ServedInstance] = ExpiringTable(
            limits.idle_s, sessions.now_s
        )

    def __len__(self) -> int:
        return len(self._instances)

    def add(self) -> int:
        """Return the number of a new instance; it is random, since only the number protects it.

        Raises:
            CapacityFull: no session is available now. AgentGym's trainer repeats a refused create,
                but a refused reset ends its run.
        """
        capacity = self._sessions.placement.capacity(self._spec)
        num_held = sum(instance.holds_place for instance in self._instances)
        num_used = max(num_held, self._sessions.num_live[self._spec.name])
        if self._puts_aside:
            capacity = MAX_ASIDE
            num_used = len(self._instances)
        if num_used >= capacity:
            text = f"all sessions are in use, at most {capacity}"
            raise CapacityFull(f"{self._spec.name}: {text}")
        number = secrets.randbits(ID_BITS)
        self._instances.put(number, ServedInstance())
        return number

    async def add_in_turn(self) -> int:
        """Do as `add`, after all earlier requests. Raises: CapacityFull: the wait timed out."""
        turn = object()
        self._turns.append(turn)

        async def add() -> int:
            """Add an instance if no earlier request waits. Raises: CapacityFull."""
            if self._turns[0] is not turn:
                raise CapacityFull(f"{self._spec.name}: other requests already wait for a session")
            return self.add()

        try:
            return await self._when_free(add)
        finally:
            self._turns.remove(turn)

    async def _when_free(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt` once it gets a free session.

        Raises: CapacityFull: no session became free in time; the text names the key that adds some.
        """
        began_s = time.monotonic()
        queue_s = self._limits.queue_s
        while True:
            await self.expire()
            try:
                return await attempt()
            except CapacityFull as error:
                if await self._free_ended() or await self._put_aside():
                    continue
                if time.monotonic() - began_s >= queue_s:
                    raise CapacityFull(f"{error}{self._remedy()}") from error
            await asyncio.sleep(min(POLL_S, queue_s))

    async def _free_ended(self) -> bool:
        """End the session of the oldest ended episode; False if there is none.

        An instance with a locked lock is in use by a request.
        """
        for instance in self._instances:
            if instance.is_over and instance.session_id and not instance.lock.locked():
                await self._end_session(instance)
                return True
        return False

    async def _put_aside(self) -> bool:
        """Suspend the least recently used episode: end its session. False if there is none."""
        for instance in self._instances if self._puts_aside else ():
            is_idle = instance.session_id is not None and not instance.lock.locked()
            if is_idle and instance.performed is not None:
                async with instance.lock:
                    await self._end_session(instance)
                return True
        return False

    async def _resume(self, instance: ServedInstance) -> str:
        """Resume a suspended episode by repeating its actions; return its session.

        Raises: CapacityFull; EnvRaised: the repetition gave other results.
        """
        session_id, first = await self._begin(instance.item_id)
        last: StepResult | None = None
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self._delete, session_id)
            for action in instance.performed or ():
                last = await self._sessions.step(session_id, action)
            if first != instance.first_observation or last != instance.answer:
                instance.item_id = ""
                raise EnvRaised(
                    f"{self._spec.name}: the replay of a suspended episode had another result."
                    f" Raise {self._key}, so that each episode keeps its session."
                )
            undo.pop_all()
        instance.session_id = session_id
        return session_id

    async def _begin(self, item_id: str) -> tuple[str, str]:
        """Return a new session of an item and its first observation."""
        name = self._spec.name
        return await self._when_free(
            lambda: self._sessions.create(name, item_id, seed=0, style=Style.AGENTGYM)
        )

    @property
    def _key(self) -> str:
        """Return the configuration key of the limit on sessions."""
        return self._sessions.placement.limiting_key(self._spec) or "envhub.capacity"

    def _remedy(self) -> str:
        """Return the end of an error about too many instances."""
        limits = self._limits
        key = self._key
        return (
            f", and none was closed within envhub.agentgym_queue_s={limits.queue_s:g}."
            f" Raise {key}, let clients close their finished instances, or lower"
            f" envhub.agentgym_idle_s={limits.idle_s:g}, which closes idle instances."
        )

    def find(self, number: int) -> ServedInstance:
        """Return an instance and restart its idle time. Raises: InstanceUnknown."""
        instance = self._instances.find(number)
        if instance is None:
            raise InstanceUnknown(f"The id {number} is not valid.")
        return instance

    async def reset(self, number: int, index: int) -> ServedInstance:
        """Start the episode of AgentGym's data index and return its instance.

        Raises: InstanceUnknown, UnknownItem, and the errors of `Sessions.create`.
        """
        instance = self.find(number)
        async with instance.lock:
            await self._end_session(instance)
            instance.item_id = ""
            if self._spec.from_agentgym is None:
                raise UnknownItem(f"{self._spec.name} does not support AgentGym's data indices")
            item_id = self._spec.from_agentgym(index)
            instance.session_id, instance.first_observation = await self._begin(item_id)
            instance.item_id, instance.performed = item_id, [] if self._puts_aside else None
            instance.answer, instance.score, instance.reward = None, 0.0, 0.0
            if number not in self._instances:  # The instance was closed during the reset.
                await self._end_session(instance)
                raise InstanceUnknown(f"The id {number} is not valid.")
            return instance

    async def step(
        self, number: int, action: str, *, refuses_after_done: bool
    ) -> tuple[ServedInstance, StepResult]:
        """Perform a step and return its result; after the end, return the last result again.

        Raises: InstanceUnknown, NotReset, EpisodeOver, and the errors of `Sessions.step`.
        """
        instance = self.find(number)
        async with instance.lock:
            if instance.answer is not None and instance.is_over:
                if refuses_after_done:
                    raise EpisodeOver(number)
                return instance, instance.answer
            try:
                result = await self._sessions.step(await self._session_of(instance), action)
            except SessionUnknown as error:
                instance.session_id, instance.item_id = None, ""
                raise InstanceUnknown(
                    f"The episode of instance {number} no longer exists."
                ) from error
            instance.answer = result
            if instance.performed is not None:
                instance.performed.append(action)
                if sum(map(len, instance.performed)) > MAX_REPEATED_CHARS:
                    instance.performed = None
            return instance, result

    async def _session_of(self, instance: ServedInstance) -> str:
        """Return the session of an instance that the caller holds. Raises: NotReset."""
        if not instance.item_id:
            raise NotReset
        return instance.session_id or await self._resume(instance)

    async def detail(self, instance: ServedInstance, what: str) -> Any:
        """Return additional data of an environment for AgentGym's pages; None if it has none.

        Raises: NotReset: there is no episode.
        """
        async with instance.lock:
            return await self._sessions.detail(await self._session_of(instance), what)

    async def close(self, number: int) -> bool:
        """End an instance; False if it does not exist."""
        instance = self._instances.pop(number)
        if instance is None:
            return False
        async with instance.lock:
            await self._end_session(instance)
        return True

    async def expire(self) -> None:
        """End the instances that are idle for too long."""
        gone = self._instances.pop_expired(keeps=lambda each: each.lock.locked())
        for instance in gone:
            await self._end_session(instance)
        if gone:
            await self._sessions.expire()  # Sessions that were idle as long.

    async def _end_session(self, instance: ServedInstance) -> None:
        """End the hub's session of an instance, if it has one."""
        if instance.session_id is None:
            return
        session_id, instance.session_id = instance.session_id, None
        await self._delete(session_id)

    async def _delete(self, session_id: str) -> None:
        """Delete a session, which may have ended by itself."""
        with contextlib.suppress(SessionUnknown):  # Its own idle limit may have ended it already.
            await self._sessions.delete(session_id)


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
        {**problem, "loc": ["body", *problem["loc"]], "input": _shown(problem["input"])}
        for problem in problems
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
