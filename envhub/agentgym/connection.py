"""The wire to an AgentGym server: requests, what counts as a failure, instances."""

import asyncio
import json
import logging
from collections.abc import Mapping

import aiohttp

from common.config_envs import RemoteOptions
from envhub.agentgym.dialects import Dialect, Faults
from envhub.env import EnvFailure

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
KEEP_ALIVE_S = 2.0  # less than any server's, lest a request goes out on a closing connection
MAX_SHOWN_CHARS = 200


class RemoteFailure(EnvFailure):
    """The server failed; the text names it."""


class Connection:
    """Requests to one server. Nothing is sent twice: a step may have run although no answer came.

    Instances of a server that cannot close them, or whose instances are dear, are kept after an
    episode and given out again, so that there are never more of them than episodes at a time.
    """

    def __init__(self, dialect: Dialect, options: RemoteOptions) -> None:
        self.dialect = dialect
        self._url = options.url.rstrip("/")
        self._timeout_s = options.timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._kept: list[int] = []
        self._used: set[int] = set()
        self._places = asyncio.Semaphore(max_sessions(dialect, options))

    async def take(self) -> tuple[int, bool]:
        """Returns an instance nobody else uses, and whether it was used before.

        Waits while as many are in use as the server can keep apart.

        Raises:
            RemoteFailure: the server makes none.
        """
        await self._places.acquire()
        try:
            number = self._kept.pop() if self._kept else None
            is_used = number is not None
            if number is None:
                number = await self._create()
            if number in self._used:
                raise self.failure(f"gave out instance {number}, which is in use, once more")
        except BaseException:
            self._places.release()
            raise
        self._used.add(number)
        return number, is_used

    async def give_back(self, number: int, *, is_sound: bool) -> None:
        """Ends the use of an instance; one that failed is not used again."""
        self._used.remove(number)
        self._places.release()
        if is_sound and self.dialect.is_kept:
            self._kept.append(number)
        elif self.dialect.has_close:
            await self._close(number)

    async def post(self, verb: str, number: int, fields: Mapping[str, object]) -> object:
        """Returns the JSON of a POST about an instance. Raises RemoteFailure."""
        return await self._request("POST", verb, dict(fields) | {self.dialect.instance_key: number})

    async def get(self, verb: str, number: int) -> object:
        """Returns the JSON of a GET about an instance. Raises RemoteFailure."""
        return await self._request("GET", f"{verb}?{self.dialect.instance_key}={number}", None)

    async def stop(self) -> None:
        """Closes the kept instances, if that can be done, and the connections."""
        kept, self._kept = self._kept, []
        if self.dialect.has_close:
            await asyncio.gather(*(self._close(number) for number in kept))
        if self._session is not None:
            await self._session.close()
            self._session = None

    def failure(self, text: str) -> RemoteFailure:
        """Returns an error that names the server."""
        return RemoteFailure(f"AgentGym server {self.dialect.name} at {self._shown_url()}: {text}")

    async def _create(self) -> int:
        body = self.dialect.create_body
        reply = await self._request("POST", "create", None if body is None else dict(body))
        number = reply
        if isinstance(reply, dict):
            number = reply.get(self.dialect.instance_key)
        if not isinstance(number, int):
            raise self.failure(f"POST create answered {_shown(reply)}, which has no number")
        return number

    async def _close(self, number: int) -> None:
        body: dict[str, object] = {self.dialect.instance_key: number}
        try:
            await self._request("POST", "close", body, timeout_s=CLOSE_TIMEOUT_S)
        except RemoteFailure as error:  # the episode is over; the server alone loses by it
            logger.warning("instance not closed number=%d reason=%s", number, error)

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None,
        *,
        timeout_s: float | None = None,
    ) -> object:
        verb = f"{method} {path.partition('?')[0]}"
        limit_s = timeout_s or self._timeout_s
        timeout = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with self._client().request(
                method, f"{self._url}/{path}", json=body, timeout=timeout
            ) as response:
                text = await response.text()
        except TimeoutError as error:
            raise self.failure(f"{verb} had no answer within {limit_s:g} s") from error
        except (aiohttp.ClientError, UnicodeError) as error:
            raise self.failure(f"{verb} failed: {type(error).__name__}: {error}") from error
        if response.status != 200:
            raise self.failure(f"{verb} answered {response.status}: {text[:MAX_SHOWN_CHARS]}")
        try:
            reply = json.loads(text)
        except ValueError as error:
            raise self.failure(f"{verb} answered no JSON: {text[:MAX_SHOWN_CHARS]}") from error
        is_told = self.dialect.faults is Faults.ERROR_KEY
        if is_told and isinstance(reply, dict) and "error" in reply:
            raise self.failure(f"{verb} answered the error {_shown(reply['error'])}")
        return reply

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def _shown_url(self) -> str:
        """Returns the URL without the password that it may have."""
        scheme, _, rest = self._url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"


def max_sessions(dialect: Dialect, options: RemoteOptions) -> int:
    """Returns how many episodes of a server may be live at a time."""
    return min(options.max_sessions, dialect.max_instances or options.max_sessions)


def _shown(reply: object) -> str:
    return json.dumps(reply)[:MAX_SHOWN_CHARS]
