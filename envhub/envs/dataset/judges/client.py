"""One request to an OpenAI-compatible endpoint, with the three ways in which it fails."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from common.http.proxies import ProxyFailed
from common.http.sessions import open_session
from common.text import json_bytes
from envhub.envs.dataset.judges.store import Answer

BUSY = (408, 409, 425, 429)  # Statuses of an endpoint that answers later.
MAX_REPLY_BYTES = 8 << 20
SHOWN_CHARS = 200
WRONG_KEYS = {401: "key_env", 403: "key_env", 404: "model"}  # Status -> key that may be wrong.


class Unanswered(Exception):
    """The endpoint is down or overloaded: a later request may succeed.

    `is_charged` is true if the endpoint may have done the work.
    """

    def __init__(self, text: str, *, is_charged: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.is_charged = is_charged
        self.wait_s = wait_s  # Seconds in which the endpoint asks for no request.


class Refused(Exception):
    """The endpoint refuses the request: the same request would fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint:
    """An endpoint of chat completions. Its key is in no text of an error."""

    find_url: Callable[[], str]  # Base URL; "" while the endpoint has none.
    key: str
    timeout_s: float
    is_own: bool  # The run itself serves the endpoint.

    async def complete(self, body: dict[str, Any]) -> Answer:
        """Return the answer to a request. Raises: Unanswered, Refused."""
        base = self.find_url().rstrip("/")
        if not base:
            raise Unanswered("its engine has not started")
        url = f"{base}/chat/completions"
        try:
            status, wait_s, text = await self._post(url, body)
        except TimeoutError as error:
            text = f"no answer within {self.timeout_s:g} s"
            raise Unanswered(text, is_charged=True) from error
        except ProxyFailed as error:
            raise Refused(self._redacted(f"{error}")) from error
        except aiohttp.ClientError as error:
            text = self._redacted(f"{type(error).__name__}: {error}")
            raise Unanswered(text) from error
        shown = f"HTTP {status} {self._redacted(text[:SHOWN_CHARS])}"
        if status in BUSY or status >= 500:
            raise Unanswered(shown, wait_s=wait_s)
        if status != 200:
            hint = f"; see its key {WRONG_KEYS[status]}" if status in WRONG_KEYS else ""
            raise Refused(f"{shown}{hint}")
        return self._read(text)

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, float, str]:
        """Return (status, seconds in Retry-After or 0, body)."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with (
            open_session(url, is_own=self.is_own, timeout=timeout) as http,
            http.post(url, data=json_bytes(body), headers=headers, allow_redirects=False) as reply,
        ):
            content = await reply.content.read(MAX_REPLY_BYTES)
            while not reply.content.at_eof() and len(content) < MAX_REPLY_BYTES:
                content += await reply.content.read(MAX_REPLY_BYTES)
            asked = reply.headers.get("Retry-After", "")
            wait_s = float(asked) if asked.isdecimal() and len(asked) < 6 else 0.0
            return reply.status, wait_s, content.decode(errors="replace")

    def _read(self, text: str) -> Answer:
        """Return the answer in a reply. Raises: Refused: the reply is no chat completion."""
        try:
            reply = json.loads(text)
            content = reply["choices"][0]["message"].get("content") or ""
            usage: dict[str, Any] = reply.get("usage") or {}
            if not isinstance(content, str):
                raise TypeError(f"content is {type(content).__name__}")
            return Answer(
                text=content,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            shown = self._redacted(text[:SHOWN_CHARS])
            raise Refused(f"not a chat completion ({error!r}): {shown}") from error

    def _redacted(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self.key, "***") if self.key else text
