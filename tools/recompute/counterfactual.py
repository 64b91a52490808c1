"""The counterfactual: the same data trained by a learner with other settings."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch

from common.config.keys import dotted
from common.errors import ConfigError
from common.wire.messages import EndReason
from learner.objective.measures import ratio_statistics
from learner.training.trainer import TrainingDiverged
from tools.recompute.rebuild import EpisodeFilter, RecomputedBatch

_OTHER_ROLES = ("horizon", "curriculum", "groups", "tasks", "mixture", "scheduler", "actor")
# Keys of `learner` that only concern the transport of data, weights and checkpoints.
_NO_LEARNING = {
    "host",
    "port",
    "advertise",
    "num_gpus",
    "rank_timeout_s",
    "max_lag_steps",
    "hold_back_steps",
    "batch_timeout_s",
    "publish_timeout_s",
    "publish_bucket_mb",
    "publish_parts",
    "publish",
    "weights_transport",
    "max_canary_delta",
    "max_canary_alarms",
    "checkpoint_every_steps",
    "checkpoint_every_s",
    "keep_checkpoints",
}
_HINT = "Only algorithm.* and the learner.* keys that affect training can be changed."
_COLUMNS = (("loss", "loss/policy"), ("grad_norm", "train/grad_norm"), ("lr", "train/lr"))


def split_options(words: Sequence[str]) -> tuple[list[str], EpisodeFilter]:
    """Return the overrides among key=value words, and the selection of trained episodes.

    Raises: ConfigError: a key has no effect on the recomputed training.
    """
    overrides: list[str] = []
    only: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = dotted(key.strip())
        if not equals:
            raise ConfigError(f"{word}: expects key=value after the name of the run")
        if name == "horizon":
            only["horizons"] = _horizons(word, value)
        elif name == "drop":
            only["dropped"] = _ends(word, value)
        else:
            _check_key(name, word)
            overrides.append(word)
    return overrides, EpisodeFilter(**only)


def _check_key(name: str, word: str) -> None:
    """Raise ConfigError if a key changes more than the training on recorded data."""
    section, _, rest = name.partition(".")
    is_about_training = rest.partition(".")[0] not in _NO_LEARNING
    if name == "algorithm.filter_zero_variance":
        why = "this key decides which groups become batches, and the batches are recorded"
    elif section == "algorithm" or (name.startswith("learner.") and is_about_training):
        return
    elif section in _OTHER_ROLES:
        why = "this key affects playing and batching, and the batches are recorded"
        if section == "horizon":
            why += "; horizon=a:b selects the episodes with a horizon of a to b turns"
    else:
        why = "this key does not affect training on the recorded batches"
    raise ConfigError(f"{word}: {why}. {_HINT}")


def _horizons(word: str, value: str) -> tuple[int, int]:
    """Return the range of an option horizon=a:b. Raises: ConfigError."""
    low, colon, high = value.partition(":")
    if not (colon and low.isdigit() and high.isdigit() and int(low) <= int(high)):
        raise ConfigError(f"{word}: expects a:b, the smallest and the largest horizon in turns")
    return int(low), int(high)


def _ends(word: str, value: str) -> frozenset[EndReason]:
    """Return the end reasons of an option. Raises: ConfigError."""
    try:
        return frozenset(EndReason(each) for each in value.split(","))
    except ValueError as error:
        known = ", ".join(each.value for each in EndReason if not each.is_infrastructure_failure)
        raise ConfigError(
            f"{word}: expects end reasons, separated by commas, out of {known}"
        ) from error


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """One batch of both learners."""

    plain: dict[str, Any]  # Values for JSON.

    def text(self) -> str:
        """Return the batch as a row of the table."""
        p = self.plain
        numbers = [
            _number(p[side].get(name)) for _, name in _COLUMNS for side in ("metrics", "recorded")
        ]
        shown = [_number(p["ess_frac"]), _number(p["kl"]), *numbers]
        cells = "".join(f"{each:>10}" for each in shown)
        return f"{p['step']:>6} {p['policy']:<14}{cells}  {p['note']}".rstrip()


def header() -> str:
    """Return the head of the table."""
    names = ["ess", "kl", *(n for name, _ in _COLUMNS for n in (name, "recorded"))]
    return f"{'step':>6} {'policy':<14}" + "".join(f"{name:>10}" for name in names)


def _number(value: float | None) -> str:
    """Return a number for a table, "-" for an unknown one."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


class RecordedResults:
    """The recorded learner's result of each batch. A temporary file holds the log-probabilities."""

    def __init__(self) -> None:
        self._rows: list[RecomputedBatch] = []
        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115 - `close` closes it.

    def add(self, redone: RecomputedBatch) -> None:
        """Add a batch with its log-probabilities."""
        assert redone.logprobs is not None
        np.save(self._file, redone.logprobs, allow_pickle=False)
        bare = RecomputedBatch(step=redone.step, result=redone.result, digests=redone.digests)
        self._rows.append(bare)

    def compare(
        self, others: Iterator[RecomputedBatch], *, first: int
    ) -> Iterator[BatchComparison]:
        """Yield a row for each batch from step `first` on, with the other learner's result."""
        self._file.seek(0)
        is_same = True  # Whether both learners have the same weights before the batch.
        for recorded in self._rows:
            logprobs = np.load(self._file, allow_pickle=False)
            try:
                other = next(others)
            except TrainingDiverged as error:
                yield BatchComparison(
                    _as_json_values(recorded, None, {}, is_same=is_same)
                    | {"note": f"ended: {error}"}
                )
                return
            found = _distance(other.logprobs, logprobs)
            row = BatchComparison(_as_json_values(recorded, other, found, is_same=is_same))
            if other.digests is not None and recorded.digests is not None:
                is_same = is_same and other.digests.weights == recorded.digests.weights
            if recorded.step.consumed_by >= first:
                yield row

    def close(self) -> None:
        """Close and delete the file."""
        self._file.close()


def _distance(ours: np.ndarray | None, theirs: np.ndarray) -> dict[str, float]:
    """Return the effective sample size of pi / recorded over a batch, and the k3 estimate of KL.

    The KL is KL(recorded | pi). Both are over the tokens that the recorded policies sampled some
    steps earlier.
    """
    if ours is None or not ours.size:
        return {}
    found = ratio_statistics(torch.from_numpy(ours), torch.from_numpy(theirs))
    return {"ess_frac": found["offpolicy/ess_frac"], "kl": found["policy/kl_sampler"]}


def _as_json_values(
    recorded: RecomputedBatch,
    other: RecomputedBatch | None,
    distance: dict[str, float],
    *,
    is_same: bool,
) -> dict[str, Any]:
    """Return the comparison of a batch as values for JSON."""
    result = None if other is None else other.result
    was = recorded.step.is_skipped
    now = result is not None and result.decision.is_skipped
    note = "skipped by both" if was and now else "skipped by the run" if was else "skipped" * now
    return {
        "step": recorded.step.version,
        "batch": recorded.step.number,
        "policy": "recorded" if is_same else "counterfactual",
        "ess_frac": distance.get("ess_frac"),
        "kl": distance.get("kl"),
        "metrics": {} if result is None else result.metrics,
        "recorded": {} if recorded.result is None else recorded.result.metrics,
        "note": note if result is not None else "no episode left",
    }
