"""The cost of a training step, compared with its bare arithmetic."""

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.learner.batch import MAX_LAG, BatchShape, make_batch, with_sampler_logprobs
from benchmarks.suite import Suite
from common.config.algorithm import Aggregation, AlgorithmSection
from common.config.learner import Attention, Layout, LearnerSection
from learner.batch.batching import Sample, each_microbatch
from learner.policy.forward import Networks, Passes
from learner.policy.model import vocabulary_size
from learner.training.optimizer import make_optimizer
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer

MAX_RATIO = 1.15
NUM_WARM_UPS = 2
STILL = 1e-9  # Learning rate. The update is computed, but the weights hardly change.
BARE = "bare"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of each contender's runs; entry i of all belongs to one round."""

    seconds: dict[str, list[float]]
    num_tokens: int  # Tokens of one step without padding.

    def ratios(self, name: str) -> list[float]:
        """Return the ratios of `name` to the bare step, round by round."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[BARE], strict=True)]

    def ratio(self, name: str) -> float:
        """Return the median of the rounds' ratios."""
        return statistics.median(self.ratios(name))

    def spread(self, name: str) -> tuple[float, float]:
        """Return the quartiles of the rounds' ratios."""
        quartiles = statistics.quantiles(self.ratios(name), n=4)
        return quartiles[0], quartiles[2]

    def tokens_per_s(self, name: str) -> float:
        """Return the tokens per second of the median run."""
        return self.num_tokens / statistics.median(self.seconds[name])


class BareStep:
    """Forward, backward and optimizer over prepared microbatches.

    Networks, autocast, chunked head and optimizer are those of a training step. Not included are
    the layout of the batch, the objective, importance weights, clipping, and all metrics.
    """

    def __init__(
        self,
        cfg: LearnerSection,
        model: PreTrainedModel,
        samples: Sequence[Sample],
        *,
        engine_dtype: str,
        shares_prefix: bool = False,
    ) -> None:
        self._passes = Passes(
            cfg, Networks(policy=model), temperature=1.0, engine_dtype=engine_dtype
        )
        self._optimizer = make_optimizer(model, cfg)
        self._microbatches = [
            *each_microbatch(
                samples,
                range(len(samples)),
                max_tokens=cfg.max_tokens_per_microbatch,
                device=next(model.parameters()).device,
                is_packed=self._passes.is_packed,
                shares_prefix=shares_prefix,
            )
        ]
        self._num_sampled = sum(sample.num_sampled_tokens for sample in samples)

    def __call__(self) -> None:
        """Make one update on the mean cross-entropy of the sampled tokens."""
        self._optimizer.zero_grad()
        for micro in self._microbatches:
            logprobs = self._passes.score(micro.tokens).logprobs
            (-logprobs.sum() / self._num_sampled).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def measure_step(
    cfg: LearnerSection,
    algorithms: Mapping[str, AlgorithmSection],
    model: PreTrainedModel,
    shape: BatchShape,
    *,
    num_rounds: int,
    engine_dtype: str,
) -> StepCost:
    """Return the cost of each algorithm's steps and of bare steps, in turn in one process.

    Args:
        model: copied for each contender.
        shape: of one step; its samples get log-probabilities near the model's own.
    """
    samples = make_batch(shape, vocab_size=vocabulary_size(model), seed=0)
    cfg = replace(cfg, lr=STILL, muon_lr=STILL)
    trainers = {
        name: make_trainer(cfg, algorithm, copy.deepcopy(model), engine_dtype=engine_dtype)
        for name, algorithm in algorithms.items()
    }
    scored = with_sampler_logprobs(samples, next(iter(trainers.values())), seed=0)
    contenders: dict[str, Callable[[], object]] = {
        BARE: BareStep(cfg, copy.deepcopy(model), scored, engine_dtype=engine_dtype)
    }
    for name, trainer in trainers.items():
        contenders[name] = step_of(trainer, scored)
    return _cost_of(contenders, model, scored, num_rounds)


def layouts_of(cfg: LearnerSection) -> dict[str, LearnerSection]:
    """Return a section for each layout with each kernel, and for one compiled layout.

    `BARE` is padded with the products kernel.
    """
    ways = {
        f"{layout.value}, {kernel.value}": replace(cfg, layout=layout, attention=kernel)
        for layout in (Layout.PADDED, Layout.PACKED)
        for kernel in (Attention.PRODUCTS, Attention.FUSED)
    }
    name = f"{Layout.PACKED.value}, {Attention.PRODUCTS.value}"
    plain = {BARE: ways.pop(f"{Layout.PADDED.value}, {Attention.PRODUCTS.value}")}
    return plain | ways | {f"{name}, compiled": replace(ways[name], compile=True)}


def measure_ways(
    ways: Mapping[str, LearnerSection],
    model: PreTrainedModel,
    shape: BatchShape,
    *,
    num_rounds: int,
    engine_dtype: str,
) -> StepCost:
    """Return the cost of bare steps with equivalent settings, one of which is `BARE`."""
    samples = make_batch(shape, vocab_size=vocabulary_size(model), seed=0)
    contenders: dict[str, Callable[[], object]] = {}
    for name, way in ways.items():
        still = replace(way, lr=STILL, muon_lr=STILL)
        copied = copy.deepcopy(model)
        contenders[name] = BareStep(still, copied, samples, engine_dtype=engine_dtype)
    return _cost_of(contenders, model, samples, num_rounds)


def _cost_of(
    contenders: Mapping[str, Callable[[], object]],
    model: PreTrainedModel,
    samples: Sequence[Sample],
    num_rounds: int,
) -> StepCost:
    """Return the seconds of each contender, measured in turn."""
    clock = clock_of(next(model.parameters()).device)
    seconds = alternate(contenders, num_rounds=num_rounds, clock=clock)
    num_tokens = sum(len(sample.trajectory.token_ids) for sample in samples)
    return StepCost(seconds=seconds, num_tokens=num_tokens)


def make_trainer(
    cfg: LearnerSection,
    algorithm: AlgorithmSection,
    model: PreTrainedModel,
    *,
    engine_dtype: str,
    before_update: Callable[[], object] | None = None,
) -> Trainer:
    """Return a trainer as a run would have it, at temperature 1."""
    settings = TrainerSettings(
        learner=cfg, algorithm=algorithm, num_steps=1_000, engine_dtype=engine_dtype
    )
    return Trainer(settings, Networks(policy=model), before_update=before_update)


def by_aggregation(algorithm: AlgorithmSection) -> dict[str, AlgorithmSection]:
    """Return the algorithm with equal weights of tokens, and with equal weights of episodes."""
    return {
        f"{algorithm.advantage}, {kind.value}": replace(algorithm, aggregation=kind)
        for kind in (Aggregation.TOKEN, Aggregation.SEQUENCE)
    }


def step_of(trainer: Trainer, samples: list[Sample]) -> Callable[[], object]:
    """Return a function that makes one training step."""

    def step() -> None:
        metrics = trainer.train_on(samples, version=MAX_LAG, must_train=True).metrics
        if metrics["train/num_bad_updates"] or not metrics["train/num_updates"]:
            raise ValueError("the step that was measured left out its update, so it was too cheap")

    return step


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock [s] for work on `device`.

    On a CPU it is this process's CPU time, which is independent of other processes. On CUDA it is
    the wall time after the device has finished all its work.
    """
    if device.type != "cuda":
        return time.process_time

    def now_s() -> float:
        """Return the time once the GPU has finished its work."""
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now_s


def alternate(
    contenders: Mapping[str, Callable[[], object]], *, num_rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Run all contenders once per round, each round in a rotated order; return the seconds.

    The warm-ups are not counted.
    """

    def seconds_of(run: Callable[[], object]) -> float:
        """Return the seconds of one run."""
        started = clock()
        run()
        return clock() - started

    return Suite.in_turn(
        {name: partial(seconds_of, run) for name, run in contenders.items()},
        num_rounds=num_rounds,
        num_warm_ups=NUM_WARM_UPS,
    )
