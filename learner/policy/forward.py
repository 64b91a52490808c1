"""Forward passes of the policy, its critic and its reference over microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config.learning import LearnerSection
from learner.batch.batching import MicroBatch, TokenBatch
from learner.policy.critic import Critic
from learner.policy.model import flat_hidden, hidden_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What a pass found about the scored tokens of a block."""

    logprobs: Tensor = field(repr=False)  # [tokens] float32 nats
    entropy: Tensor | None = field(repr=False, default=None)  # [tokens] float32 nats
    values: Tensor | None = field(repr=False, default=None)  # [tokens] float32
    end_values: Tensor | None = field(repr=False, default=None)  # [batch] of the last states


class Passes:
    """The networks of a learner behind one call."""

    def __init__(
        self,
        cfg: LearnerSection,
        policy: PreTrainedModel,
        critic: Critic | None,
        *,
        temperature: float,
        engine_dtype: str,
    ) -> None:
        """Hold the networks.

        Args:
            temperature: of the sampler; logits are divided by it.
            engine_dtype: a bf16 engine's logits are rounded, so ours are then too.
        """
        self._cfg = cfg
        self._policy = policy
        self._critic = critic
        self._temperature = temperature
        self._head_dtype = torch.bfloat16 if engine_dtype == "bfloat16" else torch.float32

    def score(
        self,
        tokens: TokenBatch,
        *,
        with_entropy: bool = False,
        with_values: bool = False,
        temperature: float | None = None,
    ) -> Scores:
        """Return log-probabilities of a block and, if asked for, entropies and values."""
        autocast = self._cfg.autocast
        hidden = flat_hidden(self._policy.base_model, tokens, autocast=autocast)
        logprobs, entropy = self._head(self._policy, hidden, tokens, with_entropy, temperature)
        if not with_values or self._critic is None:
            return Scores(logprobs=logprobs, entropy=entropy)
        states = self._critic.hidden(tokens, hidden, autocast=autocast)
        return Scores(
            logprobs=logprobs,
            entropy=entropy,
            values=self._critic.of_hidden(states[tokens.source_rows]),
            end_values=self._critic.of_hidden(states[tokens.last_rows]),
        )

    def score_with(self, other: PreTrainedModel, tokens: TokenBatch) -> Tensor:
        """Return the log-probabilities [tokens] under another network, such as the reference."""
        hidden = flat_hidden(other.base_model, tokens, autocast=self._cfg.autocast)
        return self._head(other, hidden, tokens, False, None)[0]

    def _head(
        self,
        model: PreTrainedModel,
        hidden: Tensor,
        tokens: TokenBatch,
        with_entropy: bool,
        temperature: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        return hidden_logprobs(
            model,
            hidden[tokens.source_rows],
            tokens.target_ids,
            chunk_tokens=self._cfg.logprob_chunk_tokens,
            autocast=self._cfg.autocast,
            temperature=self._temperature if temperature is None else temperature,
            with_entropy=with_entropy,
            head_dtype=self._head_dtype,
        )


class PerSample:
    """One tensor per sample, filled in block by block and, with several ranks, rank by rank."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Make it empty; `counts` holds the entries of each sample."""
        self._counts = list(counts)
        self._parts: list[Tensor | None] = [None] * len(self._counts)

    def store(self, micro: MicroBatch, flat: Tensor) -> None:
        """Keep the entries of a block's samples, given in the block's order, without gradient."""
        counts = [self._counts[index] for index in micro.sample_indices]
        parts = flat.detach().split(counts)
        for index, part in zip(micro.sample_indices, parts, strict=True):
            self._parts[index] = part

    def has(self, indices: Sequence[int]) -> bool:
        """Return True if all of these samples have been filled in."""
        return all(self._parts[index] is not None for index in indices)

    def of(self, indices: Sequence[int]) -> Tensor:
        """Return the entries of these samples, concatenated.

        Raises:
            ValueError: one of them has not been filled in.
        """
        parts = [part for index in indices if (part := self._parts[index]) is not None]
        if len(parts) < len(indices):
            raise ValueError("not all of these samples have been scored")
        return torch.cat(parts)

    def known(self) -> list[int]:
        """Return the samples that have been filled in, in order."""
        return [index for index, part in enumerate(self._parts) if part is not None]

    def flat(self) -> Tensor:
        """Return all entries in the order of the samples, zeros where nothing is known."""
        device = next((p.device for p in self._parts if p is not None), torch.device("cpu"))
        return torch.cat(
            [
                torch.zeros(count, device=device) if part is None else part
                for count, part in zip(self._counts, self._parts, strict=True)
            ]
        )

    def fill(self, flat: Tensor) -> None:
        """Replace everything by the entries of all samples in order."""
        self._parts = list(flat.split(self._counts))
