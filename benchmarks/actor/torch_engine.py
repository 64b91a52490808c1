"""An engine in plain torch for policies of a few million weights. It starts without delay.

It is used by studies of hundreds of short runs, which are shorter than the start of vLLM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actor.rollout.episode import Turn
from benchmarks.actor.key_values import NAME, KeyValues, TokenBlock


@dataclass(slots=True)
class _Row:
    """An episode whose turn is being sampled."""

    new: list[int]  # Tokens without stored keys; the next token is sampled after the last one.
    draws: Tensor  # [max_tokens] in [0, 1)
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    is_stopped: bool = False

    @property
    def is_open(self) -> bool:
        return not self.is_stopped and len(self.tokens) < len(self.draws)


class TorchEngine:
    """Samples the turns of all requests together, and keeps keys and values between turns.

    Each row is independent of the others. The tokens of all rows are computed as one sequence
    without padding.
    """

    def __init__(
        self, model: PreTrainedModel, end_ids: Sequence[int], *, temperature: float
    ) -> None:
        self._model, self._head = model.eval(), model.get_output_embeddings()
        self._model.set_attn_implementation(NAME)
        self._end_ids = frozenset(end_ids)
        self._temperature = temperature
        self.version = 0
        self._forget()

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Load other weights. Later samples have this version."""
        self._model.load_state_dict(dict(weights))
        self.version = version
        self._forget()

    def _forget(self) -> None:
        self._names: list[str] = []  # Episode names of the rows.
        self._fed: list[list[int]] = []  # Tokens of each row whose keys and values are stored.
        self._stored = KeyValues(0)

    async def generate_together(
        self,
        prompts: Mapping[str, list[int]],
        *,
        max_tokens: int,
        salt: str,
        seeds: Mapping[str, int],
    ) -> dict[str, Turn]:
        """Return the next turn of each request, "<anything>:<episode>".

        Args:
            salt: ignored; versions share no cached keys.
            seeds: of each request; a row's tokens depend only on its seed and its own tokens.
        """
        requests = {request.partition(":")[2]: request for request in prompts}
        if not self._names or not requests.keys() <= set(self._names):
            self._names, self._stored = list(requests), KeyValues(len(requests))
            self._fed = [[] for _ in requests]
        for number in reversed(range(len(self._names))):
            if self._names[number] not in requests:
                with torch.inference_mode():
                    self._stored.drop(number)
                self._names[number], self._fed[number] = self._names[-1], self._fed[-1]
                del self._names[-1], self._fed[-1]
        rows: list[_Row] = []
        for number, request in enumerate(requests[name] for name in self._names):
            prompt = prompts[request]
            # Fewer tokens are shared if a new segment begins.
            num = _num_shared(self._fed[number], prompt)
            self._stored.lengths[number], self._fed[number] = num, prompt[:num]
            draws = torch.from_numpy(_draws(seeds[request], max_tokens))
            rows.append(_Row(new=prompt[num:], draws=draws))
        with torch.inference_mode():
            while any(row.is_open for row in rows):
                self._sample(rows)
        return {
            requests[name]: self._turn(row) for name, row in zip(self._names, rows, strict=True)
        }

    def _turn(self, row: _Row) -> Turn:
        versions = [self.version] * len(row.tokens)
        return Turn(row.tokens, row.logprobs, versions, is_stopped=row.is_stopped)

    def _sample(self, rows: Sequence[_Row]) -> None:
        """Sample the next token of every open row."""
        is_open = [row.is_open for row in rows]
        fed = [row.new if row.is_open else [] for row in rows]
        ends = np.cumsum([len(each) for each in fed])[is_open]
        hidden = self._forward(fed)[torch.from_numpy(ends - 1)]
        asked = [row for row in rows if row.is_open]
        draws = torch.stack([row.draws[len(row.tokens)] for row in asked])
        picked, logprobs = self._pick(hidden, draws)
        for number in np.flatnonzero(is_open):
            self._fed[number] += rows[number].new
            self._stored.lengths[number] = len(self._fed[number])
        for row, token, logprob in zip(asked, picked, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.new = [token]
            row.is_stopped = token in self._end_ids

    def _forward(self, fed: Sequence[Sequence[int]]) -> Tensor:
        """Return the last hidden states [token, size] of all rows' new tokens."""
        block = TokenBlock.of([len(each) for each in fed], self._stored.lengths)
        ids = torch.tensor([token for each in fed for token in each])
        out = self._model.base_model(
            input_ids=ids[None],
            position_ids=block.positions[None],
            use_cache=False,
            stored=self._stored,
            block=block,
        )
        return out.last_hidden_state[0]

    def _pick(self, hidden: Tensor, draws: Tensor) -> tuple[list[int], list[float]]:
        """Return the tokens that the draws [token] select, and their logprobs."""
        assert self._head is not None
        logits = self._head(hidden)
        scores = torch.log_softmax(logits.float() / self._temperature, dim=-1)  # [token, vocab]
        below = scores.exp().cumsum(dim=-1)
        drawn = draws[:, None] * below[:, -1:]
        picked = torch.searchsorted(below, drawn, right=True).clamp(max=scores.shape[1] - 1)
        return picked[:, 0].tolist(), scores.gather(1, picked)[:, 0].tolist()


def _num_shared(known: list[int], prompt: list[int]) -> int:
    """Return the number of equal first tokens, at most the prompt's length less one."""
    most = min(len(known), len(prompt) - 1)
    if known[:most] == prompt[:most]:
        return most
    return next(i for i in range(most) if known[i] != prompt[i])


def _draws(seed: int, num: int) -> np.ndarray:
    return np.random.default_rng(seed).random(num).astype(np.float32)
