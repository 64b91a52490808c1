"""Laws of quantised layouts: their numbers are those of an independent library, or of a formula."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import (
    FP8BlockDequantizer,
)
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.dequantise.layouts import outputs_of
from tools.dequantise.tensors import stored_tensors, write_weights

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def converted(
    folder: Path,
    tensors: dict[str, Tensor],
    method: str,
    section: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint after its conversion on disk."""
    source, target = folder / "source", folder / "target"
    source.mkdir(exist_ok=True)
    target.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, source / "model.safetensors")
    outputs = outputs_of(method, section or {}, stored_tensors(source), dtype)
    write_weights(outputs, target, note=lambda _: None)
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_have_the_numbers_of_compressed_tensors(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weight = random(300, 200).to(torch.float8_e4m3fn)  # Its last blocks are smaller.
    scale = random(3, 2).abs()
    stored = {
        "up.weight": weight,
        "up.weight_scale_inv": scale,
        "norm.weight": random(7),
        "gate.e_score_correction_bias": random(4),
        "table.weight": random(5, 6).bfloat16(),
    }
    got = converted(tmp_path, stored, "fp8", {"weight_block_size": [128, 128]}, dtype=dtype)
    expected = FP8BlockDequantizer(dtype=dtype)._create_dequantized_weight(weight, scale)
    assert got["up.weight"].equal(expected)
    assert got["up.weight"][299, 199] == (weight.float()[299, 199] * scale[2, 1]).to(dtype)
    assert set(got) == {*stored} - {"up.weight_scale_inv"}
    for name in ("norm.weight", "gate.e_score_correction_bias", "table.weight"):
        assert got[name].equal(stored[name])
        assert got[name].dtype is stored[name].dtype


def test_fp8_scales_of_tensors_rows_stacks_and_exponents_are_read(tmp_path: Path) -> None:
    eight = [random(4, 6, seed=n).to(torch.float8_e4m3fn) for n in range(3)]
    stack = torch.stack(eight)
    stored = {
        "a.weight": eight[0],
        "a.weight_scale_inv": torch.tensor(0.5),
        "a.activation_scale": torch.tensor(9.0),
        "b.weight": eight[1],
        "b.weight_scale": torch.tensor([[1.0], [2.0], [3.0], [4.0]]),
        "b.input_scale": torch.tensor(9.0),
        "experts.up_proj": stack,
        "experts.up_proj_scale_inv": torch.tensor([[[2.0, 4.0]], [[8.0, 16.0]], [[1.0, 0.5]]]),
        "c.weight": eight[2],
        "c.weight_scale_inv": torch.tensor([[128, 126]], dtype=torch.uint8),  # 2^1, 2^-1
    }
    got = converted(tmp_path, stored, "fp8", {"weight_block_size": None})
    assert sorted(got) == ["a.weight", "b.weight", "c.weight", "experts.up_proj"]
    assert got["a.weight"].equal(eight[0].float() * 0.5)
    assert got["b.weight"].equal(eight[1].float() * torch.tensor([[1.0], [2], [3], [4]]))
    assert got["experts.up_proj"][1, :, 3:].equal(eight[1].float()[:, 3:] * 16)
    assert got["experts.up_proj"][2, :, :3].equal(eight[2].float()[:, :3])
    assert got["c.weight"].equal(eight[2].float() * torch.tensor([2.0] * 3 + [0.5] * 3))


@pytest.mark.parametrize(
    ("shape", "scale", "message"),
    [
        ((4, 4), (1, 4), "might be those of rows or of columns"),
        ((4, 8), (1, 4), "might be those of rows or of columns"),
        ((4, 8), (2,), "for 4 rows"),
    ],
)
def test_fp8_scales_without_a_direction_are_refused(
    tmp_path: Path, shape: tuple[int, int], scale: tuple[int, ...], message: str
) -> None:
    stored = {
        "a.weight": random(*shape).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.rand(scale),
    }
    with pytest.raises(ValueError, match=message):
        converted(tmp_path, stored, "fp8", {})
    if len(scale) == 2:  # A block of the configuration has a direction.
        section = {"weight_block_size": [4, shape[1] // 4]}
        factors = stored["a.weight_scale"].repeat_interleave(shape[1] // 4, 1)
        got = converted(tmp_path, stored, "fp8", section)["a.weight"]
        assert got.equal(stored["a.weight"].float() * factors)


@pytest.mark.parametrize("width", [4, 8])
def test_scales_of_fbgemm_experts_belong_to_columns(tmp_path: Path, width: int) -> None:
    up = random(2, 4, width).to(torch.float8_e4m3fn)
    down = random(2, width, 4).to(torch.float8_e4m3fn)
    rows = random(4, 4).to(torch.float8_e4m3fn)
    stored = {
        "experts.gate_up_proj": up,
        "experts.gate_up_proj_scale": torch.rand(2, 1, width),
        "experts.down_proj": down,
        "experts.down_proj_scale": torch.rand(2, 4, 1),
        "q_proj.weight": rows,
        "q_proj.weight_scale": torch.rand(4, 1),
    }
    got = converted(tmp_path, stored, "fbgemm_fp8", {})
    assert got["experts.gate_up_proj"].equal(up.float() * stored["experts.gate_up_proj_scale"])
    factors = stored["experts.down_proj_scale"].transpose(1, 2)
    assert got["experts.down_proj"].equal(down.float() * factors)
    assert got["q_proj.weight"].equal(rows.float() * stored["q_proj.weight_scale"])


def test_mxfp4_has_the_numbers_of_its_standard(tmp_path: Path) -> None:
    num_experts, num_out, num_groups = 2, 3, 4
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(
        0, 256, (num_experts, num_out, num_groups, 16), generator=generator, dtype=torch.uint8
    )
    scales = torch.randint(
        120, 134, (num_experts, num_out, num_groups), generator=generator, dtype=torch.uint8
    )
    stored = {"e.gate_up_proj_blocks": blocks, "e.gate_up_proj_scales": scales}
    got = converted(tmp_path, stored, "mxfp4", dtype=torch.bfloat16)["e.gate_up_proj"]
    assert got.dtype is torch.bfloat16
    assert got.shape == (num_experts, num_groups * 32, num_out)
    for expert, out, column in np.ndindex(num_experts, num_out, num_groups * 32):
        byte = int(blocks[expert, out, column // 32, column % 32 // 2])
        half = byte >> 4 if column % 2 else byte & 15
        number = E2M1[half & 7] * (-1 if half & 8 else 1)
        number *= 2.0 ** (int(scales[expert, out, column // 32]) - 127)
        assert float(got[expert, column, out]) == number


def scheme(**weights: Any) -> dict[str, Any]:
    return {
        "format": weights.pop("form"),
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": weights.pop("inputs", None),
            }
        },
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(("size", "bits"), [(32, 4), (64, 4), (32, 8)])
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_packed_integers_are_scaled_by_group(
    tmp_path: Path, size: int, bits: int, is_symmetric: bool
) -> None:
    rows, columns = 16, 128
    half = 1 << (bits - 1)
    whole = torch.randint(-half, half, (rows, columns), generator=torch.Generator().manual_seed(2))
    zeros = torch.randint(
        -3, 4, (rows, columns // size), generator=torch.Generator().manual_seed(4)
    )
    scales = random(rows, columns // size).abs().bfloat16()
    wide_scales = scales.float().repeat_interleave(size, 1)
    wide_zeros = zeros.repeat_interleave(size, 1) * (not is_symmetric)
    expected = (whole - wide_zeros).float() * wide_scales
    section = scheme(
        form="pack-quantized",
        num_bits=bits,
        type="int",
        symmetric=is_symmetric,
        strategy="group",
        group_size=size,
    )
    described = QuantizationScheme.model_validate(section["config_groups"]["group_0"])
    made = {"weight": expected.bfloat16(), "weight_scale": scales}
    if not is_symmetric:
        made["weight_zero_point"] = zeros.to(torch.int8)
    packer: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    exact = {"weight": expected, **{k: v for k, v in made.items() if k != "weight"}}
    packed = packer.compress(exact | {"weight_scale": scales.float()}, described)
    packed["weight_scale"] = scales
    assert packed["weight_packed"].dtype is torch.int32
    stored = {f"l.0.up.{name}": each for name, each in packed.items()}
    got = converted(
        tmp_path, {**stored, "lm_head.weight": random(2, 2)}, "compressed-tensors", section
    )
    assert sorted(got) == ["l.0.up.weight", "lm_head.weight"]
    inside = (whole < half - 3) & (whole > 3 - half)  # The packer clamps others with zero points.
    assert got["l.0.up.weight"][inside].equal(expected[inside])


def test_other_formats_of_compressed_tensors_are_scaled(tmp_path: Path) -> None:
    eight = random(6, 8).to(torch.float8_e4m3fn)
    rows = random(6, 1).abs().bfloat16()
    stored = {"a.weight": eight, "a.weight_scale": rows, "a.input_scale": torch.tensor(3.0)}
    section = scheme(form="float-quantized", num_bits=8, type="float", strategy="channel")
    got = converted(tmp_path, stored, "compressed-tensors", section)
    assert sorted(got) == ["a.weight"]
    assert got["a.weight"].equal(eight.float() * rows.float())

    whole = torch.randint(-128, 128, (6, 8), dtype=torch.int8)
    zeros = torch.tensor([[1], [2], [3], [-1], [-2], [0]], dtype=torch.int8)
    stored = {"a.weight": whole, "a.weight_scale": rows, "a.weight_zero_point": zeros}
    section = scheme(
        form="int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False
    )
    got = converted(tmp_path, stored, "compressed-tensors", section)
    assert got["a.weight"].equal((whole.float() - zeros.float()) * rows.float())

    section = scheme(
        form="float-quantized", num_bits=8, type="float", strategy="block", block_structure=[4, 4]
    )
    blocks = random(2, 2).abs()
    stored = {"a.weight": eight, "a.weight_scale": blocks}
    got = converted(tmp_path, stored, "compressed-tensors", section)
    assert got["a.weight"][5, 7] == eight.float()[5, 7] * blocks[1, 1]
    assert got["a.weight"][3, 4] == eight.float()[3, 4] * blocks[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitsandbytes_has_the_numbers_of_its_library(tmp_path: Path, dtype: torch.dtype) -> None:
    """The file was written by bitsandbytes 0.50.2: nf4 and fp4, double quantisation, int8."""
    saved = load_file(Path(__file__).with_name("bitsandbytes.safetensors"))
    stored = {name: each for name, each in saved.items() if not name.startswith("expected/")}
    got = converted(tmp_path, stored, "bitsandbytes", {"load_in_4bit": True}, dtype=dtype)
    assert sorted(got) == [f"{name}.weight" for name in "abcde"]
    for name in ("a.weight", "b.weight", "c.weight", "d.weight"):
        assert got[name].dtype is dtype
        expected = saved[f"expected/{name}"]
        assert got[name].shape == expected.shape
        torch.testing.assert_close(got[name].bfloat16(), expected, rtol=2**-8, atol=0)
    assert got["e.weight"].equal(saved["e.weight"])


@pytest.mark.parametrize(
    ("method", "stored", "message"),
    [
        ("fp8", {"a.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn)}, "no a.weight_scale_inv"),
        ("mxfp4", {"a_blocks": torch.zeros(1, 2, 3, 16, dtype=torch.uint8)}, "no scales of mxfp4"),
        ("mxfp4", {"a.weight": torch.zeros(2, 2)}, "no tensor has the layout of mxfp4"),
        (
            "fp8",
            {
                "a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
                "a.weight_scale_inv": torch.ones(3, 1),
            },
            "do not divide",
        ),
        (
            "bitsandbytes",
            {"a.weight": torch.zeros(4, 1, dtype=torch.uint8)},
            "dtype U8, and no scale of bitsandbytes",
        ),
    ],
)
def test_tensor_of_another_layout_is_refused(
    tmp_path: Path, method: str, stored: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        converted(tmp_path, stored, method, {})


def test_large_matrix_is_converted_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools.dequantise import layouts

    weight = random(70, 16).to(torch.float8_e4m3fn)
    scale = random(9, 4).abs()
    stored = {"a.weight": weight, "a.weight_scale_inv": scale}
    section = {"weight_block_size": [8, 4]}
    whole = converted(tmp_path, stored, "fp8", section)["a.weight"]
    monkeypatch.setattr(layouts, "PART_NUMBERS", 300)  # Two blocks of rows.
    assert converted(tmp_path, stored, "fp8", section)["a.weight"].equal(whole)
    assert whole[69, 15] == weight.float()[69, 15] * scale[8, 3]
