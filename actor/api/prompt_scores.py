"""Log-probabilities of given tokens, and the tokenizer, by the routes of vLLM's server."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from actor.api.http_requests import read_body
from actor.api.requests import ApiError, invalid, openai_error
from actor.formats.renderer import Renderer
from common.config.actor import ActorSection
from common.errors import EngineError

if TYPE_CHECKING:
    from actor.engine.engine import Engine

BANNED = -9999.0  # JSON has no -inf; vLLM's server writes the same number.
LARGEST_ID = 2**31
MAX_BODY_BYTES = 64 << 20  # A prompt of token ids is longer than its text.
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


class ServedPolicy(Protocol):
    """The parts of a served policy that these routes use."""

    @property
    def engine(self) -> "Engine": ...

    @property
    def renderer(self) -> Renderer: ...

    @property
    def actor(self) -> ActorSection: ...

    @property
    def numbers(self) -> "count[int]": ...

    @property
    def name(self) -> Callable[[int], str]: ...

    def check_access(self, request: web.Request) -> None: ...


def add_score_routes(app: web.Application, policy: ServedPolicy) -> None:
    """Add the routes that score given tokens to a server of a policy."""
    scores = PromptScores(
        engine=policy.engine,
        tokenizer=policy.renderer.tokenizer,
        actor=policy.actor,
        numbers=policy.numbers,
    )
    answers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "/v1/completions": scores.complete,
        "/tokenize": scores.tokenize,
        "/detokenize": scores.detokenize,
    }

    async def handle(request: web.Request) -> web.Response:
        try:
            policy.check_access(request)
            body = await read_body(request.clone(client_max_size=MAX_BODY_BYTES))
            reply = answers[request.path](body)
            reply = await reply if inspect.isawaitable(reply) else reply
        except ApiError as error:
            return web.json_response(openai_error(error), status=error.status)
        except EngineError as error:
            failed = ApiError(500, "policy_failed", f"{error}")
            return web.json_response(openai_error(failed), status=500)
        return web.json_response({**reply, "model": policy.name(policy.engine.version)})

    for path in answers:
        app.router.add_post(path, handle)


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
