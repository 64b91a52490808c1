"""Computes gradients from the samples of a step: scores, correction, loss, backward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from common.config.algorithm import AlgorithmSection, Proximal
from common.config.learner import LearnerSection
from common.wire.messages import Trajectory
from learner.algorithms.critic import value_loss
from learner.algorithms.interface import LossInputs, log_ratio
from learner.algorithms.table import surrogate_of, weight_of
from learner.algorithms.teacher import with_teacher
from learner.batch.batching import (
    BySample,
    MicroBatch,
    Sample,
    TokenBatch,
    by_sample,
    collate_tokens,
    each_microbatch,
    in_order,
    plan_blocks,
    plan_trees,
    sampled,
    with_advantage,
    with_ends,
)
from learner.batch.packing import placed
from learner.objective.advantages import Scored, advantages_from_critic
from learner.objective.description import proximal_in_use
from learner.objective.loss import (
    Denominator,
    anchor_and_weights,
    kl_weights,
    metric_names,
    policy_loss,
)
from learner.objective.measures import (
    Overlap,
    first_answers,
    lag_statistics,
    mutual_information,
    overlap_of,
    ratio_statistics,
    weight_moments,
)
from learner.policy.expert_ranks import ExpertRanks
from learner.policy.expert_routing import balance_loss_of
from learner.policy.forward import Networks, Passes, Scores
from learner.training.optimizer import Update
from learner.training.ranks import Ranks, deal

# Mean of the routers' load-balancing loss over microbatches, by their tokens.
BALANCE_METRIC = "routing/balance_loss"
CRITIC_METRICS = ("critic/loss", "critic/value_mean", "critic/target_mean")
# Tokens of a pass over the batch, those that several rows of a microbatch share once.
COMPUTED_METRIC = "train/num_computed_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """The settings of a trainer, apart from its networks."""

    learner: LearnerSection
    algorithm: AlgorithmSection
    num_steps: int  # Steps of the run; the learning rate schedule ends there.
    seed: int = 0  # Seed of the minibatch order.
    temperature: float = 1.0  # Temperature of the sampler that computed the samples' logprobs.
    engine_dtype: str = "bfloat16"  # Value of `model.dtype`; a bf16 engine rounds its logits.
    max_ahead_steps: int = 0  # Upper limit of the dispatch gate.
    longest_tokens: int = 0  # Tokens of the longest episode.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredBatch:
    """The samples of a step and the networks' scores before its first update."""

    samples: list[Sample]
    version: int  # Version of the weights before the step.
    # [tokens] nats before the step, of the samples scored so far
    before: BySample = field(default_factory=dict)
    first: BySample = field(default_factory=dict)  # [tokens] nats at each sample's first update
    # [tokens] nats of the reference; empty without a reference
    reference: BySample = field(default_factory=dict)
    # [tokens] 0 or 1, mask of a correction over a whole batch
    trusted: BySample = field(default_factory=dict)

    def with_scored(self, logprobs: BySample) -> "ScoredBatch":
        """Return the batch with `logprobs` added for samples without a score."""
        return replace(self, before=logprobs | self.before, first=logprobs | self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The result of a pass over a minibatch; the parameters hold the gradient itself."""

    sums: dict[str, float]  # Metrics of the minibatch's computed tokens, over all ranks.
    logprobs: BySample  # [tokens] nats of this rank's samples


Loss = tuple[Tensor, dict[str, Tensor]]  # The loss of a microbatch, and its metrics: scalars.


def add_gradients(
    losses: Iterable[Loss], names: Sequence[str], ranks: Ranks, *, scale: float = 1.0
) -> dict[str, float]:
    """Add the gradients of the losses; return the sums of their metrics over all ranks.

    Args:
        scale: factor of the gradients, see `LossScale`; the metrics are those without it.
        losses: computed one at a time, so that memory holds the graph of one microbatch.
        names: names of the metrics to sum, the same on all ranks.
    """
    # Tensors on the device: reading each number would block until it is computed.
    rows: list[Tensor] = []
    for loss, metrics in losses:
        (loss if scale == 1 else loss * scale).backward()
        rows.append(torch.stack([metrics[name] for name in names]))  # [metric]
    totals = torch.zeros(len(names), dtype=torch.float64)  # Zeros, for a rank without samples.
    if rows:
        totals = torch.stack(rows).double().sum(0)
    return dict(zip(names, ranks.sum_shares(totals).cpu().tolist(), strict=True))


class Gradients:
    """Computes gradients of batches. It keeps no state between two calls."""

    def __init__(self, settings: TrainerSettings, networks: Networks, ranks: Ranks) -> None:
        self._cfg = settings.learner
        cfg = self._algorithm = settings.algorithm
        is_more = cfg.entropy_coef or cfg.kl_coef or cfg.drift_coef or networks.critic is not None
        is_more = is_more or cfg.teacher.is_on or not surrogate_of(cfg).is_zero_without_advantage
        self._is_balanced = cfg.router_aux_coef != 0
        if self._is_balanced:
            balance_loss_of(networks.policy)  # Refuses families without this loss.
        # True: a sample with zero advantage has no gradient.
        self._is_surrogate_alone = not (is_more or self._is_balanced)
        self._proximal = proximal_in_use(settings.algorithm, settings.learner)
        self._max_tokens = settings.learner.row_tokens
        self._networks = networks
        self._ranks = ranks
        self.on_microbatch: Callable[[], object] = lambda: None  # Called before each microbatch.
        self.passes = Passes(
            settings.learner,
            networks,
            temperature=settings.temperature,
            engine_dtype=settings.engine_dtype,
            mesh=ranks.mesh,
            sequence_group=ranks.sequence_group,
            expert_mesh=ranks.expert_mesh,
            replays_routing=settings.algorithm.routing_replay,
            longest_tokens=settings.longest_tokens,
        )

    def prepare(self, samples: list[Sample], version: int) -> ScoredBatch:
        """Make the passes without gradient that must precede the first update of a batch.

        Returns: the batch; with a critic its samples have advantages and value targets.
        """
        critic = self._networks.critic
        has_reference = self._networks.has_reference
        batch = ScoredBatch(samples=samples, version=version)
        batch_mask = weight_of(self._algorithm).batch_mask
        is_asked = batch_mask is not None or self._proximal is Proximal.RECOMPUTED or has_reference
        if not is_asked and critic is None:
            return batch
        values: BySample = {}
        ends: BySample = {}
        places: dict[int, int] = {}
        scored_rows = samples
        if critic is not None:
            scored_rows, places = with_ends(samples)
        for micro in self._microbatches(scored_rows, range(len(scored_rows))):
            with torch.no_grad():
                scores = self.passes.score(micro.tokens, with_values=critic is not None)
                by_reference = self.passes.score_by_reference(micro.tokens)
            if by_reference is not None:
                batch.reference.update(_of_rows(by_sample(micro, by_reference), len(samples)))
            batch.before.update(_of_rows(by_sample(micro, scores.logprobs), len(samples)))
            if scores.values is not None and scores.end_values is not None:
                values |= by_sample(micro, scores.values)
                ends |= dict(zip(micro.sample_indices, scores.end_values.split(1), strict=True))
        with torch.no_grad():
            for tokens in self._idle(scored_rows, range(len(scored_rows))):
                self.passes.score(tokens, with_values=critic is not None)
                self.passes.score_by_reference(tokens)
        if batch_mask is not None:
            mask = batch_mask(self._log_ratios(batch), self._algorithm).float()
            moved = placed({"mask": mask.numpy()}, self._networks.device)["mask"]
            sizes = [sample.num_sampled_tokens for sample in samples]
            batch.trusted.update(enumerate(moved.split(sizes)))
        if critic is None:
            return batch
        sizes = [sample.num_sampled_tokens for sample in scored_rows]
        of_ends = self._whole(ends, [1] * len(scored_rows)).numpy()
        scored = Scored(
            values=self._whole(values, sizes).numpy(),
            end_values=of_ends[[places.get(index, index) for index in range(len(samples))]],
            logprobs=self.before(batch).numpy(),
        )
        samples = advantages_from_critic(samples, scored, self._algorithm, self._cfg.critic)
        return replace(batch, samples=samples)

    def _log_ratios(self, batch: ScoredBatch) -> Tensor:
        """Return log(pi / mu) [tokens] nats of all ranks' samples, before the step."""
        trajectories = [sample.trajectory for sample in batch.samples]
        mu = sampled(trajectories, [t.logprobs for t in trajectories]).astype(np.float32)
        return log_ratio(self.before(batch), torch.from_numpy(mu))

    def accumulate(
        self, batch: ScoredBatch, part: Sequence[int], *, scale: float = 1.0
    ) -> Gradient:
        """Add the gradient of a minibatch (indices of samples), microbatch by microbatch.

        Args:
            scale: factor of the gradient, see `LossScale`.
        """
        samples = [batch.samples[index] for index in part]
        if self._is_surrogate_alone:
            part = with_advantage(batch.samples, part)
        denominator = Denominator(
            num_tokens=sum(sample.num_sampled_tokens for sample in samples),
            num_sequences=sum(sample.row == 0 for sample in samples),
        )
        has_critic = self._networks.critic is not None
        names = ["loss", COMPUTED_METRIC, *metric_names(self._algorithm)]
        names += CRITIC_METRICS if has_critic else ()
        names += [BALANCE_METRIC] if self._is_balanced else []
        logprobs: BySample = {}
        losses = self._losses(batch, part, samples, denominator, logprobs)
        sums = add_gradients(losses, names, self._ranks, scale=scale)
        num_computed = sum(batch.samples[index].num_sampled_tokens for index in part)
        for name in (name for name in names if name.startswith(("policy/", "teacher/"))):
            sums[name] *= denominator.num_tokens / num_computed
        return Gradient(sums=sums, logprobs=logprobs)

    def _losses(
        self,
        batch: ScoredBatch,
        part: Sequence[int],
        samples: Sequence[Sample],
        denominator: Denominator,
        logprobs: BySample,
    ) -> Iterator[Loss]:
        """Yield the losses of this rank's share; then make the passes of other ranks' blocks.

        Args:
            part: indices of the samples to compute.
            samples: all samples of the minibatch.
            logprobs: receives the scores of the computed samples.
        """
        marks = [sample.state_marks for sample in samples if sample.state_marks is not None]
        num_states = sum(float(each.sum()) for each in marks)
        num_all_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
        has_critic = self._networks.critic is not None
        for micro in self._microbatches(batch.samples, part):
            scores = self.passes.score(
                micro.tokens,
                with_entropy=self._algorithm.entropy_coef != 0,
                with_values=has_critic,
                with_balance=self._is_balanced,
                with_support=self._algorithm.teacher.num_top > 0,
            )
            loss, metrics = policy_loss(
                self.loss_inputs(batch, micro, scores), denominator, self._algorithm
            )
            if has_critic:
                loss = loss + self._value_term(micro, scores, num_states, metrics)
            if scores.balance is not None:
                balance = scores.balance * (micro.num_tokens / num_all_tokens)
                loss = loss + self._algorithm.router_aux_coef * balance
                metrics[BALANCE_METRIC] = balance.detach()
            logprobs |= by_sample(micro, scores.logprobs)
            metrics[COMPUTED_METRIC] = loss.new_full((), micro.tokens.num_computed)
            yield loss, {**metrics, "loss": loss.detach()}
        for tokens in self._idle(batch.samples, part):
            scores = self.passes.score(tokens, with_values=has_critic)
            of_nothing = [scores.logprobs, *([] if scores.values is None else [scores.values])]
            torch.cat(of_nothing).sum().backward()

    def loss_inputs(self, batch: ScoredBatch, micro: MicroBatch, scores: Scores) -> LossInputs:
        """Return the inputs of the loss for a microbatch, see `objective/loss.py`."""
        indices = micro.sample_indices
        new = scores.logprobs
        # A critic or a reference also fills `before`; it is the anchor only if configured.
        seen = batch.before if self._proximal is Proximal.RECOMPUTED else batch.first
        is_known = all(index in seen for index in indices)
        teacher = self._algorithm.teacher
        if teacher.is_on:
            taught = with_teacher(micro.advantages, new, micro.teacher_logprobs, teacher)
            micro = replace(micro, advantages=taught)
        anchor, weights = anchor_and_weights(
            new,
            in_order(seen, indices) if is_known else new.detach(),
            micro,
            self._algorithm,
            proximal=self._proximal,
            version=batch.version,
        )
        if batch.trusted:
            weights = weights * in_order(batch.trusted, indices)
        return LossInputs(
            new_logprobs=new,
            anchor_logprobs=anchor,
            sampler_logprobs=micro.sampler_logprobs,
            advantages=micro.advantages,
            is_weights=weights,
            sequence_ids=micro.sequence_ids,
            turn_ids=micro.turn_ids,
            num_turns=micro.num_turns,
            num_sequences=micro.num_sequences,
            episode_tokens=micro.episode_tokens,
            entropy=scores.entropy,
            reference_logprobs=in_order(batch.reference, indices) if batch.reference else None,
            kl_weights=kl_weights(new, micro, self._algorithm) if batch.reference else None,
            teacher_logprobs=micro.teacher_logprobs,
            teacher_top=micro.teacher_top,
            support_logprobs=scores.support,
        )

    def _value_term(
        self, micro: MicroBatch, scores: Scores, num_states: float, metrics: dict[str, Tensor]
    ) -> Tensor:
        """Return the critic's term of the loss, and add its metrics."""
        targets = micro.value_targets
        old = micro.values
        marks = micro.state_marks
        values = scores.values
        if values is None or targets is None or old is None or marks is None:
            raise ValueError("the critic's loss needs values, old values, targets and state marks")
        cfg = self._cfg.critic
        loss = value_loss(values, targets, old, marks / num_states, clip=cfg.clip)
        metrics["critic/loss"] = loss.detach()
        metrics["critic/value_mean"] = (marks * values.detach()).sum() / num_states
        metrics["critic/target_mean"] = (marks * targets).sum() / num_states
        critic = self._networks.critic
        return loss * cfg.coef if critic is not None and critic.trunk is None else loss

    def before(self, batch: ScoredBatch) -> Tensor:
        """Return the logprobs of all ranks, [tokens] nats on the CPU, zeros without a score."""
        return self._whole(batch.before, [sample.num_sampled_tokens for sample in batch.samples])

    def known(self, batch: ScoredBatch) -> Tensor:
        """Return [tokens] bool of all ranks, on the CPU: whether `before` scores the token."""
        sizes = [sample.num_sampled_tokens for sample in batch.samples]
        is_scored = torch.tensor([index in batch.before for index in range(len(sizes))])
        return self._ranks.sum_shares(is_scored.int()).bool().repeat_interleave(torch.tensor(sizes))

    def overlap(self, batch: ScoredBatch) -> Overlap:
        """Return the overlap of pi and mu over all ranks' scored tokens."""
        moments = torch.zeros(3, dtype=torch.float64)
        indices = sorted(batch.before)
        if indices:
            trajectories = [batch.samples[index].trajectory for index in indices]
            mu = sampled(trajectories, [t.logprobs for t in trajectories]).astype(np.float32)
            ratio = log_ratio(in_order(batch.before, indices).cpu(), torch.from_numpy(mu)).exp()
            moments = weight_moments(ratio)
        return overlap_of(self._ranks.sum_shares(moments))

    def _microbatches(self, samples: Sequence[Sample], part: Sequence[int]) -> Iterator[MicroBatch]:
        """Yield this rank's share of a minibatch in blocks within the token budget."""
        for micro in each_microbatch(
            samples,
            self._shares(samples, part)[self._ranks.share],
            max_tokens=self._max_tokens,
            device=self._networks.device,
            is_packed=self.passes.is_packed,
            shares_prefix=self._cfg.shared_prefix,
        ):
            self.on_microbatch()
            yield micro

    def _idle(self, samples: Sequence[Sample], part: Sequence[int]) -> list[TokenBatch]:
        """Return blocks without scored tokens, so that all ranks make the same number of passes."""
        if self._ranks.num_shares == 1:
            return []
        nums = [
            len(
                plan_blocks(
                    samples,
                    share,
                    max_tokens=self._max_tokens,
                    is_packed=self.passes.is_packed,
                    shares_prefix=self._cfg.shared_prefix,
                )
            )
            for share in self._shares(samples, part)
        ]
        ids = samples[0].trajectory.token_ids[:1]
        of_none = np.zeros(1, dtype=bool)
        device = self._networks.device
        is_packed = self.passes.is_packed
        idle = collate_tokens([ids], [of_none], device=device, is_packed=is_packed)
        return [idle] * (max(nums) - nums[self._ranks.share])

    def _shares(self, samples: Sequence[Sample], part: Sequence[int]) -> list[list[int]]:
        """Return the samples of `part` in each share. Its number does not depend on `part`.

        The ends of episodes are dealt as well, also in passes without them: a row then belongs to
        the same share in all passes, and its scores before the step are there.

        Samples are dealt by squared length, which is the cost of attention. With shared prefixes
        whole pieces of trees are dealt, by their pairs of queries and keys. A piece has at most the
        tokens of a block, and of a share.
        """
        num_shares = self._ranks.num_shares
        if num_shares == 1:
            return [list(part)]
        rows, _ = with_ends(samples)
        owners = [0] * len(rows)
        if self.passes.is_packed and self._cfg.shared_prefix:
            everyone = range(len(rows))
            trees = plan_trees(rows, everyone, max_tokens=self._max_tokens)
            of_share = -(-sum(tree.num_tokens for tree in trees) // num_shares)
            pieces = plan_trees(rows, everyone, max_tokens=min(self._max_tokens, of_share))
            dealt = deal([piece.num_pairs for piece in pieces], num_shares)
            for piece, owner in zip(pieces, dealt, strict=True):
                for index in piece.indices:
                    owners[index] = owner
        else:
            lengths = [len(row.trajectory.token_ids) for row in rows]
            owners = deal([length**2 for length in lengths], num_shares)
        return [[i for i in part if owners[i] == share] for share in range(num_shares)]

    def _whole(self, parts: BySample, sizes: Sequence[int]) -> Tensor:
        """Return the entries of all samples and ranks in order, zeros for missing entries."""
        indices = sorted(parts)
        whole = torch.zeros(sum(sizes))
        if indices:  # One copy from the device for all samples.
            ends = np.cumsum(sizes)
            joined = in_order(parts, indices).cpu().split([sizes[index] for index in indices])
            for index, part in zip(indices, joined, strict=True):
                whole[int(ends[index]) - sizes[index] : int(ends[index])] = part
        return self._ranks.sum_shares(whole)


def _of_rows(parts: BySample, num_rows: int) -> BySample:
    """Return the entries of training rows, without those of the ends of episodes."""
    return {index: part for index, part in parts.items() if index < num_rows}


MAX_LAG_SHOWN = 8  # The histogram's last bin holds this lag and all larger ones.


def mean_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Average the metrics of the successful updates, and count the failed updates."""
    good = [update for update in updates if update.is_good]
    num_overflows = sum(update.is_overflow for update in updates)
    metrics = {
        "train/num_updates": float(len(good)),
        "train/num_bad_updates": float(len(updates) - len(good) - num_overflows),
    }
    if good:
        for name in good[0].metrics:
            metrics[name] = sum(update.metrics[name] for update in good) / len(good)
        metrics["train/grad_norm"] = sum(update.grad_norm for update in good) / len(good)
    return metrics


def offpolicy_metrics(
    samples: Sequence[Sample], before: Tensor, is_known: Tensor, version: int
) -> dict[str, float]:
    """Compare the policy before the step with the sampler; separate noise from version lag.

    Args:
        before: [tokens] nats, policy before the step.
        is_known: [tokens] bool, False for tokens that a skipped step did not score.
        version: version of that policy.
    """
    trajectories = [sample.trajectory for sample in samples]
    mu = torch.from_numpy(sampled(trajectories, [t.logprobs for t in trajectories])).float()
    lag = version - torch.from_numpy(sampled(trajectories, [t.versions for t in trajectories]))
    metrics: dict[str, float] = {}
    if is_known.any():
        metrics |= ratio_statistics(before[is_known], mu[is_known])
        metrics |= lag_statistics(before[is_known], mu[is_known], lag[is_known])
        metrics |= _metrics_by_actor(trajectories, before, mu, lag, is_known)
    metrics["offpolicy/lag_mean"] = lag.double().mean().item()
    metrics["offpolicy/lag_max"] = float(lag.max())
    for number in range(MAX_LAG_SHOWN + 1):
        in_bin = lag == number if number < MAX_LAG_SHOWN else lag >= number
        metrics[f"offpolicy/lag_{number}_tokens"] = float(in_bin.sum())
    return metrics


def _metrics_by_actor(
    trajectories: Sequence[Trajectory], before: Tensor, mu: Tensor, lag: Tensor, is_known: Tensor
) -> dict[str, float]:
    """Return noise, lag and importance weights of each actor; {} with one actor.

    Engines may differ in precision, so each has its own noise. The mean weight pi / mu of an engine
    is 1 up to chance if its recorded logprobs are those of its samples.
    """
    names = sorted({trajectory.actor for trajectory in trajectories})
    if len(names) < 2:
        return {}
    numbers = {name: number for number, name in enumerate(names)}
    owners = [np.full(len(each.loss_mask), numbers[each.actor]) for each in trajectories]
    owner = torch.from_numpy(sampled(trajectories, owners))  # [tokens]
    metrics: dict[str, float] = {}
    for name, number in numbers.items():
        is_of_actor = is_known & (owner == number)
        if not is_of_actor.any():
            continue
        statistics = lag_statistics(before[is_of_actor], mu[is_of_actor], lag[is_of_actor])
        overlap = overlap_of(weight_moments(log_ratio(before[is_of_actor], mu[is_of_actor]).exp()))
        statistics |= {f"offpolicy/{key}": value for key, value in overlap._asdict().items()}
        metrics |= {f"{key}/{name}": value for key, value in statistics.items()}
    return metrics


def information_metrics(samples: Sequence[Sample], passes: Passes) -> dict[str, float]:
    """Return how far answers depend on prompts, see `information.py`; {} without two prompts."""
    pairs = first_answers([sample.trajectory for sample in samples])
    if len(pairs) < 2:
        return {}
    prompts, answers = zip(*pairs, strict=True)
    return mutual_information(passes.score_crosswise(prompts, answers))


def routing_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of the tokens whose experts the engine recorded."""
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    num_recorded = sum(int(sample.trajectory.expert_mask.sum()) for sample in samples)
    return {"routing/recorded_frac": num_recorded / num_tokens}


def exchange_metrics(experts: ExpertRanks, ranks: Ranks) -> dict[str, float]:
    """Return the bytes that tokens cost on the way to experts and back, and the largest load.

    All ranks call this function together. The load is the number of pairs of a token and an expert
    that a rank computes, over its mean; 1: all ranks compute equally many.
    """
    counts = torch.zeros(ranks.size, 2, dtype=torch.float64)
    counts[ranks.index] = torch.tensor(experts.take_counts(), dtype=torch.float64)
    sent_bytes, computed = ranks.sum(counts).T
    return {
        "routing/exchanged_bytes": float(sent_bytes.sum()),
        "routing/rank_load_max": float(computed.max() / computed.mean()),
    }


def volume_metrics(samples: Sequence[Sample], step_s: float) -> dict[str, float]:
    """Return the numbers of tokens of a step, and their rate."""
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    return {
        "train/num_tokens": float(num_tokens),
        "train/num_sampled_tokens": float(sum(sample.num_sampled_tokens for sample in samples)),
        "train/tokens_per_s": num_tokens / step_s,
        "train/step_s": step_s,
    }
