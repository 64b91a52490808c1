"""The requests to the teacher's endpoint."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from common.http.model_endpoint import ModelEndpoint
from learner.teacher.scores import TeacherScores, read_scores

MAX_REPLY_BYTES = 1 << 30  # A long episode with many tokens at each position.


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherEndpoint(ModelEndpoint):
    """An endpoint with the routes of vLLM's server."""

    model: str  # "": the endpoint has one model only.
    section: str = "algorithm.teacher"
    max_reply_bytes: int = MAX_REPLY_BYTES

    async def score(
        self, token_ids: np.ndarray, positions: np.ndarray, *, num_top: int
    ) -> tuple[TeacherScores, float]:
        """Return the scores of a sequence, and the seconds of the request.

        Raises: Unanswered, Refused.
        """
        reply, took_s = await self.post(
            "/v1/completions",
            {
                "prompt": token_ids.tolist(),
                "prompt_logprobs": num_top,
                "max_tokens": 1,
                "temperature": 0,
            },
        )
        return read_scores(reply, token_ids, positions, num_top=num_top), took_s

    async def tokenize(self, text: str) -> dict[str, Any]:
        """Return the answer of the route /tokenize. Raises: Unanswered, Refused."""
        return (await self.post("/tokenize", {"prompt": text, "add_special_tokens": False}))[0]

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of tokens. Raises: Unanswered, Refused."""
        reply, _ = await self.post("/detokenize", {"tokens": token_ids})
        return str(reply.get("prompt", ""))

    async def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """Return the answer of a route, and its seconds. Raises: Unanswered, Refused."""
        named = {"model": self.model} if self.model else {}
        return await self.send(f"{self.base_url().removesuffix('/v1')}{path}", {**named, **body})
