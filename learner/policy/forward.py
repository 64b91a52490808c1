"""Forward passes of the policy, its critic and its reference over microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config.learning import LearnerSection
from learner.batch.batching import TokenBatch, collate_tokens, plan_microbatches
from learner.policy.critic import Critic
from learner.policy.model import Scoring, flat_hidden, hidden_logprobs, token_logprobs
from learner.policy.precision import uses_bf16


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """What a learner computes with, all on the policy's device."""

    policy: PreTrainedModel
    critic: Critic | None = None  # needed by `advantage=ppo`
    reference: PreTrainedModel | None = None  # frozen; needed if `kl_coef` is not 0

    @property
    def device(self) -> torch.device:
        return next(self.policy.parameters()).device


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
        self, cfg: LearnerSection, networks: Networks, *, temperature: float, engine_dtype: str
    ) -> None:
        """Hold the networks; `temperature` is the sampler's, `engine_dtype` of `model.dtype`."""
        self._max_tokens = cfg.max_tokens_per_microbatch
        self._networks = networks
        self.scoring = Scoring(
            chunk_tokens=cfg.logprob_chunk_tokens,
            autocast=uses_bf16(cfg, networks.device),
            temperature=temperature,
            head_dtype=torch.bfloat16 if engine_dtype == "bfloat16" else torch.float32,
        )

    def score(
        self, tokens: TokenBatch, *, with_entropy: bool = False, with_values: bool = False
    ) -> Scores:
        """Return log-probabilities of a block and, if asked for, entropies and values."""
        autocast = self.scoring.autocast
        policy, critic = self._networks.policy, self._networks.critic
        hidden = flat_hidden(policy.base_model, tokens, autocast=autocast)
        rows, targets = hidden[tokens.source_rows], tokens.target_ids
        logprobs, entropy = hidden_logprobs(
            policy, rows, targets, self.scoring, with_entropy=with_entropy
        )
        if not with_values or critic is None:
            return Scores(logprobs=logprobs, entropy=entropy)
        states = critic.hidden(tokens, hidden, autocast=autocast)
        return Scores(
            logprobs=logprobs,
            entropy=entropy,
            values=critic.of_hidden(states[tokens.source_rows]),
            end_values=critic.of_hidden(states[tokens.last_rows]),
        )

    @torch.no_grad()
    def score_sequences(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprob of each token after the first, at temperature 1, per sequence."""
        scores: list[list[float]] = [[] for _ in token_ids]
        how = replace(self.scoring, temperature=1.0)
        lengths = [len(ids) for ids in token_ids]
        for block in plan_microbatches(lengths, max_tokens=self._max_tokens):
            sequences = [np.asarray(token_ids[index]) for index in block]
            masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
            tokens = collate_tokens(sequences, masks, device=self._networks.device)
            logprobs = token_logprobs(self._networks.policy, tokens, how)
            parts = logprobs.cpu().split([len(sequence) - 1 for sequence in sequences])
            for index, part in zip(block, parts, strict=True):
                scores[index] = part.tolist()
        return scores
