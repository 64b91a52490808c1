"""Client of a policy behind an OpenAI-compatible endpoint: chat completions over HTTP."""

import asyncio
import json
import logging
import os
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from actor.formats.thoughts import ThoughtForm
from actor.policy import PolicySection
from actor.rollout.env_client import BearerClient, retry_after_s
from actor.rollout.episode import ContextFull, EnvSession, OnTokens, PolicyFailed, Turn
from common.errors import ConfigError
from common.http.proxies import ProxyFailed, route_note
from common.text import counted, valid_text

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 40  # Bytes. The endpoint itself reports when its context is full.
# Endpoints report a full context differently: by a code, or in the text of a 400.
CONTEXT_WORDS = ("context_length_exceeded", "maximum context length", "context window")
WRONG_CONFIG = {  # HTTP status -> the key of the section that is probably wrong
    401: "api_key_env",
    403: "api_key_env",
    404: "model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer of the endpoint."""

    text: str
    is_stopped: bool  # False: cut at policy.max_turn_tokens.
    model: str = ""  # Name of the model in the answer.


class ChatClient(Protocol):
    """Requests the next message of a conversation; `Endpoint` is one."""

    async def complete(self, messages: list[dict[str, str]]) -> Reply: ...


def read_key(cfg: PolicySection) -> str:
    """Return the endpoint's key, "" if none is configured.

    Raises: ConfigError: the environment variable is not set.
    """
    key = os.environ.get(cfg.api_key_env, "").strip() if cfg.api_key_env else ""
    if cfg.api_key_env and not key:
        raise ConfigError(f"policy.api_key_env={cfg.api_key_env}: this variable is not set")
    return key


class Endpoint(BearerClient):
    """A pool of connections to the endpoint. Its key is sent in headers and removed from all texts.

    Example:
        async with Endpoint(cfg.policy) as endpoint:
            reply = await endpoint.complete([{"role": "user", "content": "hello"}])
    """

    def __init__(
        self, cfg: PolicySection, *, key: str | None = None, section: str = "policy"
    ) -> None:
        """Create the client without connecting.

        Args:
            key: None: the configured environment variable holds it.
            section: the section of the configuration whose keys the errors name.
        """
        self._cfg = cfg
        self._section = section
        self._key = read_key(cfg) if key is None else key
        self._url = f"{cfg.url.rstrip('/')}/chat/completions"
        try:
            super().__init__(self._url, token=self._key, timeout_s=cfg.timeout_s)
        except ProxyFailed as error:
            raise ConfigError(f"{section}.url={cfg.url}: {error}") from error
        self.num_prompt_tokens = 0  # As counted by the endpoint, if it reports a count.
        self.num_sampled_tokens = 0
        self.num_retries = 0

    async def complete(self, messages: list[dict[str, str]]) -> Reply:
        """Return the next message of a conversation.

        Lost connections, timeouts, 408, 429 and 5xx are retried, up to `policy.max_tries` tries in
        all. The delay grows with each try, unless Retry-After sets it.

        Raises:
            ContextFull: the conversation is too long for the model.
            PolicyFailed: no answer arrived, or it cannot be parsed.
            ConfigError: the endpoint refuses the key or does not serve the model.
        """
        failure = ""
        for attempt in range(self._cfg.max_tries):
            wait_s = min(self._cfg.max_backoff_s, self._cfg.backoff_s * 2**attempt)
            try:
                status, asked_s, body = await self._post(messages)
            except (aiohttp.ClientError, TimeoutError) as error:
                failure = self._redact(f"{type(error).__name__}: {error}{route_note(self._url)}")
            else:
                if status == 200:
                    return self._read(body)
                failure = f"HTTP {status} {self._redact(body[:300])}"
                if status not in (408, 429) and status < 500:
                    raise self._refusal(status, failure, body)
                wait_s = min(self._cfg.max_backoff_s, asked_s or wait_s)
            if attempt + 1 < self._cfg.max_tries:
                self.num_retries += 1
                logger.debug(
                    "retrying request attempt=%d wait_s=%.1f reason=%s", attempt, wait_s, failure
                )
                await asyncio.sleep(wait_s)
        raise PolicyFailed(
            f"{self._url}: {failure}, after {counted(self._cfg.max_tries, 'try', 'tries')}"
        )

    async def _post(self, messages: list[dict[str, str]]) -> tuple[int, float, str]:
        """Return (status, seconds in Retry-After or 0, body)."""
        payload = {
            "model": self._cfg.model,
            "messages": messages,
            "temperature": self._cfg.temperature,
            self._cfg.limit_key: self._cfg.max_turn_tokens,
        }
        async with self._http.post(self._url, json=payload) as response:
            body = await response.text(errors="replace")
            return response.status, retry_after_s(response.headers), body

    def _read(self, body: str) -> Reply:
        """Return the answer in a response body, and count its tokens. Raises: PolicyFailed."""
        try:
            answer = json.loads(body)
            choice = answer["choices"][0]
            text = choice["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
            usage: dict[str, Any] = answer.get("usage") or {}
            self.num_prompt_tokens += int(usage.get("prompt_tokens") or 0)
            self.num_sampled_tokens += int(usage.get("completion_tokens") or 0)
            return Reply(
                text=valid_text(text),
                is_stopped=choice.get("finish_reason") != "length",
                model=valid_text(str(answer.get("model") or "")),
            )
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            shown = self._redact(body[:300])
            raise PolicyFailed(
                f"{self._url}: the answer is not a chat completion ({error!r}): {shown}"
            ) from error

    def _refusal(self, status: int, failure: str, body: str) -> Exception:
        """Return the error for a response with an error status."""
        if status in (400, 413, 422) and any(word in body.lower() for word in CONTEXT_WORDS):
            return ContextFull(failure)
        if status in WRONG_CONFIG:
            key = WRONG_CONFIG[status]
            value = self._cfg.model if key == "model" else self._cfg.api_key_env
            return ConfigError(f"{self._section}.{key}={value}: {self._url} answers {failure}")
        return PolicyFailed(f"{self._url}: {failure}")

    def _redact(self, text: str) -> str:
        """Return a text without the key."""
        return text.replace(self._key, "***") if self._key else text


def _bytes(text: str) -> list[int]:
    return list(text.encode())


class TextEpisode:
    """One conversation with the endpoint: the renderer and the act of its episode.

    The episode's tokens are the bytes of the conversation in UTF-8, with the agent's bytes marked.
    So its journal is readable, but the episode cannot be trained on.
    """

    def __init__(self, endpoint: ChatClient) -> None:
        self._endpoint = endpoint
        self._messages: list[dict[str, str]] = []

    def first_prompt(self, text: str, *, before: tuple[str, str] | None = None) -> list[int]:
        """Begin a new conversation."""
        roles = ("user", "assistant", "user")[2 if before is None else 0 :]
        texts = [*(before or ()), text]
        self._messages = [
            {"role": role, "content": content} for role, content in zip(roles, texts, strict=True)
        ]
        return _bytes("\n\n".join(texts))

    def opened(self, messages: list[dict[str, str]], text: str) -> list[int]:
        """Begin a new conversation with several messages."""
        self._messages = [*messages, {"role": "user", "content": text}]
        return _bytes("\n\n".join(each["content"] for each in self._messages))

    def after_action(
        self, observation: str, *, is_stopped: bool, end: int | None = None
    ) -> list[int]:
        return self.after_turn(observation, is_stopped=is_stopped)

    def after_turn(self, text: str, *, is_stopped: bool, end: int | None = None) -> list[int]:
        self._messages.append({"role": "user", "content": text})
        return _bytes(text)

    def action_text(self, token_ids: list[int]) -> str:
        return ThoughtForm().text(bytes(token_ids).decode(errors="replace")).strip()

    async def act(
        self, _: list[int], session: EnvSession, /, on_tokens: OnTokens | None = None
    ) -> Turn:
        """Request the next message, which arrives as a whole.

        Raises: ContextFull, PolicyFailed, ConfigError.
        """
        reply = await self._endpoint.complete(self._messages)
        self._messages.append({"role": "assistant", "content": reply.text})
        # Bytes in place of tokens. Their log-probabilities are unknown and set to 0.
        ids = _bytes(reply.text)
        return Turn(ids, [0.0] * len(ids), [0] * len(ids), is_stopped=reply.is_stopped)
