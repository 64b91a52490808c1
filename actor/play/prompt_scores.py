"""Log-probabilities of given tokens, and the tokenizer, by the routes of vLLM's server."""

import math
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from actor.api.requests import ApiError, invalid
from common.config.run_config import ActorSection

if TYPE_CHECKING:
    from actor.engine.engine import Engine

BANNED = -9999.0  # JSON has no -inf; vLLM's server writes the same number.
LARGEST_ID = 2**31
MOST_TOP = 1024  # Most probable tokens at each position, at most.


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptScores:
    """Answers requests about given tokens. It samples nothing."""

    engine: "Engine"
    tokenizer: Any
    actor: ActorSection
    numbers: "count[int]"

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request for `prompt_logprobs`, without a sampled text.

        Raises: ApiError: a field is wrong. EngineError: the engine failed.
        """
        num_top = body.get("prompt_logprobs")
        if type(num_top) is not int or not 0 <= num_top <= MOST_TOP:
            text = (
                f"prompt_logprobs: must be a number from 0 to {MOST_TOP}; this server only scores"
            )
            raise invalid(f"{text} prompts on this route", "prompt_logprobs")
        if body.get("max_tokens", 1) not in (0, 1):
            raise invalid("max_tokens: must be 0 or 1, for no text is sampled", "max_tokens")
        ids = _read_ids(body.get("prompt"), "prompt", self.engine.vocab_size)
        if len(ids) >= self.actor.max_model_len:
            text = f"{len(ids)} tokens and one more exceed the context of"
            code = "context_length_exceeded"
            raise ApiError(400, code, f"{code}: {text} {self.actor.max_model_len} tokens", "prompt")
        number = f"score:{next(self.numbers)}"
        steps = await self.engine.prompt_logprobs(ids, num_top=num_top, request_id=number)
        choice = {
            "index": 0,
            "text": "",
            "finish_reason": "length",
            "prompt_logprobs": [step and _entry(step) for step in steps],
        }
        usage = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
        return {"id": number, "object": "text_completion", "choices": [choice], "usage": usage}

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the token ids of a text, the context and the vocabulary's size.

        Raises: ApiError: a field is wrong.
        """
        text = body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt: must be a text", "prompt")
        is_special = body.get("add_special_tokens", True) is True
        ids = self.tokenizer.encode(text, add_special_tokens=is_special)
        return {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self.actor.max_model_len,
            "vocab_size": len(self.tokenizer),
        }

    def detokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the text of token ids; unknown ones are omitted, as vLLM's server does.

        Raises: ApiError: a field is wrong.
        """
        ids = _read_ids(body.get("tokens"), "tokens", LARGEST_ID)
        return {"prompt": self.tokenizer.decode(ids)}


def _read_ids(given: object, field: str, most: int) -> list[int]:
    """Return token ids below a limit. Raises: ApiError."""
    if not isinstance(given, list) or not given or any(type(each) is not int for each in given):
        raise invalid(f"{field}: must be a list of token ids", field)
    wrong = next((each for each in given if not 0 <= each < most), None)
    if wrong is not None:
        raise invalid(f"{field}: token id {wrong} is outside of the vocabulary of {most}", field)
    return given


def _entry(step: dict[int, tuple[float, int]]) -> dict[str, dict[str, float | int]]:
    return {
        str(token): {"logprob": BANNED if math.isinf(logprob) else logprob, "rank": rank}
        for token, (logprob, rank) in step.items()
    }
