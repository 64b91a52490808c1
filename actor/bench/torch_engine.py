"""An engine of plain torch for policies of a few million weights: starts in no time, holds no CPU.

For studies of hundreds of short runs, each of which would wait longer for vLLM than it trains.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from actor.rollout.episode import Turn


class TorchEngine:
    """Samples the turns of all episodes that ask, together; keeps keys and values between turns.

    All rows share a timeline of columns. What a row has not got there is masked, and positions
    count its own tokens alone, so that each row is what it would be by itself.

    Example: a has 30 tokens, b 34: 34 columns, of which a's last 4 are masked. Both sample 5, a
    stops after 3: 39 columns, a has 33 tokens. a ends: its row is dropped.
    """

    def __init__(self, model: PreTrainedModel, end_ids: Sequence[int], *, temperature: float):
        self._model = model.eval()
        self._end_ids = torch.tensor(list(end_ids))
        self._temperature = temperature
        self.version = 0
        self._forget()

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Take other weights, which label what is sampled from now on."""
        self._model.load_state_dict(dict(weights))
        self.version = version
        self._forget()

    def _forget(self) -> None:
        self._rows: list[str] = []
        self._known: dict[str, list[int]] = {}  # tokens of each row whose keys and values are here
        self._cache = DynamicCache()
        self._mask = torch.zeros(0, 0, dtype=torch.long)  # [row, column]

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
            salt: of no meaning here; nothing is shared between versions.
            seeds: of each request; a row's tokens depend on nothing but them and its own tokens.
        """
        names = {request.partition(":")[2]: request for request in prompts}
        goes_on = names.keys() <= set(self._rows) and all(
            prompts[request][: len(self._known[row])] == self._known[row]
            for row, request in names.items()
        )
        if not self._rows or not goes_on:  # who begins a new segment is shown other tokens
            self._forget()
            self._rows = list(names)
            self._known = {row: [] for row in names}
            self._mask = torch.zeros(len(names), 0, dtype=torch.long)
        self._keep([name for name in self._rows if name in names])
        draws = np.stack(
            [np.random.default_rng(seeds[names[row]]).random(max_tokens) for row in self._rows]
        )
        with torch.inference_mode():
            taken = self._sample(
                [prompts[names[row]][len(self._known[row]) :] for row in self._rows],
                torch.from_numpy(draws.astype(np.float32)),
            )
        return {names[row]: turn for row, turn in zip(self._rows, taken, strict=True)}

    def _keep(self, names: list[str]) -> None:
        if names == self._rows:
            return
        rows = torch.tensor([self._rows.index(name) for name in names])
        self._cache.batch_select_indices(rows)
        self._mask, self._rows = self._mask[rows], names
        self._known = {name: self._known[name] for name in names}

    def _sample(self, new: list[list[int]], draws: Tensor) -> list[Turn]:
        """Return the turns that follow the `new` tokens of each row; draws [row, max_tokens]."""
        logits = self._forward(*_padded(new))
        tokens: list[Tensor] = []
        logprobs: list[Tensor] = []
        is_open = torch.ones(len(new), dtype=torch.bool)
        counts = torch.zeros(len(new), dtype=torch.long)
        for number in range(draws.shape[1]):
            scores = torch.log_softmax(logits.float() / self._temperature, dim=-1)  # [row, vocab]
            below = scores.exp().cumsum(dim=-1)
            drawn = draws[:, number : number + 1] * below[:, -1:]
            picked = torch.searchsorted(below, drawn, right=True).clamp(max=scores.shape[1] - 1)
            tokens.append(picked[:, 0])
            logprobs.append(scores.gather(1, picked)[:, 0])
            counts += is_open
            is_open &= ~torch.isin(picked[:, 0], self._end_ids)
            if not is_open.any() or number + 1 == draws.shape[1]:
                break
            logits = self._forward(picked, is_open.long()[:, None])
        return self._turns(torch.stack(tokens, 1), torch.stack(logprobs, 1), counts, is_open)

    def _turns(
        self, tokens: Tensor, logprobs: Tensor, counts: Tensor, is_open: Tensor
    ) -> list[Turn]:
        return [
            Turn(ids[:num], scores[:num], [self.version] * num, is_stopped=not is_cut)
            for ids, scores, num, is_cut in zip(
                tokens.tolist(), logprobs.tolist(), counts.tolist(), is_open.tolist(), strict=True
            )
        ]

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Append a block of columns; return logits [row, vocab] after each row's last token."""
        before = self._mask.sum(dim=1, keepdim=True)  # [row, 1]
        positions = (before + mask.cumsum(dim=1) - 1).clamp(min=0)
        self._mask = torch.cat([self._mask, mask], dim=1)
        out = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
        )
        for row, own, num in zip(self._rows, ids.tolist(), mask.sum(dim=1).tolist(), strict=True):
            self._known[row] += own[:num]
        last = (mask.sum(dim=1) - 1).clamp(min=0)
        return out.logits[torch.arange(len(ids)), last]


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return ids and mask [row, width], filled up on the right."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids, mask
