"""Communication with an AgentGym server: requests, failures and instances."""

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from common.config.env import RemoteOptions
from common.http.proxies import BY_PROXY, ProxyFailed, route_note, without_login
from common.http.sessions import open_session
from common.text import json_bytes
from envhub.agentgym.dialects import Dialect, Faults
from envhub.env import EnvFailure

logger = logging.getLogger(__name__)

# Some servers create instances one after another, each within many seconds.
CREATE_TIMEOUT_S = 300.0
MAX_SHOWN_CHARS = 200
NO_ROUTE = (404, 405)
JSON_HEADERS = {"Content-Type": "application/json"}


class RemoteFailure(EnvFailure):
    """The server failed; the text names it. `status` is its HTTP status; None: no answer."""

    def __init__(self, text: str, *, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_of_action(self) -> bool:
        """Whether the server refuses the action of a step: too large, or not decodable."""
        return self.status == 413 or (self.status == 422 and '"action"' in str(self))


@dataclass(slots=True, eq=False)
class RemoteInstance:
    """An instance on the server while an episode uses it.

    `is_lost`: the server assigned its number to another client, as a restarted server does.
    """

    number: int
    is_lost: bool = False


class AgentGymConnection:
    """Requests to one server. No request is repeated: a step may have run even without an answer.

    If a server cannot close instances, or creates them slowly, instances are kept after an episode
    and reused. Thus there are never more instances than concurrent episodes.

    Example: a server takes 20 s for each instance and creates one at a time. Of four episodes with
    a reset limit of 60 s, the last one gives up. Its instance is ready after 80 s and is used by
    the next episode.
    """

    def __init__(self, dialect: Dialect, options: RemoteOptions) -> None:
        self.dialect = dialect
        self._url = options.url.rstrip("/")
        self._timeout_s = options.timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._kept: list[int] = []
        self._late: list[asyncio.Task[int]] = []  # Pending creates whose episodes have given up.
        self._used: dict[int, RemoteInstance] = {}
        self._places = asyncio.Semaphore(max_sessions(dialect, options))
        self._makers = asyncio.Semaphore(1 if dialect.halts_to_create else options.max_sessions)
        self._can_close = dialect.has_close

    async def take(self, *, is_fresh: bool = False) -> tuple[RemoteInstance, bool]:
        """Return an unused instance, and whether it is an old one; never an old one if `is_fresh`.

        Waits while the maximum number of instances is in use.

        Raises: RemoteFailure: the server creates none.
        """
        await self._places.acquire()
        with contextlib.ExitStack() as undo:
            undo.callback(self._places.release)
            is_kept = bool(self._kept) and not is_fresh
            is_old = is_kept or bool(self._late)
            number = self._kept.pop() if is_kept else await self._new_number()
            undo.pop_all()
        instance = self._used[number] = RemoteInstance(number)
        return instance, is_old

    async def give_back(self, instance: RemoteInstance, *, is_sound: bool) -> None:
        """End the use of an instance; a failed instance is not reused."""
        self._places.release()
        if instance.is_lost:
            return
        del self._used[instance.number]
        is_kept = self.dialect.is_kept
        if self._can_close and not (is_sound and is_kept):
            await self._close(instance.number)
            is_kept |= not self._can_close
        if is_sound and (is_kept or not self._can_close):
            self._kept.append(instance.number)

    async def is_at_fault(self, instance: RemoteInstance) -> bool:
        """Return whether the instance caused a failed reset; otherwise the item caused it.

        A closable instance is always replaced. For other instances the server is queried: after a
        restart it has no record of its earlier instances.
        """
        if self._can_close:
            return True
        try:
            await self.get("observation", instance.number)
        except RemoteFailure as error:
            return "has finished" not in str(error)
        return False

    async def post(
        self, verb: str, instance: RemoteInstance, fields: Mapping[str, object]
    ) -> object:
        """Return the JSON of a POST for an instance. Raises RemoteFailure."""
        if instance.is_lost:
            raise self.failure(f"instance {instance.number} is lost; the server was restarted")
        body = dict(fields) | {self.dialect.instance_key: instance.number}
        return await self._request("POST", verb, body)

    async def get(self, verb: str, number: int) -> object:
        """Return the JSON of a GET for an instance. Raises RemoteFailure."""
        return await self._request("GET", f"{verb}?{self.dialect.instance_key}={number}", None)

    async def stop(self) -> None:
        """Close the kept instances, if the server supports it, and the connections."""
        instances = self._kept
        self._kept = []
        late = self._late
        self._late = []
        for task in late:
            task.cancel()
        made = await asyncio.gather(*late, return_exceptions=True)
        instances += [number for number in made if isinstance(number, int)]
        if self._can_close:
            await asyncio.gather(*(self._close(number) for number in instances))
        if self._session is not None:
            await self._session.close()
            self._session = None

    def failure(self, text: str, *, status: int | None = None) -> RemoteFailure:
        """Return the error of this server, with its address."""
        where = f"AgentGym server {self.dialect.name} at {without_login(self._url)}"
        return RemoteFailure(f"{where}: {text}", status=status)

    async def _new_number(self) -> int:
        """Return the number of an instance that is not in use here."""
        for _ in range(len(self._used) + 1):
            number = await self._late_or_created()
            if number in self._kept:
                self._kept.remove(number)
            if number not in self._used:
                return number
            if not self.dialect.reuses_numbers:
                self._used.pop(number).is_lost = True
                return number
        raise self.failure("the server returns only instances that are in use")

    async def _late_or_created(self) -> int:
        """Return the number of a new instance; use one whose request was cancelled, if any."""
        self._late = [task for task in self._late if not _has_failed(task)]
        task = self._late.pop(0) if self._late else asyncio.create_task(self._create())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._late.append(task)
            raise

    async def _create(self) -> int:
        """Create an instance at the server; return its number. Raises: RemoteFailure."""
        body = self.dialect.create_body
        json_body: dict[str, object] | None = None if body is None else dict(body)
        timeout_s = max(self._timeout_s, CREATE_TIMEOUT_S)
        async with self._makers:
            reply = await self._request("POST", "create", json_body, timeout_s=timeout_s)
        number = reply
        if isinstance(reply, dict):
            number = reply.get(self.dialect.instance_key)
        if not isinstance(number, int):
            raise self.failure(f"the answer to POST create has no instance number: {_shown(reply)}")
        return number

    async def _close(self, number: int) -> None:
        """Close an instance at the server. A failure is only logged."""
        body: dict[str, object] = {self.dialect.instance_key: number}
        try:
            await self._request("POST", "close", body, timeout_s=self.dialect.close_timeout_s)
        # The episode is over, so the failure affects only the server.
        except RemoteFailure as error:
            self._can_close &= error.status not in NO_ROUTE
            logger.warning("instance not closed number=%d reason=%s", number, error)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None,
        *,
        timeout_s: float | None = None,
    ) -> object:
        """Return the JSON of one request. Raises: RemoteFailure."""
        verb = f"{method} {path.partition('?')[0]}"
        limit_s = timeout_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._client().request(
                method,
                f"{self._url}/{path}",
                data=None if body is None else io.BytesIO(json_bytes(body)),
                headers=None if body is None else JSON_HEADERS,
                timeout=timeout,
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise self.failure(f"{verb}: no answer within {limit_s:g} s") from error
        except ProxyFailed as error:
            raise self.failure(f"{verb} failed: {error}") from error
        except (aiohttp.ClientError, UnicodeError) as error:
            why = f"{type(error).__name__}: {error}{route_note(self._url)}"
            raise self.failure(f"{verb} failed: {why}") from error
        if response.status != 200:
            note = route_note(self._url) if response.status in BY_PROXY else ""
            shown = f"{response.status}{note}: {text[:MAX_SHOWN_CHARS]}"
            raise self.failure(f"{verb} answered {shown}", status=response.status)
        try:
            reply = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self.failure(
                f"{verb}: the answer is not JSON: {text[:MAX_SHOWN_CHARS]}"
            ) from error
        has_error_key = self.dialect.faults is Faults.ERROR_KEY
        if has_error_key and isinstance(reply, dict) and "error" in reply:
            raise self.failure(f"{verb} answered the error {_shown(reply['error'])}")
        return reply

    def _client(self) -> aiohttp.ClientSession:
        """Return the session of HTTP connections, made at the first call."""
        if self._session is None:
            # One connection per request, as in AgentGym's clients: after an exception the servers
            # close a connection silently, and the next request on it would be lost.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = open_session(self._url, connector=connector)
        return self._session


def max_sessions(dialect: Dialect, options: RemoteOptions) -> int:
    """Return the limit of sessions: the option, or a smaller one of the server."""
    return min(options.max_sessions, dialect.max_instances or options.max_sessions)


def _has_failed(task: asyncio.Task[int]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _shown(reply: object) -> str:
    """Return a reply as short text."""
    return json.dumps(reply)[:MAX_SHOWN_CHARS]
