"""The actor's side of the environment hub: one HTTP session per episode, retries that are safe."""

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from actor.rollout.presence import answers, stay
from common.errors import EnvError, EnvTimeout, HubLost
from common.text import valid_text

logger = logging.getLogger(__name__)

NUM_TRIES = 4
BACKOFF_S = 0.25  # doubles per try
MIN_RETRY_S = 0.05  # so that "at once" is no busy loop
MAX_ANSWER_BYTES = 64 << 20
SESSION_PATH = "/v1/sessions/"
BATCH_PATH = "/v1/step/batch"
MAX_BATCH = 32  # steps in a request; the first ones are answered while the last ones are asked for

Request = Callable[[str, str, object], Awaitable[Any]]  # method, path, body -> parsed answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    observation: str
    reward: float  # [0, 1]
    done: bool
    is_valid: bool  # False if the text was no executable action
    is_success: bool  # the episode has ended solved
    state: str = ""  # of the environment after it; "": it tells none


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """What a scripted policy may know."""

    valid_actions: list[str]
    expert_action: str | None  # None when the expert knows no way


class BearerClient:
    """A pool of HTTP connections whose requests carry a bearer token, if there is one."""

    def __init__(self, *, token: str | None, timeout_s: float) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()


class StepBatches:
    """Steps that are asked for at the same time, in one request. For one event loop.

    An engine's step ends the turns of many episodes at once. A request of its own for each of them
    costs the actor and the hub more than a quick environment does.

    Example: three sessions act before the loop turns -> one POST /v1/step/batch, three answers.
    """

    def __init__(self, request: Request) -> None:
        """Make one whose requests go by `request`, that of `HubClient`."""
        self._request = request
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def step(self, session_id: str, action: str, seq: int) -> Any:
        """Return the answer to one step. Raises: EnvError, EnvTimeout."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        entry = {"session_id": session_id, "action": action, "seq": seq}
        self._waiting.append((entry, answer))
        if len(self._waiting) == 1:
            loop.call_soon(self._send_all)  # behind all that act in this turn of the loop
        return await answer

    def _send_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for start in range(0, len(waiting), MAX_BATCH):
            task = asyncio.create_task(self._send(waiting[start : start + MAX_BATCH]))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        try:
            replies = await self._request("POST", BATCH_PATH, [entry for entry, _ in batch])
            if not isinstance(replies, list) or len(replies) != len(batch):
                shown = f"{replies!r:.100}"
                raise EnvError(f"POST {BATCH_PATH}: answers {len(batch)} steps with {shown}")
            statuses = [_told(reply, "status", int, path=BATCH_PATH) for reply in replies]
        except EnvError as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), reply, status in zip(batch, replies, statuses, strict=True):
            if answer.done():  # its episode has been given up
                continue
            if failure := _failure("POST", BATCH_PATH, status, str(reply.get("detail"))):
                answer.set_exception(failure)
            else:
                answer.set_result(reply)


class HubClient(BearerClient):
    """A pool of connections to one hub.

    Example:
        async with HubClient(url, token=token, timeout_s=60) as hub:
            session = await hub.open("babyai", "GoToLocal-train-3", seed=0, style="compact")
            result = await session.step("go to red ball 1")
    """

    def __init__(self, url: str, *, token: str | None, timeout_s: float, owner: str = "") -> None:
        """Connect to nothing yet; the sessions of an `owner` end with its `stay`."""
        super().__init__(token=token, timeout_s=timeout_s)
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._owner = {"owner": owner} if owner else {}
        self.answers = partial(answers, self._http, self._url)
        self.stay = partial(stay, self._http, self._url, owner)
        self.is_lost = False  # the last request found nobody
        self.on_lost: Callable[[HubLost], None] = lambda _: None
        self._batches = StepBatches(self.request)

    async def open(
        self, env: str, item_id: str, *, seed: int, style: str, is_quick: bool = False
    ) -> "HubSession":
        """Start an episode; waits while the hub is full.

        Args:
            is_quick: its steps may go together with others', which are answered together.

        Raises: EnvError, EnvTimeout.
        """
        body = {"env": env, "item_id": item_id, "seed": seed, "style": style, **self._owner}
        path = "/v1/sessions"
        reply = await self.request("POST", path, body)
        session_id = valid_text(_told(reply, "session_id", str, path=path))
        observation = _told(reply, "observation", str, path=path)
        batches = self._batches if is_quick else None
        session = HubSession(self, session_id, observation, batches)
        session.first_state = str(reply.get("state") or "")
        return session

    async def request(self, method: str, path: str, body: object) -> Any:
        """Send one request, again after a lost connection or, until the deadline, a 429.

        A repeat is safe: a step carries its sequence number, and a session opened by a lost
        answer expires by itself.

        Raises:
            EnvTimeout: no answer within `timeout_s`, or a 504 from the hub.
            HubLost: the hub cannot be reached, does not know the session, or is about to stop.
            EnvError: the hub refused or failed.
        """
        failure, num_lost = "", 0
        try:
            async with asyncio.timeout(self._timeout_s):
                while num_lost < NUM_TRIES:
                    try:
                        reply = await self._once(method, path, body)
                    except aiohttp.ClientError as error:
                        failure = f"{type(error).__name__}: {error}"
                        num_lost += 1
                        if num_lost < NUM_TRIES:
                            await asyncio.sleep(BACKOFF_S * 2 ** (num_lost - 1))
                        continue
                    if reply is not None:
                        self.is_lost = False
                        return reply
                    failure = "the hub is full (429)"
        except EnvTimeout:
            raise
        except TimeoutError as error:
            failure = f"no answer within {self._timeout_s:g}s; {failure}"
            if await self.answers():
                raise EnvTimeout(f"{method} {path}: {failure}") from error
        self.is_lost = True
        lost = HubLost(f"{method} {path}: {failure}, {max(1, num_lost)} tries")
        self.on_lost(lost)
        raise lost

    async def _once(self, method: str, path: str, body: object) -> Any:
        """Return the parsed answer; None after waiting out a 429."""
        async with self._http.request(method, self._url + path, json=body) as response:
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > MAX_ANSWER_BYTES:
                    raise EnvError(f"{method} {path}: answers more than {MAX_ANSWER_BYTES} bytes")
            if response.status == 429:
                wait_s = retry_after_s(response.headers, unsaid_s=1.0)
                await asyncio.sleep(max(MIN_RETRY_S, wait_s))
                return None
            shown = repr(bytes(text[:300]))
            if failure := _failure(method, path, response.status, shown):
                raise failure
            try:
                return (json.loads(text) if text else {}) or {}  # None is for a 429
            except (ValueError, RecursionError) as error:
                raise EnvError(f"{method} {path}: answers what is no JSON: {shown}") from error


def retry_after_s(headers: Mapping[str, str], *, unsaid_s: float = 0.0) -> float:
    """Return the seconds that Retry-After asks for; `unsaid_s` if it says none that can be read."""
    try:
        asked_s = float(headers.get("Retry-After", unsaid_s))
    except ValueError:  # a date
        asked_s = unsaid_s
    return asked_s if math.isfinite(asked_s) and asked_s >= 0 else unsaid_s


def _told(reply: Any, name: str, *kinds: type, path: str) -> Any:
    """Return a field of a hub's answer. Raises: EnvError: it is not there, or of another type."""
    value = reply.get(name) if isinstance(reply, dict) else None
    if type(value) not in kinds:
        words = " or ".join(kind.__name__ for kind in kinds)
        raise EnvError(f"{path}: answers {name}={value!r:.100}, not {words}")
    return value


def _failure(method: str, path: str, status: int, text: str) -> EnvError | None:
    """Return what a status means; None if all is well."""
    if status == 504:
        return EnvTimeout(f"{method} {path}: {text:.300}")
    is_gone = status == 404 and path.startswith((SESSION_PATH, BATCH_PATH))
    kind = HubLost if is_gone or status == 503 else EnvError
    return kind(f"{method} {path}: HTTP {status} {text:.300}") if status >= 400 else None


class HubSession:
    """One episode at the hub. Not for use by two tasks at once."""

    def __init__(
        self, hub: HubClient, session_id: str, observation: str, batches: StepBatches | None
    ) -> None:
        self._hub = hub
        self._session_id = session_id
        self._path = f"{SESSION_PATH}{quote(session_id, safe='')}"
        self._batches = batches
        self._seq = 0
        self.first_observation = observation
        self.first_state = ""  # "": the environment tells none

    async def step(self, action: str) -> StepResult:
        """Act. Raises: EnvError, EnvTimeout."""
        self._seq += 1
        path = f"{self._path}/step"
        if self._batches is not None:
            reply = await self._batches.step(self._session_id, action, self._seq)
        else:
            reply = await self._hub.request("POST", path, {"action": action, "seq": self._seq})
        reward = _told(reply, "reward", float, int, path=path)
        if not 0.0 <= reward <= 1.0:
            raise EnvError(f"{path}: answers reward={reward!r:.100}, which is not in [0, 1]")
        done = _told(reply, "done", bool, path=path)
        reply.setdefault("is_success", done and reward >= 1.0)  # hubs of others may not say it
        return StepResult(
            observation=_told(reply, "observation", str, path=path),
            reward=float(reward),
            done=done,
            is_valid=_told(reply, "is_valid", bool, path=path),
            is_success=_told(reply, "is_success", bool, path=path),
            state=str(reply.get("state") or ""),  # hubs of other makers tell none
        )

    async def hint(self) -> Hint:
        """Return what a scripted policy may know. Raises: EnvError, EnvTimeout."""
        path = f"{self._path}/hint"
        reply = await self._hub.request("GET", path, None)
        actions = [valid_text(str(each)) for each in _told(reply, "valid_actions", list, path=path)]
        expert = _told(reply, "expert_action", str, type(None), path=path)
        return Hint(
            valid_actions=actions, expert_action=None if expert is None else valid_text(expert)
        )

    async def close(self) -> None:
        """Give the session back. One that is already gone, or a hub that is, is no error."""
        if self._hub.is_lost:
            return
        try:
            await self._hub.request("DELETE", self._path, None)
        except EnvError as error:
            logger.debug("close failed path=%s reason=%s", self._path, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What a hub serves, worded in one style."""

    hub: HubClient
    style: str  # how observations are worded
    instructions: dict[str, dict[str, str]]  # environment -> style -> text
    answers: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    quick: frozenset[str] = frozenset()  # environments whose steps take no time to speak of

    @classmethod
    async def of(cls, hub: HubClient, *, style: str) -> "Environments":
        """Return those of a hub. Raises: EnvError, EnvTimeout."""
        path = "/v1/envs"
        catalogue = await hub.request("GET", path, None)
        if not isinstance(catalogue, dict):
            raise EnvError(f"{path}: answers {catalogue!r:.100}, not environments by name")
        texts = {
            name: {k: str(v) for k, v in _told(entry, "instruction", dict, path=path).items()}
            for name, entry in catalogue.items()
        }
        answers = {
            name: {k: str(v) for k, v in (entry.get("acknowledgement") or {}).items()}
            for name, entry in catalogue.items()
        }
        quick = frozenset(name for name, entry in catalogue.items() if entry.get("is_quick"))
        return cls(hub=hub, style=style, instructions=texts, answers=answers, quick=quick)

    def instruction(self, env: str) -> str:
        """Return the text that goes before the first observation, "" if there is none."""
        return self.instructions.get(env, {}).get(self.style, "")

    def acknowledgement(self, env: str) -> str:
        """Return the agent's canned answer to the instruction, "" where both are one message."""
        return self.answers.get(env, {}).get(self.style, "")

    async def open(self, env: str, item_id: str, *, seed: int) -> HubSession:
        """Start an episode. Raises: EnvError, EnvTimeout."""
        is_quick = env in self.quick
        return await self.hub.open(env, item_id, seed=seed, style=self.style, is_quick=is_quick)
