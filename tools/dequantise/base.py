"""The frozen base of adapters, rounded to the numbers of `model.base`: a checkpoint in bf16."""

import re
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.config.model import BaseFormat
from learner.policy.model_shape import weight_files
from tools.dequantise.checkpoints import Quantised
from tools.dequantise.record import read_record

if TYPE_CHECKING:
    from torch import Tensor

    from tools.dequantise.tensors import Output, SourceTensor

METHOD = "model.base="  # Beginning of the method in the record of such a checkpoint.


class RoundedBase(Quantised):
    """A checkpoint whose linear layers are to have the numbers of a quantised format."""

    def __init__(self, path: Path, base: BaseFormat, dtype: str, *, key: str) -> None:
        super().__init__(path, METHOD + base.value, weight_files(path), dtype, key=key)
        self._base = base

    @property
    def method(self) -> str:
        return self.kind

    @cached_property
    def _outputs(self) -> "list[Output]":  # pyright: ignore[reportIncompatibleVariableOverride]
        import torch

        from tools.dequantise.tensors import NAMES, Output, copy_of, stored_tensors

        name_of_dtype = NAMES[getattr(torch, self.dtype)]
        with self._refusing():
            stored = stored_tensors(self.path)
            rounded = rounded_names(self.path, list(stored))
            return [
                Output(
                    name=name,
                    dtype=name_of_dtype,
                    shape=tensor.shape,
                    parts=partial(_rounded, tensor, self._base, self.dtype),
                )
                if name in rounded
                else copy_of(name, tensor)
                for name, tensor in stored.items()
            ]


def rounded_names(folder: Path, names: list[str]) -> set[str]:
    """Return the names of the tensors in the files that a learner quantises.

    Raises: ConfigError: the model has weights without a quantised form.
    """
    from learner.policy.expert_weights import plan_reads
    from learner.policy.model import make_bare
    from learner.policy.quantised_base import quantisable

    network = make_bare(str(folder))
    chosen = {f"{name}.weight" for name, _ in quantisable(network)}
    weights = dict(network.state_dict(keep_vars=True))
    reads = plan_reads(network, names, weights)
    return {
        name
        for read in reads
        if read.weight in chosen
        for sources in read.sources.values()
        for name in sources
    }


def _rounded(tensor: "SourceTensor", base: BaseFormat, dtype: str) -> "Iterator[Tensor]":
    """Yield the numbers of a weight in the format, in `dtype`."""
    import torch

    from learner.policy.quantised_base import dequantise, quantise

    codes, scales = quantise(tensor.read(), base)
    yield dequantise(codes, scales, base, getattr(torch, dtype)).view(tensor.shape)


def find_base(path: Path, base: BaseFormat, dtype: str, *, key: str) -> RoundedBase | None:
    """Return the checkpoint to round; None if it has these numbers or no files of weights."""
    if base is BaseFormat.FULL or not path.is_dir():
        return None
    record = read_record(path)
    if record is not None and record.method == METHOD + base.value:
        return None
    try:
        return RoundedBase(path, base, dtype, key=key) if weight_files(path) else None
    except ValueError:  # A damaged index, which other checks report.
        return None


def found_again(source: Path, method: str, dtype: str) -> RoundedBase | None:
    """Return the checkpoint that a record with this method was made of; None for others."""
    match = re.fullmatch(re.escape(METHOD) + r"(\w+)", method)
    return match and find_base(source, BaseFormat(match[1]), dtype, key="model.path")
