"""One request to the teacher's endpoint, with the ways in which it fails."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import numpy as np

from common.http.proxies import ProxyFailed
from common.http.sessions import open_session
from common.text import json_bytes
from learner.teacher.scores import TeacherRefused, TeacherScores, read_scores

BUSY = (408, 409, 425, 429)  # Statuses of an endpoint that answers later.
MAX_REPLY_BYTES = 1 << 30  # A long episode with many tokens at each position.
SHOWN_CHARS = 300
WRONG_KEYS = {401: "key_env", 403: "key_env", 404: "model or url"}  # Status -> probable keys.


class TeacherUnanswered(Exception):
    """The endpoint is down or overloaded: a later request may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEndpoint:
    """An endpoint with the routes of vLLM's server. Its key is in no text of an error."""

    find_url: Callable[[], str]  # Base URL with /v1; "" while the endpoint has none.
    key: str
    model: str  # "": the endpoint has one model only.
    timeout_s: float
    is_own: bool  # The run itself serves the endpoint.

    async def score(
        self, token_ids: np.ndarray, positions: np.ndarray, *, num_top: int
    ) -> TeacherScores:
        """Return the scores of a sequence. Raises: TeacherUnanswered, TeacherRefused."""
        reply = await self.post(
            "/v1/completions",
            {
                "prompt": token_ids.tolist(),
                "prompt_logprobs": num_top,
                "max_tokens": 1,
                "temperature": 0,
            },
        )
        return read_scores(reply, token_ids, positions, num_top=num_top)

    async def tokenize(self, text: str) -> dict[str, Any]:
        """Return the answer of the route /tokenize. Raises: TeacherUnanswered, TeacherRefused."""
        return await self.post("/tokenize", {"prompt": text, "add_special_tokens": False})

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises: TeacherUnanswered, TeacherRefused."""
        return str((await self.post("/detokenize", {"tokens": token_ids})).get("prompt", ""))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises: TeacherUnanswered, TeacherRefused."""
        base = self.find_url().rstrip("/")
        if not base:
            raise TeacherUnanswered("its engine has not started")
        url = f"{base.removesuffix('/v1')}{path}"
        named = {"model": self.model} if self.model else {}
        try:
            status, text = await self._send(url, {**named, **body})
        except TimeoutError as error:
            raise TeacherUnanswered(f"no answer within {self.timeout_s:g} s") from error
        except ProxyFailed as error:
            raise TeacherRefused(self._redacted(f"{error}")) from error
        except aiohttp.ClientError as error:
            text = self._redacted(f"{type(error).__name__}: {error}")
            raise TeacherUnanswered(text) from error
        shown = f"{path}: HTTP {status} {self._redacted(text[:SHOWN_CHARS])}"
        if status in BUSY or status >= 500:
            raise TeacherUnanswered(shown)
        if status != 200:
            hint = f"; see algorithm.teacher.{WRONG_KEYS[status]}" if status in WRONG_KEYS else ""
            raise TeacherRefused(f"{shown}{hint}")
        try:
            found: object = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TeacherRefused(f"{path}: the answer is not JSON ({error})") from error
        if not isinstance(found, dict):
            raise TeacherRefused(f"{path}: the answer is not a JSON object")
        return cast("dict[str, Any]", found)

    async def _send(self, url: str, body: dict[str, Any]) -> tuple[int, str]:
        """Return (status, body of the answer)."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.key}"} if self.key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        async with (
            open_session(url, is_own=self.is_own, timeout=timeout) as http,
            http.post(url, data=json_bytes(body), headers=headers, allow_redirects=False) as reply,
        ):
            content = bytearray()
            while chunk := await reply.content.read(1 << 20):
                content += chunk
                if len(content) > MAX_REPLY_BYTES:
                    raise TeacherRefused(f"its answer has more than {MAX_REPLY_BYTES} bytes")
            return reply.status, content.decode(errors="replace")

    def _redacted(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text
