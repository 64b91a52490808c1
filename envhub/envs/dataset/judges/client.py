"""The requests to a judge's endpoint of chat completions."""

from dataclasses import dataclass
from typing import Any

from common.http.model_endpoint import ModelEndpoint, Refused
from envhub.envs.dataset.judges.store import Answer

MAX_REPLY_BYTES = 8 << 20
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint(ModelEndpoint):
    """An endpoint of chat completions."""

    max_reply_bytes: int = MAX_REPLY_BYTES

    async def complete(self, body: dict[str, Any]) -> tuple[Answer, float]:
        """Return the answer to a request, and its seconds. Raises: Unanswered, Refused."""
        reply, took_s = await self.send(f"{self.base_url()}/chat/completions", body)
        return self._read(reply), took_s

    def _read(self, reply: dict[str, Any]) -> Answer:
        """Return the answer in a reply. Raises: Refused: the reply is no chat completion."""
        try:
            text = reply["choices"][0]["message"].get("content") or ""
            usage: dict[str, Any] = reply.get("usage") or {}
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
            return Answer(
                text=text,
                prompt_tokens=int(usage.get("prompt_tokens") or 0),
                completion_tokens=int(usage.get("completion_tokens") or 0),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            shown = self.redacted(f"{reply!s:.{4 * SHOWN_CHARS}}")[:SHOWN_CHARS]
            raise Refused(f"not a chat completion ({error!r}): {shown}") from error
