"""An HTTP client of a hub with one kept-alive connection, for measurements of the hub.

A request costs less processor time here than in the hub, so the hub limits the rate.
"""

import json
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from common.http.sessions import open_session

REQUEST_TIMEOUT_S = 60.0


class HubAnswer(RuntimeError):
    """A service answered with an unexpected status. It holds status and body."""

    def __init__(self, status: int, body: bytes, *, request: str) -> None:
        super().__init__(f"{request} answered {status}: {body[:300].decode(errors='replace')}")
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTarget:
    """The URL of a service and its token; None: no token."""

    url: str
    token: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80


class Client:
    """JSON requests over one connection, which is reopened if the service closed it."""

    def __init__(self, target: ServiceTarget) -> None:
        self._http = open_session(
            target.url,
            is_own=True,
            base_url=target.url,
            connector=aiohttp.TCPConnector(limit=1),
            headers={"Authorization": f"Bearer {target.token}"} if target.token else {},
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def ask(self, method: str, path: str, content: object = None) -> tuple[int, bytes]:
        """Return status and body of any answer.

        Raises: OSError: the connection was lost, or no answer came within REQUEST_TIMEOUT_S.
        """
        try:
            async with self._http.request(method, path, json=content) as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{method} {path}: {error!r}") from error

    async def want(self, status: int, method: str, path: str, content: object = None) -> Any:
        """Return the JSON of an answer that must have `status`. Raises: HubAnswer, OSError."""
        got, body = await self.ask(method, path, content)
        if got != status:
            raise HubAnswer(got, body, request=f"{method} {path}")
        return json.loads(body) if body else {}

    async def open(self, env: str, item_id: str, *, seed: int = 0) -> tuple[str, str]:
        """Return session id and first observation of a new session of a hub."""
        content = {"env": env, "item_id": item_id, "seed": seed}
        answer = await self.want(201, "POST", "/v1/sessions", content)
        return answer["session_id"], answer["observation"]

    async def step(self, session_id: str, action: str, seq: int) -> dict[str, Any]:
        """Return the answer to step `seq` of a session of a hub."""
        path = f"/v1/sessions/{session_id}/step"
        return await self.want(200, "POST", path, {"action": action, "seq": seq})

    async def hint(self, session_id: str) -> dict[str, Any]:
        """Return the valid actions and the expert's action."""
        return await self.want(200, "GET", f"/v1/sessions/{session_id}/hint")

    async def delete(self, session_id: str) -> None:
        await self.want(204, "DELETE", f"/v1/sessions/{session_id}")
