"""Direct preference optimisation on whole episodes: loss on the agent's tokens of every turn.

loss = -log sigmoid(beta * [(log pi - log ref)(chosen) - (log pi - log ref)(rejected)
                           - keep_chosen * max(0, (log ref - log pi)(chosen))])
"""

import logging
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from common.config.learner import LearnerSection
from common.errors import ConfigError
from common.store.run_dir import RunDir
from learner.algorithms.interface import sequence_sum
from learner.batch.batching import plan_microbatches
from learner.policy.forward import Passes
from learner.training.step import Loss
from tools.launch.hub import command_part
from tools.offline.config import DpoConfig, DpoSection
from tools.offline.rows import Row, num_episodes, read_rows, token_batch
from tools.offline.scratch import save_policy
from tools.offline.training import (
    WEIGHT,
    Log,
    ignore,
    load_start,
    logged_steps,
    make_passes,
    train_epochs,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two episodes of one item. The chosen one has the higher reward."""

    chosen: Row
    rejected: Row


def run(cfg: DpoConfig, *, log: Log = ignore) -> Path:
    """Train `model.path` on the pairs found in `dpo.data`; return the new policy's folder.

    Raises:
        ConfigError: no data, or no item with episodes of different reward.
    """
    if not cfg.dpo.data:
        raise ConfigError(
            "dpo.data is not set. Set it to a run directory or to a file of episodes."
        )
    model, tokenizer = load_start(cfg.model.path, cfg.learner, max_tokens=cfg.actor.max_model_len)
    rows = read_rows(
        Path(cfg.dpo.data),
        tokenizer=tokenizer,
        max_tokens=cfg.actor.max_model_len,
        key="dpo.data",
        keep_thinking=cfg.actor.keep_thinking,
    )
    pairs = make_pairs(rows, cfg.dpo, seed=cfg.run.seed)
    if not pairs:
        raise ConfigError(
            f"dpo.data={cfg.dpo.data}: no item has two episodes whose rewards differ by"
            f" dpo.min_gap={cfg.dpo.min_gap:g} or more. Lower dpo.min_gap, or add episodes."
        )
    num_left = num_episodes([row for row in rows if row.num_segments > 1])
    logger.info(
        "made preference pairs=%d episodes=%d skipped_with_several_segments=%d",
        len(pairs),
        num_episodes(rows),
        num_left,
    )
    train(model, pairs, cfg.dpo, cfg.learner, seed=cfg.run.seed, log=log)
    return save_policy(Path(cfg.dpo.output), model, tokenizer)


def make_pairs(rows: Sequence[Row], cfg: DpoSection, *, seed: int) -> list[Pair]:
    """Return pairs of one item whose rewards differ by at least `min_gap`.

    Of each item the `max_pairs_per_item` pairs with the largest gaps are kept. Of all pairs,
    `max_pairs` are drawn in a random order that depends on the seed. No episode is on the same side
    of two pairs of an item. An episode of several segments is in no pair, because its reward does
    not belong to a single segment. Common first tokens count in both episodes of a pair or in
    neither. A pair without another trained token on one side is left out.
    """
    chooser = random.Random(seed)
    by_item: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.num_segments == 1:
            by_item[row.item_id].append(row)
    pairs: list[Pair] = []
    for item_id in sorted(by_item):
        members = by_item[item_id]
        chooser.shuffle(members)
        best = sorted(members, key=lambda row: -row.reward)
        worst = sorted(members, key=lambda row: row.reward)
        item_pairs = [
            _equally_masked(high, low)
            for high, low in zip(best, worst, strict=True)
            if high.reward - low.reward >= cfg.min_gap
        ]
        usable = [
            pair
            for pair in item_pairs
            if pair.chosen.mask[1:].any() and pair.rejected.mask[1:].any()
        ]
        pairs += usable[: cfg.max_pairs_per_item]
    chooser.shuffle(pairs)
    return pairs[: cfg.max_pairs or None]


def _equally_masked(chosen: Row, rejected: Row) -> Pair:
    """Return a pair in which a common first token is trained in both episodes or in neither.

    The shared turns of a fork are context. With other masks, the loss would lower their probability
    as that of the trunk alone.
    """
    size = min(len(chosen.token_ids), len(rejected.token_ids))
    is_different = chosen.token_ids[:size] != rejected.token_ids[:size]
    num_common = int(is_different.argmax()) if is_different.any() else size
    common = chosen.mask[:num_common] & rejected.mask[:num_common]
    chosen_mask = np.concatenate([common, chosen.mask[num_common:]])
    rejected_mask = np.concatenate([common, rejected.mask[num_common:]])
    return Pair(
        chosen=replace(chosen, mask=chosen_mask), rejected=replace(rejected, mask=rejected_mask)
    )


def train(
    model: PreTrainedModel,
    pairs: Sequence[Pair],
    cfg: DpoSection,
    learner: LearnerSection,
    *,
    seed: int,
    log: Log = ignore,
) -> list[dict[str, float]]:
    """Train in place; return the metrics of every epoch.

    The reference is the initial model. It scores all pairs once, before the first update, so that
    memory holds one network only.
    """
    learner = cfg.rated(learner)
    passes = make_passes(model, learner)
    reference = _score_pairs(passes, pairs, cfg, learner)  # [pair, 2]
    generator = torch.Generator().manual_seed(seed)

    def one_epoch() -> Iterator[list[list[int]]]:
        """Yield the batches of an epoch, each in parts that fit the token budget."""
        order = torch.randperm(len(pairs), generator=generator).tolist()
        for start in range(0, len(order), cfg.batch_pairs):
            batch = order[start : start + cfg.batch_pairs]
            yield _parts([pairs[i] for i in batch], batch, learner)

    def loss_of(part: Sequence[int], num_in_batch: int) -> Loss:
        """Return the loss of a part, and its sums for the metrics."""
        scores, likelihood = _pair_scores(passes, [pairs[i] for i in part], cfg)
        before = reference[list(part)].to(scores.device)
        losses, margins = preference_loss(
            scores, before, beta=cfg.beta, keep_chosen=cfg.keep_chosen
        )
        sums = {
            "loss": losses.detach().sum(),
            "accuracy": (margins.sign() + 1).sum() / 2,  # An equal margin counts as half.
            "margin": margins.detach().sum(),
            WEIGHT: losses.new_tensor(len(part)),
        }
        return (losses + cfg.sft_coef * likelihood).sum() / num_in_batch, sums

    return train_epochs(
        model,
        passes,
        learner,
        num_epochs=cfg.num_epochs,
        batches=one_epoch,
        loss_of=loss_of,
        metrics=["loss", "accuracy", "margin"],
        log=log,
    )


def preference_loss(
    scores: Tensor, reference: Tensor, *, beta: float, keep_chosen: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return (losses, margins), both [pair].

    Args:
        scores: [pair, 2] log-probabilities of the chosen and the rejected episode, in nats.
        reference: [pair, 2] the same under the reference.
        beta: > 0; factor of the margin.
        keep_chosen: >= 0; penalty in nats of margin for each nat that the chosen episode loses.

    Returns:
        Losses -log sigmoid(margin - beta * keep_chosen * chosen's loss), and margins
        beta * (chosen's gain - rejected's gain).

    Source: arXiv:2305.18290; keep_chosen is lambda of DPO-Positive, arXiv:2402.13228. Episodes of
    one item share most of their tokens, so a lower probability of the rejected one also lowers the
    chosen one.
    """
    gains = scores - reference
    margins = beta * (gains[:, 0] - gains[:, 1])
    lost = F.relu(-gains[:, 0])
    return -F.logsigmoid(margins - beta * keep_chosen * lost), margins


def _pair_scores(passes: Passes, pairs: Sequence[Pair], cfg: DpoSection) -> tuple[Tensor, Tensor]:
    """Return ([pair, 2] log-probabilities, [pair] negative log-likelihood per chosen token)."""
    rows = [row for pair in pairs for row in (pair.chosen, pair.rejected)]
    tokens = token_batch(rows, passes.device, is_packed=passes.is_packed)
    logprobs = passes.score(tokens).logprobs
    counts = torch.tensor([int(row.mask[1:].sum()) for row in rows], device=logprobs.device)
    owner = torch.repeat_interleave(torch.arange(len(rows), device=logprobs.device), counts)
    totals = sequence_sum(logprobs, owner, len(rows))
    means = totals / counts
    scores = (means if cfg.normalize_length else totals).view(-1, 2)
    return scores, -means.view(-1, 2)[:, 0]


def _score_pairs(
    passes: Passes, pairs: Sequence[Pair], cfg: DpoSection, learner: LearnerSection
) -> Tensor:
    """Return [pair, 2] log-probabilities under the model's current weights."""
    scores = torch.zeros(len(pairs), 2)
    for part in _parts(pairs, range(len(pairs)), learner):
        with torch.no_grad():
            part_scores, _ = _pair_scores(passes, [pairs[i] for i in part], cfg)
        scores[part] = part_scores.cpu()
    return scores


def _parts(pairs: Sequence[Pair], names: Sequence[int], learner: LearnerSection) -> list[list[int]]:
    """Return the names of the pairs in parts whose padded tokens fit the budget."""
    lengths = [2 * max(len(p.chosen.token_ids), len(p.rejected.token_ids)) for p in pairs]
    parts = plan_microbatches(lengths, max_tokens=learner.max_tokens_per_microbatch)
    return [[names[i] for i in part] for part in parts]


def prefer(cfg: DpoConfig, run_dir: RunDir) -> int:
    """Train on pairs of episodes; return the exit code."""
    output = cfg.dpo.output or str(run_dir.root / "policy")
    cfg, part = command_part(replace(cfg, dpo=replace(cfg.dpo, output=output)), run_dir, "dpo")
    with logged_steps(cfg, part, "dpo") as log:
        print(f"policy: {run(cfg, log=log)}")
    return 0
