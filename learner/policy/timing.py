"""Chooses the fastest compute configuration of a machine by a short timing, once per run.

On a CPU the timing compares layouts of sequences and attention kernels. Their results differ by
rounding. A configuration is rejected if its log-probabilities differ from the plain one's by more
than `learner.max_canary_delta`. The precision changes what is learnt, so a rule chooses it before;
see `learner/policy/precision_choice.py`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.config.learner import Attention, Layout, LearnerSection, Precision, Rounding
from common.errors import ConfigError
from common.store.run_dir import read_json, write_json
from learner.batch.batching import TokenBatch, collate_tokens
from learner.policy.composite import text_config
from learner.policy.kernels.attention import (
    attention_by_rule,
    layout_by_rule,
    packing_problem,
    use_attention,
)
from learner.policy.loading import is_unloaded
from learner.policy.model import Scoring, pick_device, token_logprobs, vocabulary_size
from learner.policy.precision import DTYPES, settled_precision
from learner.policy.precision_choice import check_engines

logger = logging.getLogger(__name__)

_REMEDY = "remove the file, and the learner chooses again; repeated steps may differ by rounding"

BUDGET_S = 0.1  # Measured time of a stage in seconds, after one warm-up pass of each configuration.
LARGE_MODEL_S = (
    1.0  # Seconds of a first round above which the model is large and one round suffices.
)
MARGIN = 1.2  # A smaller speedup than this factor counts as noise.
LENGTHS = (1.0, 0.75, 0.5)  # Lengths of the timed sequences, as fractions of the longest.
# Limits of the longest length; shorter sequences cost about the same in all configurations.
MIN_TOKENS = 96
MAX_TOKENS = 384


# Setting of the learner whose `auto` a run's first start decides -> its enumeration.
_ENUM_OF_SETTING: dict[str, Any] = {
    "precision": Precision,
    "rounding": Rounding,
    "layout": Layout,
    "attention": Attention,
}


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """A compute configuration of a pass."""

    precision: Precision
    layout: Layout
    attention: Attention

    @property
    def name(self) -> str:
        return " ".join((self.precision.value, self.layout.value, self.attention.value))

    @property
    def plainness(self) -> tuple[bool, bool, bool]:
        """The sort key of configurations; the plainest one comes first."""
        return (
            self.precision is not Precision.FP32,
            self.layout is Layout.PACKED,
            self.attention is Attention.FUSED,
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """The duration and the log-probabilities of a forward and backward pass."""

    seconds: float
    logprobs: Tensor = field(repr=False)  # [tokens] nats


Measure = Callable[[PreTrainedModel, Sequence[ComputeConfig]], Mapping[ComputeConfig, Timed]]


def choose_compute(
    learner: LearnerSection,
    model: PreTrainedModel,
    file: Path,
    *,
    is_repeatable: bool,
    max_seq_tokens: int,
    num_cores: int,
    engine_dtype: str = "",
    measure: Measure | None = None,
) -> LearnerSection:
    """Return the section without auto values, and write the chosen values to `file`.

    A resumed run keeps the values of its first start: other configurations would change the numbers
    of repeated steps. A run that must be repeatable uses only the rules.

    Args:
        max_seq_tokens: longest sequence of an episode; a quarter of it is timed.
        num_cores: cores that no other process needs.
        engine_dtype: value of `model.dtype`; "": the training has no engines.

    Raises: ConfigError: as `choose_precision`, or `file` is damaged.
    """
    if learner.sequence_ranks > 1:  # Several ranks can divide packed rows only.
        learner = replace(learner, layout=Layout.PACKED)
    is_open = {name: getattr(learner, name).value == "auto" for name in _ENUM_OF_SETTING}
    is_open["num_threads"] = learner.num_threads == 0
    if file.exists():
        section = _kept(learner, file, is_open)
        check_engines(section, section.precision, engine_dtype)
        return section
    timings: dict[str, float] = {}
    device = pick_device(learner.device)
    precision, reason, rounding = settled_precision(
        learner, device, path=model.name_or_path or "", engine_dtype=engine_dtype
    )
    logger.info("learner.precision: %s (%s)", precision.value, reason)
    learner = replace(learner, precision=precision, rounding=rounding)
    config, num_threads = config_by_rule(learner, model), max(1, learner.num_threads)
    is_open["layout"] &= not packing_problem(model)
    # A network that is sharded later cannot be timed.
    if device.type == "cpu" and not is_repeatable and not is_unloaded(model):
        num_tokens = int(min(max(max_seq_tokens / 4, MIN_TOKENS), MAX_TOKENS))
        timer = measure or partial(time_configs, num_tokens=num_tokens)
        configs = _kernels(config, is_open)
        if len(configs) > 1:
            timed = timer(model, configs)
            config = fastest(timed, rule=config, max_delta=learner.max_canary_delta)
            timings |= {each.name: round(1e3 * t.seconds, 3) for each, t in timed.items()}
        if is_open["num_threads"]:
            num_threads = best_threads(model, config, num_cores, num_tokens=num_tokens)
    section = replace(
        learner,
        precision=config.precision,
        layout=config.layout,
        attention=config.attention,
        num_threads=num_threads,
    )
    shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in timings.items())
    summary = _shown(settled(section), is_open)
    logger.info("chose compute settings: %s; timings: %s", summary, shown or "none")
    write_json(file, settled(section) | {"precision_reason": reason, "cpu_ms": timings})
    return section


def _kept(learner: LearnerSection, file: Path, is_open: Mapping[str, bool]) -> LearnerSection:
    """Return the section with the values of the run's first start.

    A precision that was configured since then replaces that of the file, which the report names.
    """
    # A run of a version without this choice was padded and used the rule's kernels.
    plain = replace(learner, layout=Layout.PADDED, rounding=Rounding.NEAREST, num_threads=1)
    earlier = settled(plain)
    earlier["attention"] = attention_by_rule(pick_device(learner.device).type).value
    first = read_json(file, {}, remedy=_REMEDY)
    recorded = earlier | first
    configured = settled(learner)
    try:
        section = with_settled(
            learner, {n: recorded[n] if is_open[n] else configured[n] for n in configured}
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{file}: damaged ({error}); {_REMEDY}") from error
    summary = _shown(settled(section), is_open)
    logger.info("using the compute settings of this run's first start: %s", summary)
    if section.precision.value != recorded["precision"]:
        reason = "learner.precision is set since a later start"
        changed = {"precision": section.precision.value, "precision_reason": reason}
        write_json(file, first | changed)
    return section


def settled(learner: LearnerSection) -> dict[str, Any]:
    """Return the settled values for JSON, for other ranks and later starts."""
    plain = {name: getattr(learner, name).value for name in _ENUM_OF_SETTING}
    return plain | {"num_threads": learner.num_threads}


def with_settled(learner: LearnerSection, plain: Mapping[str, Any]) -> LearnerSection:
    """Return the section with the values that another rank has settled."""
    chosen = {name: kind(plain[name]) for name, kind in _ENUM_OF_SETTING.items()}
    return replace(learner, **chosen, num_threads=int(plain["num_threads"]))


def _shown(plain: Mapping[str, Any], is_open: Mapping[str, bool]) -> str:
    """Return the values as text, with a mark on those that the configuration sets."""
    return " ".join(f"{n}={value}{'' if is_open[n] else ' (set)'}" for n, value in plain.items())


def config_by_rule(learner: LearnerSection, model: PreTrainedModel) -> ComputeConfig:
    """Return the configured values, and the rules in place of auto."""
    device = pick_device(learner.device)
    precision = settled_precision(learner, device, path=model.name_or_path or "").precision
    layout = learner.layout
    attention = learner.attention
    if layout is Layout.AUTO:
        layout = layout_by_rule([model], device.type)
    if attention is Attention.AUTO:
        attention = attention_by_rule(device.type)
    return ComputeConfig(precision, layout, attention)


def _kernels(config: ComputeConfig, is_open: Mapping[str, bool]) -> list[ComputeConfig]:
    """Return the configurations that the settings leave open, for one precision."""
    layouts = (Layout.PACKED, Layout.PADDED) if is_open["layout"] else (config.layout,)
    both = (Attention.PRODUCTS, Attention.FUSED)
    kernels = both if is_open["attention"] else (config.attention,)
    return [
        ComputeConfig(config.precision, layout, kernel) for layout in layouts for kernel in kernels
    ]


def fastest(
    timed: Mapping[ComputeConfig, Timed], *, rule: ComputeConfig, max_delta: float
) -> ComputeConfig:
    """Return the fastest configuration that agrees; the rule's if it is about as fast.

    Args:
        max_delta: largest mean |difference| of log-probabilities from the plainest configuration,
            in nats. It grows with the mean |log-probability| above 1 nat: the timed tokens are
            unlikely, so rounding changes them more.
    """
    plainest = timed[min(timed, key=lambda config: config.plainness)].logprobs
    max_delta *= max(1.0, plainest.abs().mean().item())
    agreeing: dict[ComputeConfig, float] = {}
    for config, result in timed.items():
        delta = (result.logprobs - plainest).abs().mean().item()
        if delta <= max_delta:
            agreeing[config] = result.seconds
        else:
            text = "rejected compute settings %s: their logprobs differ by %.3f nats"
            logger.warning(text, config.name, delta)
    best = min(agreeing, key=lambda config: agreeing[config])
    is_close = rule in agreeing and agreeing[rule] <= MARGIN * agreeing[best]
    return rule if is_close else best


def time_configs(
    model: PreTrainedModel,
    configs: Sequence[ComputeConfig],
    *,
    num_tokens: int,
    budget_s: float = BUDGET_S,
) -> dict[ComputeConfig, Timed]:
    """Return the cost of small passes of this model, in CPU seconds of one thread.

    The timing uses CPU time and one thread because the other roles start at the same time, and
    threads that wait for one another spin. The first pass of each configuration compiles the
    kernels. It counts only for a large model, in which this time is negligible.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds = list(_rounds(model, configs, num_tokens, budget_s))
    finally:
        torch.set_num_threads(num_threads)
    return {
        config: Timed(min(each[config].seconds for each in rounds), rounds[0][config].logprobs)
        for config in configs
    }


def _rounds(
    model: PreTrainedModel, configs: Sequence[ComputeConfig], num_tokens: int, budget_s: float
) -> Iterator[dict[ComputeConfig, Timed]]:
    """Yield the first round of a large model; else at least one after it, within the budget."""

    def one_round() -> dict[ComputeConfig, Timed]:
        """Return one timed pass of each configuration."""
        return {
            config: _time_pass(model, config, num_tokens, time.thread_time) for config in configs
        }

    warm = one_round()
    if sum(each.seconds for each in warm.values()) > LARGE_MODEL_S:
        yield warm
        return
    left_s = budget_s
    next_s = 0.0
    while next_s <= left_s:
        measured = one_round()
        yield measured
        next_s = sum(each.seconds for each in measured.values())
        left_s -= next_s


def _time_pass(
    model: PreTrainedModel, config: ComputeConfig, num_tokens: int, clock: Callable[[], float]
) -> Timed:
    """Return the duration and the results of one forward and backward pass."""
    tokens = _tokens(model, config, num_tokens)
    use_attention([model], model.device.type, config.layout, config.attention)
    scoring = Scoring(chunk_tokens=num_tokens, dtype=DTYPES[config.precision])
    started = clock()
    logprobs = token_logprobs(model, tokens, scoring)
    (-logprobs.mean()).backward()
    took_s = clock() - started
    model.zero_grad(set_to_none=True)
    return Timed(took_s, logprobs.detach())


def _tokens(model: PreTrainedModel, config: ComputeConfig, num_tokens: int) -> TokenBatch:
    """Return a block of sequences of several lengths."""
    longest = min(num_tokens, text_config(model.config).max_position_embeddings)
    lengths = [max(2, int(longest * share)) for share in LENGTHS]
    spread = [np.arange(n) * 7919 % vocabulary_size(model) for n in lengths]
    masks = [np.arange(n) > 0 for n in lengths]
    is_packed = config.layout is Layout.PACKED
    return collate_tokens(spread, masks, device=model.device, is_packed=is_packed)


def best_threads(
    model: PreTrainedModel, config: ComputeConfig, num_cores: int, *, num_tokens: int
) -> int:
    """Return the number of threads, doubled while wall-clock time improves by more than noise."""
    before = torch.get_num_threads()
    best = 1
    best_s = float("inf")
    num = 1
    try:
        while num <= num_cores and num_cores > 1:
            torch.set_num_threads(num)
            took = [_time_pass(model, config, num_tokens, time.monotonic).seconds for _ in range(3)]
            if num > 1 and min(took) * MARGIN > best_s:
                break
            best = num
            best_s = min(took)
            num *= 2
    finally:
        torch.set_num_threads(before)
    return best
