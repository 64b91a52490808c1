"""The actor's side of the environment hub: one HTTP session per episode, retries that are safe."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from common.errors import EnvError, EnvTimeout

logger = logging.getLogger(__name__)

NUM_TRIES = 4
BACKOFF_S = 0.25  # doubles per try
BATCH_PATH = "/v1/step/batch"
MAX_BATCH = 32  # steps in a request; the first ones are answered while the last ones are asked for

Request = Callable[[str, str, object], Awaitable[Any]]  # method, path, body -> parsed answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    observation: str
    reward: float  # [0, 1]
    done: bool
    is_valid: bool  # False if the text was no executable action


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
            if len(replies) != len(batch):
                raise EnvError(f"POST {BATCH_PATH}: {len(replies)} answers to {len(batch)} steps")
        except EnvError as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), reply in zip(batch, replies, strict=True):
            if answer.done():  # its episode has been given up
                continue
            if failure := _failure("POST", BATCH_PATH, reply["status"], str(reply.get("detail"))):
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

    def __init__(self, url: str, *, token: str | None, timeout_s: float) -> None:
        super().__init__(token=token, timeout_s=timeout_s)
        self._url = url.rstrip("/")
        self._timeout_s = timeout_s
        self._batches = StepBatches(self.request)

    async def open(
        self, env: str, item_id: str, *, seed: int, style: str, is_quick: bool = False
    ) -> "HubSession":
        """Start an episode; waits while the hub is full.

        Args:
            is_quick: its steps may go together with others', which are answered together.

        Raises: EnvError, EnvTimeout.
        """
        body = {"env": env, "item_id": item_id, "seed": seed, "style": style}
        reply = await self.request("POST", "/v1/sessions", body)
        batches = self._batches if is_quick else None
        return HubSession(self, reply["session_id"], reply["observation"], batches)

    async def request(self, method: str, path: str, body: object) -> Any:
        """Send one request, again after a lost connection or, until the deadline, a 429.

        A repeat is safe: a step carries its sequence number, and a session opened by a lost
        answer expires by itself.

        Raises:
            EnvTimeout: no answer within `timeout_s`, or a 504 from the hub.
            EnvError: the hub refused or failed, or cannot be reached.
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
                        return reply
                    failure = "the hub is full (429)"
        except EnvTimeout:
            raise
        except TimeoutError as error:
            raise EnvTimeout(
                f"{method} {path}: no answer within {self._timeout_s:g}s; {failure}"
            ) from error
        raise EnvError(f"{method} {path}: {failure}, {NUM_TRIES} tries")

    async def _once(self, method: str, path: str, body: object) -> Any:
        """Return the parsed answer; None after waiting out a 429."""
        async with self._http.request(method, self._url + path, json=body) as response:
            text = await response.read()
            if response.status == 429:
                await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
                return None
            if failure := _failure(method, path, response.status, repr(text[:300])):
                raise failure
            return json.loads(text) if text else {}


def _failure(method: str, path: str, status: int, text: str) -> EnvError | None:
    """Return what a status means; None if all is well."""
    if status == 504:
        return EnvTimeout(f"{method} {path}: {text:.300}")
    return EnvError(f"{method} {path}: HTTP {status} {text:.300}") if status >= 400 else None


class HubSession:
    """One episode at the hub. Not for use by two tasks at once."""

    def __init__(
        self, hub: HubClient, session_id: str, observation: str, batches: StepBatches | None
    ) -> None:
        self._hub = hub
        self._session_id = session_id
        self._path = f"/v1/sessions/{session_id}"
        self._batches = batches
        self._seq = 0
        self.first_observation = observation

    async def step(self, action: str) -> StepResult:
        """Act. Raises: EnvError, EnvTimeout."""
        self._seq += 1
        if self._batches is not None:
            reply = await self._batches.step(self._session_id, action, self._seq)
        else:
            body = {"action": action, "seq": self._seq}
            reply = await self._hub.request("POST", f"{self._path}/step", body)
        return StepResult(
            observation=reply["observation"],
            reward=float(reply["reward"]),
            done=bool(reply["done"]),
            is_valid=bool(reply["is_valid"]),
        )

    async def hint(self) -> Hint:
        """Return what a scripted policy may know. Raises: EnvError, EnvTimeout."""
        reply = await self._hub.request("GET", f"{self._path}/hint", None)
        return Hint(valid_actions=reply["valid_actions"], expert_action=reply["expert_action"])

    async def close(self) -> None:
        """Give the session back. One that is already gone, or a hub that is, is no error."""
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
    quick: frozenset[str] = frozenset()  # environments whose steps take no time to speak of

    @classmethod
    async def of(cls, hub: HubClient, *, style: str) -> "Environments":
        """Return those of a hub. Raises: EnvError, EnvTimeout."""
        catalogue = await hub.request("GET", "/v1/envs", None)
        texts = {name: entry["instruction"] for name, entry in catalogue.items()}
        quick = frozenset(name for name, entry in catalogue.items() if entry.get("is_quick"))
        return cls(hub=hub, style=style, instructions=texts, quick=quick)

    def instruction(self, env: str) -> str:
        """Return the text that goes before the first observation, "" if there is none."""
        return self.instructions.get(env, {}).get(self.style, "")

    async def open(self, env: str, item_id: str, *, seed: int) -> HubSession:
        """Start an episode. Raises: EnvError, EnvTimeout."""
        is_quick = env in self.quick
        return await self.hub.open(env, item_id, seed=seed, style=self.style, is_quick=is_quick)
