"""Requests to an OpenAI-compatible endpoint of a language model, their failures and their cost."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import aiohttp

from common.errors import ConfigError, LongstrideError
from common.http.proxies import ProxyFailed
from common.http.sessions import open_session
from common.text import json_bytes

BUSY = (408, 409, 425, 429)  # Statuses of an endpoint that answers later.
READ_BYTES = 1 << 20
SHOWN_CHARS = 300
# Status -> keys that may be wrong.
WRONG_KEYS = {401: ("key_env",), 403: ("key_env",), 404: ("model", "url")}


class Unanswered(Exception):
    """The endpoint is down or overloaded: a later request may succeed.

    `is_charged` is true if the endpoint may have done the work.
    """

    def __init__(self, text: str, *, is_charged: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(text)
        self.is_charged = is_charged
        self.wait_s = wait_s  # Seconds in which the endpoint asks for no request.


class Refused(LongstrideError):
    """The endpoint refuses a request, or its answer is unusable: a repetition would not help."""


@dataclass(slots=True, kw_only=True)
class RequestCost:
    """The cost of several requests."""

    calls: int = 0  # Answered requests.
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0  # Sum over the answered requests.

    def add(self, seconds: float, *, prompt_tokens: int, completion_tokens: int = 0) -> None:
        """Add an answered request."""
        self.calls += 1
        self.seconds += seconds
        self.prompt_tokens += prompt_tokens
        self.completion_tokens += completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEndpoint:
    """An endpoint of a language model. Its key is in no text of an error."""

    find_url: Callable[[], str]  # Base URL, usually with /v1; "" while the endpoint has none.
    key: str
    timeout_s: float
    is_own: bool  # The run itself serves the endpoint.
    section: str  # Section of its keys `model`, `url` and `key_env`, for errors.
    max_reply_bytes: int

    def base_url(self) -> str:
        """Return the base URL. Raises: Unanswered: the endpoint has none yet."""
        base = self.find_url().rstrip("/")
        if not base:
            raise Unanswered("its engine has not started")
        return base

    async def send(self, url: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the JSON object of an answer, and the seconds of the request.

        Raises: Unanswered, Refused.
        """
        began_s = time.monotonic()
        try:
            status, wait_s, text = await self._post(url, body)
        except TimeoutError as error:
            text = f"no answer within {self.timeout_s:g} s"
            raise Unanswered(text, is_charged=True) from error
        except ProxyFailed as error:
            raise Refused(self.redacted(f"{error}")) from error
        except aiohttp.ClientError as error:
            raise Unanswered(self.redacted(f"{type(error).__name__}: {error}")) from error
        path = urlsplit(url).path
        shown = f"{path}: HTTP {status} {self.redacted(text[: 4 * SHOWN_CHARS])[:SHOWN_CHARS]}"
        if status in BUSY or status >= 500:
            raise Unanswered(shown, wait_s=wait_s)
        if status != 200:
            keys = [f"{self.section}.{name}" for name in WRONG_KEYS.get(status, ())]
            raise Refused(f"{shown}{'; see ' if keys else ''}{' and '.join(keys)}")
        return _object(path, text), time.monotonic() - began_s

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, float, str]:
        """Return (status, seconds in Retry-After or 0, body of the answer). Raises: Refused."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with (
            open_session(url, is_own=self.is_own, timeout=timeout) as http,
            http.post(url, data=json_bytes(body), headers=headers, allow_redirects=False) as reply,
        ):
            content = bytearray()
            while chunk := await reply.content.read(READ_BYTES):
                content += chunk
                if len(content) > self.max_reply_bytes:
                    raise Refused(f"its answer has more than {self.max_reply_bytes} bytes")
            asked = reply.headers.get("Retry-After", "")
            wait_s = float(asked) if asked.isdecimal() and len(asked) < 6 else 0.0
            return reply.status, wait_s, content.decode(errors="replace")

    def redacted(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self.key, "***") if self.key else text


def _object(path: str, text: str) -> dict[str, Any]:
    """Return the JSON object of an answer. Raises: Refused."""
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path}: the answer is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise Refused(f"{path}: the answer is not a JSON object")
    return cast("dict[str, Any]", content)


def key_from(variable: str, *, setting: str) -> str:
    """Return the key in an environment variable; "" without a variable.

    Args:
        setting: the key of the configuration that names the variable.

    Raises: ConfigError: the variable is not set.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise ConfigError(
            f"{setting}={variable}: this environment variable is not set. Set it to the key of the"
            " endpoint"
        )
    return key
