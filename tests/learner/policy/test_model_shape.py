"""Laws of the sizes of checkpoints: all experts count."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.config.learner import LoraSection
from learner.policy.model import load_policy
from learner.policy.model_shape import ModelShape, read_shape
from tests.learner.experts import config_of, make_experts, save_experts
from tools.checks.memory_plan import lora_params


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe"])
def test_parameters_of_a_config_include_all_experts(tmp_path: Path, kind: str) -> None:
    config_of(kind).save_pretrained(tmp_path)
    actual = make_experts(kind).num_parameters()
    assert read_shape(tmp_path).num_params == pytest.approx(actual, rel=0.01)


def test_parameters_of_files_include_all_experts(tmp_path: Path) -> None:
    model = save_experts(tmp_path, "qwen3_moe")
    assert read_shape(tmp_path).num_params == model.num_parameters()


def test_adapters_of_experts_are_counted_exactly(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    lora = LoraSection(rank=4, targets=["q_proj", "experts"])
    model = load_policy(str(tmp_path), device="cpu", lora=lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert lora_params(lora, read_shape(tmp_path)) == trained


def shape_of(folder: Path, **config: object) -> ModelShape:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return read_shape(folder)


def test_absent_sizes_are_the_defaults_of_the_class(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    shape = shape_of(tmp_path, model_type="gemma3", text_config=text)
    assert (shape.hidden, shape.layers) == (2560, 34)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)


def test_latent_attention_caches_its_latent_vector(tmp_path: Path) -> None:
    sizes = {"hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    shape = shape_of(tmp_path, vocab_size=320, intermediate_size=8, **sizes, **latent)
    assert shape.kv_bytes_per_token("bfloat16") == 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    "layers",
    [
        {"layer_types": ["linear_attention", "full_attention"] * 2},
        {"layer_types": ["mamba", "attention", "mamba", "attention"]},
        {"hybrid_override_pattern": "M*E*"},
        {"full_attention_interval": 2},
    ],
)
def test_layers_with_a_fixed_state_cache_nothing(tmp_path: Path, layers: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 4}
    shape = shape_of(tmp_path, vocab_size=320, intermediate_size=8, **sizes, **layers)
    assert shape.kv_bytes_per_token("float32") == 2 * 2 * 2 * 32 * 4  # Two layers, two heads of 32.


def test_network_of_experts_alone_needs_no_dense_size(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
    experts = {"num_experts": 4, "moe_intermediate_size": 16}
    shape = shape_of(tmp_path, tie_word_embeddings=True, **sizes, **experts)
    attention, router, norms = 4 * 64 * 64, 4 * 64, 3 * 64
    assert shape.num_params == 8 * 64 + attention + 4 * 3 * 64 * 16 + router + norms
