"""Runs one training step: samples in, updated weights and a result out."""

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.segments import RoutingShape
from learner.algorithms.running import RunningBaseline
from learner.batch.batching import Sample, make_minibatches, rows_of
from learner.batch.packing import forest_of
from learner.objective.measures import Overlap
from learner.policy.finite import WeightsNotFinite, first_not_finite
from learner.policy.forward import Networks
from learner.policy.precision import check_range
from learner.training.controller import Controller, Decision
from learner.training.digests import Digester, StepDigests
from learner.training.optimizer import Update, Updates, lr_scale
from learner.training.ranks import RankOperation, Ranks, pack_samples, unpack_samples
from learner.training.state import StateWriter, live_tensors, local_part, restore
from learner.training.step import (
    COMPUTED_METRIC,
    Gradient,
    Gradients,
    ScoredBatch,
    TrainerSettings,
    exchange_metrics,
    information_metrics,
    mean_metrics,
    offpolicy_metrics,
    routing_metrics,
    volume_metrics,
)
from learner.training.throughput import StepProfiler, matrix_rate, step_flops
from learner.weights.source import Gathering, LiveWeights, policy_weights

logger = logging.getLogger(__name__)

INFORMATION_EVERY_STEPS = 5  # Mutual information changes slowly, and costs a twentieth of a step.


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of one training step."""

    metrics: dict[str, float]  # Finite metrics only.
    decision: Decision  # A skipped batch changes no weights.


class Trainer:
    """Owns the optimizer and changes the model's weights. Not thread-safe.

    Example (ppo_epochs 2, num_minibatches 3): `train_on` scores the batch once (pi_prox). It then
    makes six updates, each from the summed gradient of its microbatches. All of this is one step:
    version v becomes v + 1.

    With several ranks each rank has a trainer. Rank 0 announces each operation as an order. The
    other ranks run the order with `carry_out`.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        networks: Networks,
        *,
        ranks: Ranks | None = None,
        announce: Callable[[RankOperation], object] | None = None,
        on_bad_batch: Callable[[int, list[Sample]], object] | None = None,
        before_update: Callable[[], object] | None = None,
        profile_folder: Path | None = None,
    ) -> None:
        """Make the optimizer.

        Args:
            ranks: all ranks that train this policy; None for a single rank. Its mesh shards the
                networks.
            announce: on rank 0, sends an order to the other ranks; None without other ranks.
            on_bad_batch: called with version and samples of a step whose loss was not finite.
            before_update: on rank 0, called before the weights change; it blocks while a reader
                uses them.
            profile_folder: on rank 0, receives the profile of `learner.profile_steps`.
        """
        cfg = settings.learner
        self._cfg = cfg
        self._num_steps = settings.num_steps
        self._engine_dtype = getattr(torch, settings.engine_dtype)
        self._model = networks.policy
        self._critic = networks.critic
        self._ranks = ranks or Ranks()
        self._announce = announce
        self._on_bad_batch = on_bad_batch
        self._before_update = before_update or (lambda: None)
        self._gradients = Gradients(settings, networks, self._ranks)
        dtype = self._gradients.passes.scoring.dtype
        self._updates = Updates(
            self._model, cfg, dtype=dtype, critic=self._critic, ranks=self._ranks
        )
        self._controller = Controller(cfg.controller, max_ahead_steps=settings.max_ahead_steps)
        # Modules by their names in a checkpoint.
        self._modules: dict[str, nn.Module] = {"model": self._model}
        if self._critic is not None:
            self._modules["critic"] = self._critic
        self._digester = Digester(self._ranks, self._modules, lambda: self._updates.masters)
        self.digests: StepDigests | None = None  # Digests of the last batch.
        self._frozen = [each for each in (networks.policy, networks.reference) if each is not None]
        self._writer = StateWriter(self._ranks)
        self._generator = torch.Generator().manual_seed(settings.seed)
        has_memory = cfg.memory_snapshot
        self._profiler = StepProfiler(cfg.profile_steps, profile_folder, has_memory=has_memory)
        self._matrix_rate = 0.0  # FLOP/s of a device. 0: it was not measured.
        # Baseline of advantage=running, an input of `samples_of`.
        self.baseline = RunningBaseline()
        self.num_batches = 0  # Batches decided so far, skipped batches included.

    def report_progress(self, call: Callable[[], object]) -> None:
        """Call this function before each microbatch of this rank."""
        self._gradients.on_microbatch = call

    @property
    def max_ahead_steps(self) -> int:
        """The controller's limit of how many steps ahead of this learner groups may be opened."""
        return self._controller.max_ahead_steps

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the logprob of each token after the first, at temperature 1, per sequence."""
        self._order_ranks(lambda: RankOperation("score", payload=json.dumps(token_ids).encode()))
        with self._ranks.in_touch("scoring"):
            return self._gradients.passes.score_sequences(token_ids)

    def warm_up(self) -> None:
        """Compile the kernels of `learner.compile`, if it is set, before a step needs them."""
        if self._gradients.passes.is_cold:
            self._order_ranks(lambda: RankOperation("warm_up"))
            with self._ranks.in_touch("compiling"):
                self._gradients.passes.warm_up()

    def measure_rate(self) -> None:
        """Measure the device's matrix rate in the precision of the forward pass."""
        dtype = self._gradients.passes.scoring.dtype
        if dtype is torch.float32:
            dtype = next(self._model.parameters()).dtype
        self._matrix_rate = max(self._matrix_rate, matrix_rate(self._model.device, dtype))
        shown = (dtype, self._model.device, torch.get_num_threads(), self._matrix_rate / 1e9)
        logger.info("matrix rate dtype=%s device=%s threads=%d gflops=%.0f", *shown)

    def free_memory(self) -> None:
        """Return the unused memory of torch's allocator on each rank's GPU to the driver."""
        self._order_ranks(lambda: RankOperation("free_memory"))
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @property
    def is_packed(self) -> bool:
        """Whether a block stores its sequences one after another in a single row."""
        return self._gradients.passes.is_packed

    @property
    def routing(self) -> RoutingShape | None:
        """The sizes of recorded experts; None if they are not replayed."""
        return self._gradients.passes.routing

    def check_start(self, *, may_pad: bool) -> None:
        """Compare the learner's scores with those of the networks' own forward passes.

        All ranks call this method together after the weights are loaded.

        Args:
            may_pad: switch to padding if packed sequences attend to each other.

        Raises: ConfigError: the scores differ by more than rounding, or fp16 lacks a weight's
            numbers.
        """
        with self._ranks.in_touch("the start check"):
            if self._updates.loss_scale.is_on:
                check_range((*self._modules.values(), *self._frozen[1:]), self._ranks)
            self._gradients.passes.check_start(may_pad=may_pad)

    def checksums(self) -> tuple[str, str]:
        """Return the checksums of the trained weights and of the frozen weights."""
        self._order_ranks(lambda: RankOperation("checksums"))
        with self._ranks.in_touch("a checksum"):
            return self._digester.standing(self._frozen)

    def live_weights(self, *, ask: Callable[[bytes], object] | None = None) -> LiveWeights:
        """Return the policy's tensors as published, with the numbers of the forward pass.

        The tensors are read from the weights themselves, sharded or not; `before_update` guards
        them.

        Args:
            ask: on rank 0 of several, requests a part from the other ranks. The other ranks pass
                None and call `serve` of the result.
        """
        ranks = self._ranks
        gathering = None
        if ranks.size > 1:
            assert ranks.publish_group is not None
            device = torch.device(ranks.publish_device)
            gathering = Gathering(ranks.publish_group, ranks.index, device, ask)
        pass_dtype = self._gradients.passes.scoring.dtype
        return policy_weights(
            self._model, self._engine_dtype, pass_dtype=pass_dtype, gathering=gathering
        )

    def carry_out(self, order: RankOperation) -> None:
        """Run an order of rank 0 on this rank."""
        match order.kind:
            case "train":
                samples = unpack_samples(order.payload)
                self.train_on(
                    samples,
                    version=order.version,
                    must_train=order.must_train,
                    must_skip=order.must_skip,
                )
            case "score":
                self.score(json.loads(order.payload))
            case "save":
                self.save(Path(order.payload.decode()))
            case "checksums":
                self.checksums()
            case "free_memory":
                self.free_memory()
            case "warm_up":
                self.warm_up()
            case "configure":
                self.configure(**json.loads(order.payload))
            case _:
                raise ValueError(f"unknown kind of order: {order.kind!r}")

    def configure(self, *, lr: float, muon_lr: float, num_steps: int) -> None:
        """Use other learning rates and another length of the schedule from the next step on."""
        values = {"lr": lr, "muon_lr": muon_lr, "num_steps": num_steps}
        self._order_ranks(lambda: RankOperation("configure", payload=json.dumps(values).encode()))
        self._num_steps = num_steps
        self._updates.optimizer.set_rates(lr, muon_lr)

    def _order_ranks(self, order: Callable[[], RankOperation]) -> None:
        """Send an order to the other ranks, if there are any."""
        if self._announce is not None and self._ranks.size > 1:
            self._announce(order())

    def train_on(
        self,
        samples: Sequence[Sample],
        *,
        version: int,
        must_train: bool = False,
        must_skip: bool = False,
    ) -> TrainResult:
        """Make ppo_epochs x num_minibatches updates; return the step's metrics and the decision.

        Samples without sampled tokens add nothing. An update whose loss or gradient is not finite
        is skipped and counted. Metrics that are not finite are left out.

        Args:
            version: version of the current weights; determines the learning rate and the lag.
            must_train: the controller may not skip the batch, which was trained before a restart.
            must_skip: the controller must skip the batch, which was skipped before a restart.

        Raises:
            ValueError: no sample has a sampled token.
            TrainingDiverged: this was the `max_bad_steps`-th step in a row with a skipped update.
        """
        started_s = time.perf_counter()
        samples = [sample for sample in samples if sample.num_sampled_tokens > 0]
        if not samples:
            raise ValueError("the batch has no sampled token to train on")
        order = partial(RankOperation, "train", version, must_train, must_skip)
        self._order_ranks(lambda: order(pack_samples(samples)))
        decide = partial(
            self._controller.decide, version=version, must_train=must_train, must_skip=must_skip
        )
        with self._ranks.in_touch("a step"), self._profiler.step(version + 1):
            return self._train(samples, version, decide, started_s)

    def _train(
        self, samples: list[Sample], version: int, decide: Callable[..., Decision], started_s: float
    ) -> TrainResult:
        """Make all updates of a batch; return the metrics and the controller's decision."""
        self._gradients.passes.warm_up()
        self._digester.begin(samples)
        if self._gradients.passes.experts is not None:
            self._gradients.passes.experts.take_counts()  # Those of scores between two steps.
        answered: dict[str, float] = {}
        if version % INFORMATION_EVERY_STEPS == 0:
            answered = information_metrics(samples, self._gradients.passes)
        batch = self._gradients.prepare(rows_of(samples), version)
        decision: Decision | None = None
        overlap = Overlap(math.nan, math.nan)
        updates: list[Update] = []
        parts = self._minibatches(batch)
        self._updates.vanished.begin()
        self._digester.prepared(batch.samples, parts)
        for part in parts:
            self._updates.zero_grad()
            loss_scale = self._updates.loss_scale.value
            gradient = self._gradients.accumulate(batch, part, scale=loss_scale)
            batch = batch.with_scored(gradient.logprobs)
            if decision is None:
                overlap = self._gradients.overlap(batch)
                shares = {n: gradient.sums[f"policy/{n}"] for n in ("masked_frac", "clipped_frac")}
                decision = decide(**overlap._asdict(), **shares)
                if decision.is_skipped:
                    break
            updates.append(self._update(gradient, version, decision.lr_scale))
        self._updates.zero_grad()  # The memory of the gradients is free between steps.
        assert decision is not None  # There is at least one minibatch.
        self.num_batches += 1
        self._count_bad(updates, batch)
        self.digests = self._digester.finish(f"{decision} {self._controller.state_dict()}")
        vanished = self._updates.vanished.share(lr=self._updates.optimizer.lr)
        num_parts = len(parts) // self._cfg.ppo_epochs
        step_s = time.perf_counter() - started_s
        metrics = self._metrics(batch, updates, decision, num_parts=num_parts, step_s=step_s)
        if any(update.is_good for update in updates):
            metrics["train/vanished_update_frac"] = vanished
        answered |= {f"offpolicy/{name}": value for name, value in overlap._asdict().items()}
        metrics |= {name: value for name, value in answered.items() if math.isfinite(value)}
        return TrainResult(metrics=metrics, decision=decision)

    def _minibatches(self, batch: ScoredBatch) -> list[list[int]]:
        """Return the minibatches of all epochs; a skipped step draws the same random numbers."""
        num_parts = self._cfg.num_minibatches
        return [
            part
            for _ in range(self._cfg.ppo_epochs)
            for part in make_minibatches(batch.samples, num_parts, generator=self._generator)
        ]

    def _update(self, gradient: Gradient, version: int, scale: float) -> Update:
        """Make one optimizer update, at the scheduled rate times `scale`."""
        metrics = dict(gradient.sums)
        self._digester.gradient()
        self._before_update()  # The update is collective: the other ranks wait for rank 0.
        return self._updates.make(
            metrics.pop("loss"),
            metrics,
            scale=lr_scale(version, self._num_steps, self._cfg) * scale,
            changes_policy=self._critic is None or version >= self._cfg.critic.warmup_steps,
        )

    def _metrics(
        self,
        batch: ScoredBatch,
        updates: list[Update],
        decision: Decision,
        *,
        num_parts: int,
        step_s: float,
    ) -> dict[str, float]:
        """Return the metrics of a step with `num_parts` minibatches in each epoch."""
        metrics = mean_metrics(updates)
        if COMPUTED_METRIC in metrics:
            metrics[COMPUTED_METRIC] *= num_parts
        seen = (self._gradients.before(batch), self._gradients.known(batch))
        metrics |= offpolicy_metrics(batch.samples, *seen, batch.version)
        metrics |= volume_metrics(batch.samples, step_s)
        metrics |= self._speed_metrics(batch, len(updates) / num_parts, step_s)
        if self.routing is not None:
            metrics |= routing_metrics(batch.samples)
        if self._gradients.passes.experts is not None:
            metrics |= exchange_metrics(self._gradients.passes.experts, self._ranks)
        if self._updates.loss_scale.is_on:
            metrics["train/loss_scale"] = self._updates.loss_scale.value
            metrics["train/num_overflows"] = float(sum(each.is_overflow for each in updates))
        metrics["train/is_bf16"] = float(self._gradients.passes.scoring.dtype is torch.bfloat16)
        metrics["train/is_cuda"] = float(self._model.device.type == "cuda")
        metrics["train/lr"] = self._updates.optimizer.lr
        metrics["controller/lr_scale"] = decision.lr_scale
        metrics["controller/skipped"] = float(decision.is_skipped)
        metrics["controller/max_ahead_steps"] = float(self._controller.max_ahead_steps)
        return {name: value for name, value in metrics.items() if math.isfinite(value)}

    def _speed_metrics(
        self, batch: ScoredBatch, num_epochs: float, step_s: float
    ) -> dict[str, float]:
        """Return tokens per second of a device, and the share of its matrix rate that was used.

        Each epoch counts one forward and backward pass of the policy over the batch, and tokens
        that its rows have in common once.
        """
        rows = [sample.trajectory for sample in batch.samples]
        lengths = [len(row.token_ids) for row in rows]
        metrics = {"perf/tokens_per_s_per_device": sum(lengths) / step_s / self._ranks.size}
        if self._matrix_rate:
            forest = forest_of(rows)
            num_scored = forest.num_scored(rows)
            flops = num_epochs * step_flops(self._model, lengths, num_scored, forest.shared)
            rate = flops / step_s / self._ranks.size
            if rate > self._matrix_rate:  # Other programs had slowed the measurement down.
                self.measure_rate()
                self._matrix_rate = max(self._matrix_rate, rate)
            metrics["perf/mfu"] = rate / self._matrix_rate
            metrics["perf/matrix_tflops"] = self._matrix_rate / 1e12
        return metrics

    def _count_bad(self, updates: list[Update], batch: ScoredBatch) -> None:
        """Count steps with values that are not finite; raise after too many in a row."""
        on_bad = self._on_bad_batch
        self._updates.count_bad(
            updates,
            unit="version",
            number=batch.version,
            remedy="Such updates were skipped, so the newest checkpoint is good. The batches are in"
            " bad_batches/. A lower learner.lr or learner.max_grad_norm may help.",
            on_bad=None if on_bad is None else partial(on_bad, batch.version, batch.samples),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that training changes, live, by name: "model.", "critic." or moments.

        Each rank returns its own shards. Rounded weights are replaced by their masters.
        """
        live = live_tensors(self._modules, self._updates.torch_optimizers)
        masters = self._updates.masters
        return {name: masters.get(id(each), each) for name, each in live.items()}

    def take_weights(self) -> None:
        """Use weights that were loaded after the construction, with `learner.rounding`."""
        self._updates.take_weights(0)

    def values(self) -> dict[str, Any]:
        """Return the other values that a resumed run needs to continue exactly, for JSON."""
        return {
            "baseline": self.baseline.state_dict(),
            "controller": self._controller.state_dict()
            | {"most_ahead": self._controller.most_ahead},
            "generator": self._generator.get_state().tolist(),
            "loss_scale": self._updates.loss_scale.state_dict(),
            "num_bad_steps_in_a_row": self._updates.num_bad_steps_in_a_row,
            "num_batches": self.num_batches,
            "num_updates": self._updates.num_updates,
            "rounded_at": self._updates.rounded_at,
        }

    def save(self, folder: Path) -> Future[Any]:
        """Begin to write the tensors of all ranks; return the pending write.

        Training may continue after the return.

        Raises: WeightsNotFinite: names the first tensor with NaN or infinity on any rank.
        """
        self._order_ranks(lambda: RankOperation("save", payload=str(folder).encode()))
        with self._ranks.in_touch("a checkpoint"):
            tensors = self.tensors()
            bad = torch.zeros(len(tensors), dtype=torch.int32)
            bad_index = first_not_finite([local_part(each) for each in tensors.values()])
            if bad_index is not None:
                bad[bad_index] = 1
            bad_indices = self._ranks.sum(bad).nonzero()
            if len(bad_indices):
                name = list(tensors)[int(bad_indices[0])]
                raise WeightsNotFinite(name, "the checkpoint is not written")
            return self._writer.start(tensors, folder)

    def restore(self, folder: Path, values: dict[str, Any]) -> None:
        """Load the results of `save` and `values`. Raises: ConfigError: the model differs."""
        restore(folder, self._modules, self._updates.torch_optimizers, ranks=self._ranks)
        self._controller.load_state_dict(values["controller"])
        self.baseline.load_state_dict(values.get("baseline", {"items": {}, "tasks": {}}))
        self._generator.set_state(torch.tensor(values["generator"], dtype=torch.uint8))
        self._updates.num_bad_steps_in_a_row = values["num_bad_steps_in_a_row"]
        self._updates.num_updates = values["num_updates"]
        self._updates.loss_scale.load_state_dict(values.get("loss_scale", {}))
        self._updates.take_weights(values.get("rounded_at", 0))
        # 0: the checkpoint is older than this counter.
        self.num_batches = values.get("num_batches", 0)
