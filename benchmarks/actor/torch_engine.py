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

MAX_BEGINNINGS = 50_000  # Limit of the remembered beginnings of turns.
SURE = 2
SUREST = 3


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


class Guesses:
    """Predicts the rest of a turn from its beginning, as in earlier turns.

    Every guess is verified. A correct guess lets the engine compute several tokens at once.
    """

    def __init__(self, end_ids: Sequence[int]) -> None:
        self._end_ids = frozenset(end_ids)
        # Beginning -> next token and its confidence.
        self._next: dict[tuple[int, ...], tuple[int, int]] = {}

    def after(self, beginning: Sequence[int], most: int) -> list[int]:
        """Return at most `most` tokens that probably follow; none of them ends the turn."""
        key = tuple(beginning)
        found = list[int]()
        while len(found) < most:
            token, sureness = self._next.get(key, (0, 0))
            if sureness < SURE or token in self._end_ids:
                break
            found.append(token)
            key = (*key, token)
        return found

    def learn(self, turn: Sequence[int]) -> None:
        """Add a sampled turn."""
        if len(self._next) > MAX_BEGINNINGS:
            self._next.clear()
        for number, token in enumerate(turn):
            key = tuple(turn[:number])
            known, sureness = self._next.get(key, (token, 0))
            if known == token:
                self._next[key] = token, min(SUREST, sureness + 1)
            else:
                self._next[key] = (known, sureness - 1) if sureness > 1 else (token, 1)


class TorchEngine:
    """Samples the turns of all requests together, and keeps keys and values between turns.

    Each row is independent of the others. The tokens of all rows are computed as one sequence
    without padding. The guessed continuation of a turn is computed together with the tokens before
    it (speculative decoding). It is accepted as far as the row's own random draws agree with it.

    Example: earlier turns were "open the red door" and "open the blue door". An observation of 20
    tokens and the guess "open the" are one pass; "red" is drawn. "red" and the guess "door" are a
    second pass: "door" is drawn, and the end of the turn.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        *,
        temperature: float,
        guesses: Guesses | None = None,
    ) -> None:
        self._model, self._head = model.eval(), model.get_output_embeddings()
        self._model.set_attn_implementation(NAME)
        self._end_ids = frozenset(end_ids)
        self._guesses = guesses or Guesses(end_ids)
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
        self._guesses.learn(row.tokens)
        versions = [self.version] * len(row.tokens)
        return Turn(row.tokens, row.logprobs, versions, is_stopped=row.is_stopped)

    def _sample(self, rows: Sequence[_Row]) -> None:
        """Sample the next token of every open row, and the guessed tokens after it."""
        guesses: list[list[int]] = []
        for row in rows:
            most = len(row.draws) - len(row.tokens) - 1
            guesses.append(self._guesses.after(row.tokens, most) if row.is_open else [])
        fed = [
            row.new + guess if row.is_open else [] for row, guess in zip(rows, guesses, strict=True)
        ]
        hidden = self._forward(fed)
        ends = np.cumsum([len(each) for each in fed])
        asked = [each for each in zip(rows, guesses, ends, strict=True) if each[0].is_open]
        at = [torch.arange(end - len(guess) - 1, end) for _, guess, end in asked]
        draws = [row.draws[len(row.tokens) :][: len(guess) + 1] for row, guess, _ in asked]
        picked, logprobs = self._pick(hidden[torch.cat(at)], torch.cat(draws))
        start = 0
        for number, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            if not row.is_open:
                continue
            own = picked[start : start + len(guess) + 1]
            num = 1 + sum(np.cumprod(np.equal(own[:-1], guess)))
            self._fed[number] += [*row.new, *own[: num - 1]]
            self._stored.lengths[number] = len(self._fed[number])
            row.tokens += own[:num]
            row.logprobs += logprobs[start : start + num]
            row.new, row.is_stopped = [own[num - 1]], own[num - 1] in self._end_ids
            start += len(guess) + 1

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
