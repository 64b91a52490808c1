"""The requests to a judge's endpoint of chat completions."""

from dataclasses import dataclass
from typing import Any

from common.http.model_endpoint import ModelEndpoint, ModelReply, Refused

MAX_REPLY_BYTES = 8 << 20
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint(ModelEndpoint):
    """An endpoint of chat completions."""

    max_reply_bytes: int = MAX_REPLY_BYTES

    async def complete(self, body: dict[str, Any]) -> tuple[str, ModelReply]:
        """Return the text of an answer, and the whole reply. Raises: Unanswered, Refused."""
        reply = await self.send(f"{self.base_url()}/chat/completions", body)
        return self._text_of(reply.content), reply

    def _text_of(self, content: dict[str, Any]) -> str:
        """Return the text in a reply. Raises: Refused: the reply is no chat completion."""
        try:
            text = content["choices"][0]["message"].get("content") or ""
            if not isinstance(text, str):
                raise TypeError(f"content is {type(text).__name__}")
        except (LookupError, TypeError, AttributeError) as error:
            shown = self.redacted(f"{content!s:.{SHOWN_CHARS}}")
            raise Refused(f"not a chat completion ({error!r}): {shown}") from error
        return text
