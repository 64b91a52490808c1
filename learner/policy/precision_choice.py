"""Chooses the learner's precision by a rule, before anything is loaded or timed.

The choice changes what is learnt, so no measurement of speed takes part in it.
"""

import math
import struct
from pathlib import Path
from statistics import mode
from typing import NamedTuple

import numpy as np

from common.config.learner import LearnerSection, OptimizerKind, Precision, Rounding
from common.errors import ConfigError
from common.host.machine import has_bf16_units
from common.store.run_dir import json_object
from learner.policy.model_shape import weight_entries, weight_files

SAMPLED = 1 << 10  # Numbers of each matrix that the rule reads.
# Mean distance from the grid, in units, below which a checkpoint lies on it. Numbers that were made
# in fp32 have a mean distance of 1/4.
NEAR_GRID = 1 / 8
# Engines that round as the learner does.
_ENGINE_DTYPES = {Precision.FP32: "float32", Precision.BF16: "bfloat16", Precision.FP16: "float16"}
# Precisions that hide other changes by adapters than engines of a dtype.
_DRIFTING = ((Precision.BF16, "float32"), (Precision.FP32, "bfloat16"), (Precision.FP16, "float32"))
MAX_HIDDEN = 0.5  # Share of the weights from which rounding may hide an update.


class PrecisionChoice(NamedTuple):
    """A precision, the reason for it, and the rounding of the weights."""

    precision: Precision
    reason: str
    rounding: Rounding  # Not auto.


class _Stored(NamedTuple):
    """A sample of a checkpoint in bf16."""

    weights: np.ndarray  # [number] fp32
    width: int  # The usual number of inputs of a matrix.


def choose_precision(
    learner: LearnerSection,
    folder: Path | None,
    *,
    is_cuda: bool,
    has_units: bool | None = None,
    engine_dtype: str = "",
) -> PrecisionChoice:
    """Return the configured precision and rounding, or those of the rules.

    The rule of a CPU: bf16 if it has bf16 units. But fp32 for a checkpoint of bf16 numbers if
    rounding would hide an update from more than half of its weights. An update of AdamW is about
    the learning rate, one of Muon its rate by the root of the width. It is hidden from a weight
    whose half unit is larger: a 512th to a 256th of the weight.

    Adapters are computed in the precision of the engines, which add them to their layers' results
    as the learner does: see `check_engines`. Without engines a CPU computes them in fp32.

    Example: learner.lr=1e-5 is hidden from all weights above .0051, so fp32.

    Args:
        learner: the section with the rates of the training.
        folder: the checkpoint to start from; None: new weights.
        has_units: whether the device has bf16 units; None: as this machine's CPU, or yes on CUDA.
        engine_dtype: value of `model.dtype`; "": the training has no engines.

    With stochastic rounding no update is hidden in the mean, so this does not count. The rule of
    `learner.rounding=auto` is at `Rounding`.

    Raises: ConfigError: the checkpoint is damaged, the pass has no weights to round
        stochastically, or as `check_engines`.
    """
    precision, reason = _choice(learner, folder, is_cuda, has_units, engine_dtype)
    if learner.rounding is Rounding.STOCHASTIC and precision is not Precision.BF16:
        raise ConfigError(
            "learner.rounding=stochastic: it rounds the weights of passes in bf16, and this run has"
            f" learner.precision={precision.value} ({reason}). Set"
            " learner.rounding=nearest, or learner.precision=bf16"
        )
    check_engines(learner, precision, engine_dtype)
    rounding = learner.rounding
    if rounding is Rounding.AUTO:
        may_round = precision is Precision.BF16 and not is_cuda and not learner.lora.rank
        lost = _hidden(learner, folder) if may_round else None
        is_hidden = lost is not None and lost[1] > MAX_HIDDEN
        rounding = Rounding.STOCHASTIC if is_hidden else Rounding.NEAREST
    return PrecisionChoice(precision, reason, rounding)


def check_engines(learner: LearnerSection, precision: Precision, engine_dtype: str) -> None:
    """Check that engines and learner round alike.

    Engines in bf16 would round a version of a learner in fp16 again, to an eighth of its units.

    With adapters, both add the adapter's share to the layer's result. In 16 bits the sum is rounded
    a second time, which hides most of a small share. In fp32 it is not: engines would sample from
    another policy than the one that is trained. Merged adapters have no such sums.

    Args:
        engine_dtype: value of `model.dtype`; "": the training has no engines.

    Raises: ConfigError: names both keys and the remedies.
    """
    pair = (precision, engine_dtype)
    keys = f"learner.precision={precision.value} with model.dtype={engine_dtype}"
    if pair == (Precision.FP16, "bfloat16"):
        raise ConfigError(
            f"{keys}: the engines would round each version again, to units that are eight times as"
            " large. Set model.dtype=float16, or learner.precision=bf16"
        )
    has_sums = learner.lora.rank > 0 and not learner.lora.is_merged
    if not has_sums or pair not in _DRIFTING:
        return
    other = next(each for each, name in _ENGINE_DTYPES.items() if name == engine_dtype).value
    raise ConfigError(
        f"{keys} and learner.lora.rank={learner.lora.rank}: rounding to 16 bits hides small changes"
        " by adapters on one side only, so the engines drift away from the learner. Set"
        f" model.dtype={_ENGINE_DTYPES[precision]}, or learner.precision={other}"
    )


def _choice(
    learner: LearnerSection,
    folder: Path | None,
    is_cuda: bool,
    has_units: bool | None,
    engine_dtype: str,
) -> tuple[Precision, str]:
    """Return the precision and its reason, as `choose_precision`."""
    if learner.precision is not Precision.AUTO:
        return learner.precision, "learner.precision is set"
    device = "GPU" if is_cuda else "CPU"
    if has_units is None:
        has_units = is_cuda or has_bf16_units()
    if not has_units:
        return Precision.FP32, f"the {device} has no bf16 units"
    units = f"the {device} has bf16 units"
    if learner.lora.rank:
        why = "rounding to bf16 hides small changes by adapters from the results of their layers"
        if engine_dtype == "float32":
            return Precision.FP32, f"{why}, but not in engines in float32"
        if is_cuda or engine_dtype:
            return Precision.BF16, f"{units}; {why}, as in engines of 16 bits"
        return Precision.FP32, why
    if learner.rounding is Rounding.STOCHASTIC:
        return Precision.BF16, f"{units}; stochastic rounding hides no updates"
    lost = _hidden(learner, folder)
    if lost is None:
        return Precision.BF16, units
    step, hidden = lost
    why = f"rounding to bf16 hides updates of {step:.1e} from {hidden:.0%} of the weights"
    if is_cuda or hidden <= MAX_HIDDEN:
        return Precision.BF16, f"{units}; {why}, see train/vanished_update_frac"
    why = f"{why}: the checkpoint has bf16 numbers"
    if engine_dtype in ("bfloat16", "float16"):
        why += f"; model.dtype={engine_dtype} hides them from the engines, set model.dtype=float32"
    return Precision.FP32, why


def _hidden(learner: LearnerSection, folder: Path | None) -> tuple[float, float] | None:
    """Return the usual update and the share of the weights from which rounding would hide it.

    Args:
        folder: the checkpoint to start from; None: new weights.

    Returns: None if the weights are not on the grid of bf16.
    """
    stored = None if folder is None else _stored_on_grid(folder)
    if stored is None:
        return None
    step = _smallest_update(learner, stored.width)
    return step, float((_half_units(stored.weights) > step).mean())


def recorded_precision(file: Path) -> str:
    """Return the precision of a run and its reason from precision.json; "" before the choice."""
    recorded = json_object(file)
    reason = recorded.get("precision_reason")
    return str(recorded.get("precision", "")) + (f" ({reason})" if reason else "")


def _smallest_update(learner: LearnerSection, width: int) -> float:
    """Return the usual size of the smallest updates at the full learning rate."""
    if learner.optimizer is OptimizerKind.MUON:
        return min(learner.lr, learner.muon_lr / math.sqrt(width))
    return learner.lr


def _half_units(weights: np.ndarray) -> np.ndarray:
    """Return half the distance of each number from the next one in bf16; 0 for zeros."""
    return np.where(weights == 0, 0.0, np.ldexp(1.0, np.frexp(weights)[1] - 9))


def _stored_on_grid(folder: Path) -> _Stored | None:
    """Return a sample of a checkpoint's matrices; None if they are not on the grid of bf16.

    A checkpoint in bf16 that was loaded and saved again, or trained a little, is stored in fp32.
    Its numbers are those of bf16, or near them.

    Raises: ConfigError: its files are damaged.
    """
    parts: list[np.ndarray] = []  # The bits of fp32 numbers.
    widths: list[int] = []
    try:
        for path in weight_files(folder):
            start, header = weight_entries(path)
            with path.open("rb") as file:
                for entry in header.values():
                    count = min(math.prod(entry["shape"]), SAMPLED)
                    is_read = entry.get("dtype") in ("BF16", "F32") and "data_offsets" in entry
                    if len(entry["shape"]) < 2 or not is_read:
                        continue
                    widths.append(int(entry["shape"][-1]))
                    file.seek(start + entry["data_offsets"][0])
                    if entry["dtype"] == "BF16":
                        halves = np.fromfile(file, dtype="<u2", count=count)
                        parts.append(halves.astype(np.uint32) << 16)
                    else:
                        parts.append(np.fromfile(file, dtype="<u4", count=count))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ConfigError(f"model.path={folder}: its weights cannot be read ({error!r})") from error
    if not parts:
        return None
    bits = np.concatenate(parts)
    low = bits & 0xFFFF
    if np.minimum(low, 0x10000 - low).mean() >= NEAR_GRID * 0x10000:
        return None
    return _Stored(bits.view(np.float32), mode(widths))
