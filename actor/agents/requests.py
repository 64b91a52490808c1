"""What agents send to an OpenAI-compatible endpoint, and what they are told that it cannot do."""

# What JSON holds is of no known type until it is checked here:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from dataclasses import dataclass
from typing import Any

from common.text import valid_text

Message = dict[str, str]  # role, content
ROLES = ("system", "developer", "user", "assistant")
UNSUPPORTED = {  # parameter -> values that ask for nothing
    "n": (None, 1),
    "best_of": (None, 1),
    "stream": (None, False),
    "stop": (None, [], ""),
    "tools": (None, []),
    "functions": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "echo": (None, False),
    "suffix": (None, ""),
}
WHY = {
    "tools": "the policy's chat template is asked for plain messages; describe tools in a message",
    "stream": "an answer is captured whole; ask with stream=false",
    "n": "an episode has one history; ask once more for another answer",
}


class ApiError(Exception):
    """Raised for a request that cannot be answered; its `code` names the reason."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param = status, code, message, param

    @property
    def body(self) -> dict[str, Any]:
        """The error in the API's own shape."""
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request for one answer."""

    messages: list[Message] | None = None  # of a conversation
    prompt: str | list[int] | None = None  # of a bare completion
    max_tokens: int | None = None  # of the answer; None: as many as a turn has
    model: str = ""


def read_asked(body: object, *, is_chat: bool) -> Asked:
    """Return what a request asks for. Raises: ApiError: something that cannot be had, by name."""
    if not isinstance(body, dict):
        raise ApiError(400, "invalid_body", "the body is not a JSON object")
    for name, harmless in UNSUPPORTED.items():
        if body.get(name) not in harmless:
            why = WHY.get(name, "not supported here")
            raise ApiError(400, "unsupported_parameter", f"{name}={body[name]!r:.80}: {why}", name)
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ApiError(
            400, "invalid_value", f"max_tokens={limit!r:.80}: must be >= 1", "max_tokens"
        )
    told = {"max_tokens": limit, "model": str(body.get("model", ""))}
    if is_chat:
        return Asked(messages=_messages(body.get("messages")), **told)
    return Asked(prompt=_prompt(body.get("prompt")), **told)


def _messages(given: object) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise ApiError(400, "invalid_value", "messages: a list of at least one", "messages")
    found: list[Message] = []
    for number, each in enumerate(given):
        role = each.get("role") if isinstance(each, dict) else None
        if role not in ROLES:
            names = ", ".join(ROLES)
            text = f"messages[{number}].role={role!r:.40}: must be one of {names}"
            raise ApiError(400, "invalid_value", text, "messages")
        if each.get("tool_calls"):
            raise ApiError(400, "unsupported_parameter", f"tool_calls: {WHY['tools']}", "messages")
        text = _text(each.get("content"), f"messages[{number}].content")
        found.append({"role": "system" if role == "developer" else role, "content": text})
    if found[-1]["role"] == "assistant":
        raise ApiError(400, "invalid_value", "messages: the last is the assistant's", "messages")
    return found


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return valid_text(content)
    if isinstance(content, list):
        texts = [each.get("text") if isinstance(each, dict) else None for each in content]
        if all(isinstance(each, str) for each in texts):
            return valid_text("".join(map(str, texts)))
    raise ApiError(400, "invalid_value", f"{place}: must be text", "messages")


def _prompt(given: object) -> str | list[int]:
    if isinstance(given, str) and given:
        return valid_text(given)
    if isinstance(given, list) and given and all(type(each) is int for each in given):
        return given
    raise ApiError(400, "invalid_value", "prompt: one text, or one list of token ids", "prompt")
