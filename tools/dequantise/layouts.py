"""Layouts of quantised weights in safetensors files, and their numbers in 16 or 32 bits."""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from learner.policy.model_kind import NARROW
from tools.dequantise.tensors import NAMES, Output, SourceTensor, copy_of

# Scales of activations and of the KV cache: passes in 16 bits have none.
OF_ACTIVATIONS = (
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "k_scale",
    "v_scale",
    "q_scale",
    "kv_scale",
)
PART_NUMBERS = 1 << 24  # Numbers of a large matrix that are converted at once.
QUANT_STATE = ".quant_state.bitsandbytes__"

Stored = Mapping[str, SourceTensor]


def outputs_of(
    method: str, section: Mapping[str, Any], stored: Stored, dtype: torch.dtype
) -> list[Output]:
    """Return the tensors of the checkpoint without quantisation, in the order of the files.

    Args:
        method: quantisation method, one of `LAYOUTS`.
        section: `quantization_config` of config.json.
        stored: tensors of the quantised checkpoint.
        dtype: dtype of the weights that were quantised; all others are copied.

    Raises: ValueError: a tensor has another layout than the method's.
    """
    made = LAYOUTS[method](section, stored, dtype)
    used = {name for names, _ in made.values() for name in names}
    outputs: list[Output] = []
    for name, tensor in stored.items():
        if name in made:
            outputs.append(made[name][1])
        elif name not in used and name.rpartition(".")[2] not in OF_ACTIVATIONS:
            if tensor.dtype.startswith(NARROW) or tensor.dtype in ("I8", "U8"):
                raise ValueError(f"{name} has the dtype {tensor.dtype}, and no scale of {method}")
            outputs.append(copy_of(name, tensor))
    if not made:
        raise ValueError(f"no tensor has the layout of {method}")
    return outputs


# The first tensor of each weight -> all tensors that it is made of, and the weight.
Made = dict[str, tuple[Sequence[str], Output]]


def mxfp4(section: Mapping[str, Any], stored: Stored, dtype: torch.dtype) -> Made:
    """Experts of gpt-oss: blocks [expert, out, group, 16] and scales [expert, out, group].

    Two numbers of 4 bits are in a byte. The weight has the shape [expert, in, out].
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    def parts(blocks: SourceTensor, scales: SourceTensor) -> Iterator[Tensor]:
        for expert in range(blocks.shape[0]):
            pair = (each.read(expert, expert + 1) for each in (blocks, scales))
            yield convert_moe_packed_tensors(*pair, dtype=dtype)

    made: Made = {}
    for name, blocks in stored.items():
        weight = name.removesuffix("_blocks")
        if weight == name:
            continue
        scales = stored.get(f"{weight}_scales")
        if len(blocks.shape) != 4 or scales is None or scales.shape != blocks.shape[:-1]:
            raise ValueError(f"{name} of shape {list(blocks.shape)} has no scales of mxfp4")
        num_experts, num_out, num_groups, width = blocks.shape
        shape = (num_experts, num_groups * width * 2, num_out)
        output = Output(
            name=weight, dtype=NAMES[dtype], shape=shape, parts=partial(parts, blocks, scales)
        )
        made[name] = ((name, f"{weight}_scales"), output)
    return made


def fp8(
    section: Mapping[str, Any],
    stored: Stored,
    dtype: torch.dtype,
    *,
    has_column_scales: bool = False,
) -> Made:
    """Numbers of 8 bits with a scale for each block, each row or the whole weight.

    Args:
        has_column_scales: stacks are [expert, in, out] with a scale for each column, in the shapes
            [expert, 1, out] and [expert, out, 1]. So FBGEMM stores the experts of Llama 4.
    """
    block = section.get("weight_block_size")
    made: Made = {}
    for name, tensor in stored.items():
        if not tensor.dtype.startswith("F8") or name.endswith(("_scale", "_scale_inv")):
            continue
        scale = next((s for end in ("_scale_inv", "_scale") if (s := name + end) in stored), None)
        if scale is None:
            raise ValueError(f"{name} has the dtype {tensor.dtype}, and no {name}_scale_inv")
        if has_column_scales and len(tensor.shape) == 3:
            parts = partial(_scaled_columns, tensor, stored[scale], dtype)
        else:
            parts = partial(_scaled_parts, tensor, stored[scale], block, dtype)
        output = Output(name=name, dtype=NAMES[dtype], shape=tensor.shape, parts=parts)
        made[name] = ((name, scale), output)
    return made


def _scaled_columns(
    tensor: SourceTensor, scale: SourceTensor, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield the matrices of a stack, whose columns have a scale each.

    Raises: ValueError: there is another number of scales.
    """
    scales = scale.read().float()
    num_experts, _, num_columns = tensor.shape
    if tuple(scales.shape) not in ((num_experts, 1, num_columns), (num_experts, num_columns, 1)):
        raise ValueError(f"scales of shape {list(scales.shape)} for {list(tensor.shape)}")
    for number in range(num_experts):
        matrix = tensor.read(number, number + 1)[0].float()
        yield (matrix * scales[number].reshape(1, -1)).to(dtype)


def _scaled_parts(
    tensor: SourceTensor, scale: SourceTensor, block: Sequence[int] | None, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield a weight in parts: matrices of a stack one by one, and rows of a matrix."""
    scales = scale.read()
    if len(tensor.shape) == 3:
        for number in range(tensor.shape[0]):
            of_matrix = scales if scales.numel() == 1 else scales[number]
            yield scaled(tensor.read(number, number + 1)[0], of_matrix, block).to(dtype)
        return
    size = None if len(tensor.shape) != 2 else scaled_blocks(tensor.shape, scales, block)
    if size is None:
        yield scaled(tensor.read(), scales, block).to(dtype)
        return
    height = size[0]  # A part has whole blocks of rows.
    step = max(1, PART_NUMBERS // (height * tensor.shape[1])) * height
    for first in range(0, tensor.shape[0], step):
        last = min(first + step, tensor.shape[0])
        some = scales[first // height : -(-last // height)]
        yield scaled(tensor.read(first, last), some, size).to(dtype)


def scaled_blocks(
    shape: Sequence[int], scale: Tensor, block: Sequence[int] | None
) -> tuple[int, int] | None:
    """Return the rows and columns of a block; None for one scale.

    Raises: ValueError: the scales fit neither the blocks nor whole rows and columns, or they might
        belong to rows as well as to columns.
    """
    if scale.numel() == 1:
        return None
    rows, columns = shape[-2:]
    num_rows, num_columns = scale.shape if scale.ndim == 2 else (scale.shape[0], 1)
    if block and (-(-rows // block[0]), -(-columns // block[1])) == (num_rows, num_columns):
        return block[0], block[1]
    if num_rows == 1 and num_columns == rows and rows > 1:
        text = f"scales of shape {list(scale.shape)} might be those of rows or of columns"
        raise ValueError(f"{text} of {list(shape)}; rows have the shape [{rows}, 1]")
    if scale.ndim == 1 and num_rows != rows:
        raise ValueError(f"scales of shape {list(scale.shape)} for {rows} rows")
    if rows % num_rows or columns % num_columns:
        raise ValueError(f"scales of shape {list(scale.shape)} do not divide {list(shape)}")
    return rows // num_rows, columns // num_columns


def scaled(values: Tensor, scale: Tensor, block: Sequence[int] | None) -> Tensor:
    """Return a matrix [out, in] times its scales, in fp32.

    Args:
        scale: one number, or one for each block. uint8 numbers are exponents (E8M0).
        block: rows and columns of a block; None: they follow from the shapes.

    Raises: ValueError: as `scaled_blocks`.
    """
    factors = (scale.float() - 127.0).exp2() if scale.dtype == torch.uint8 else scale.float()
    size = scaled_blocks(values.shape, factors, block)
    if size is None:
        return values.float() * factors.reshape(())
    factors = factors.reshape(factors.shape[0], -1)
    factors = factors.repeat_interleave(size[0], 0)[: values.shape[0]]
    return values.float() * factors.repeat_interleave(size[1], 1)[:, : values.shape[1]]


def compressed(section: Mapping[str, Any], stored: Stored, dtype: torch.dtype) -> Made:
    """The formats of the library compressed-tensors: integers of 4 and 8 bits, FP8, NVFP4."""
    logging.getLogger("compressed_tensors").setLevel(logging.ERROR)
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.utils.match import match_name

    sparsity = cast(Mapping[str, Any], section.get("sparsity_config") or {}).get("format")
    if sparsity not in (None, "dense"):
        raise ValueError(f"sparse weights ({sparsity}) are not supported")
    config = QuantizationConfig.model_validate({**section, "quant_method": "compressed-tensors"})
    schemes: list[Any] = list(config.config_groups.values())
    common = None if config.format == "mixed-precision" else config.format

    def scheme_of(module: str) -> Any:
        named = (s for s in schemes if any(match_name(module, each) for each in s.targets))
        by_class = (s for s in schemes if "Linear" in s.targets)
        return next(named, None) or next(by_class, schemes[0])

    def parts(
        decompress: Callable[[dict[str, Tensor], Any], dict[str, Tensor]],
        names: Mapping[str, str],
        scheme: Any,
    ) -> Iterator[Tensor]:
        tensors = {local: stored[name].read() for local, name in names.items()}
        scale = tensors.get("weight_scale")
        if scale is not None and scale.dtype in (torch.bfloat16, torch.float16):
            tensors["weight_scale"] = scale.float()  # Products are rounded once.
        weights = scheme.weights
        if weights.strategy == "block":
            block = list(weights.block_structure)
            yield scaled(tensors["weight"], tensors["weight_scale"], block).to(dtype)
        else:
            yield decompress(tensors, scheme)["weight"].to(dtype)

    made: Made = {}
    for name, tensor in stored.items():
        module, _, local = name.rpartition(".")
        is_scaled = local == "weight" and f"{module}.weight_scale" in stored
        if local != "weight_packed" and not is_scaled:
            continue
        scheme = scheme_of(module)
        form = scheme.format or common or infer_module_format(torch.nn.Linear, scheme)
        compressor: Any = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
        locals_ = {*PARAMETERS} if local == "weight_packed" else {*PARAMETERS, "weight"}
        names = {each: full for each in locals_ if (full := f"{module}.{each}") in stored}
        shape = tensor.shape
        if "weight_shape" in names:
            shape = tuple(int(size) for size in stored[names["weight_shape"]].read())
        elif local == "weight_packed":
            shape = (*shape[:-1], shape[-1] * 2)  # Two numbers of 4 bits in a byte.
        output = Output(
            name=f"{module}.weight",
            dtype=NAMES[dtype],
            shape=shape,
            parts=partial(parts, compressor.decompress, names, scheme),
        )
        made[name] = (tuple(names.values()), output)
    return made


PARAMETERS = (
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "weight_global_scale",
)


def bitsandbytes(section: Mapping[str, Any], stored: Stored, dtype: torch.dtype) -> Made:
    """NF4 and FP4 with a scale for each block, also double quantisation; and LLM.int8."""
    made: Made = {}
    for name, tensor in stored.items():
        states = [
            each for kind in ("nf4", "fp4") if (each := f"{name}{QUANT_STATE}{kind}") in stored
        ]
        rows = f"{name.rpartition('.')[0]}.SCB"
        if states:
            state = json.loads(bytes(stored[states[0]].read().tolist()))
            ends = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
            names = {end: full for end in ends if (full := name + end) in stored}
            parts = partial(_four_bit_parts, tensor, state, names, stored, dtype)
            output = Output(name=name, dtype=NAMES[dtype], shape=tuple(state["shape"]), parts=parts)
            made[name] = ((name, states[0], *names.values()), output)
        elif tensor.dtype == "I8" and rows in stored:
            parts = partial(_eight_bit_parts, tensor, stored[rows], dtype)
            output = Output(name=name, dtype=NAMES[dtype], shape=tensor.shape, parts=parts)
            made[name] = ((name, rows, f"{name.rpartition('.')[0]}.weight_format"), output)
    return made


def _four_bit_parts(
    tensor: SourceTensor,
    state: Mapping[str, Any],
    names: Mapping[str, str],
    stored: Stored,
    dtype: torch.dtype,
) -> Iterator[Tensor]:
    """Yield the numbers of a weight, flat. The high half of a byte is the first number."""
    packed = tensor.read().reshape(-1).view(torch.uint8)
    levels = stored[names[".quant_map"]].read().float()  # [16]
    scales = stored[names[".absmax"]].read()  # [block]
    if ".nested_absmax" in names:
        nested = stored[names[".nested_absmax"]].read().float()
        levels_of_scales = stored[names[".nested_quant_map"]].read().float()  # [256]
        outer = nested.repeat_interleave(int(state["nested_blocksize"]))[: len(scales)]
        scales = levels_of_scales[scales.long()] * outer + float(state["nested_offset"])
    size = int(state["blocksize"])
    total = math.prod(state["shape"])
    step = PART_NUMBERS // size * size
    for first in range(0, total, step):
        last = min(first + step, total)
        some = packed[first // 2 : -(-last // 2)]
        halves = torch.stack((some >> 4, some & 0xF), dim=-1).reshape(-1)[: last - first]
        of_numbers = scales[first // size : -(-last // size)].float().repeat_interleave(size)
        yield (levels[halves.int()] * of_numbers[: last - first]).to(dtype)


def _eight_bit_parts(
    tensor: SourceTensor, rows: SourceTensor, dtype: torch.dtype
) -> Iterator[Tensor]:
    """Yield an LLM.int8 weight: row i is its integers times SCB[i] / 127."""
    yield (tensor.read().float() * (rows.read().float() / 127.0)[:, None]).to(dtype)


LAYOUTS: dict[str, Callable[[Mapping[str, Any], Stored, torch.dtype], Made]] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "fbgemm_fp8": partial(fp8, has_column_scales=True),
    "compressed-tensors": compressed,
    "bitsandbytes": bitsandbytes,
}
