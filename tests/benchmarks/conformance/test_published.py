"""Laws of published models: the table has their config.json, and small networks their options."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.conformance.learner_side import (
    SEQUENCES,
    gap_of,
    load_plain,
    passes_of,
    plain_scores,
)
from benchmarks.conformance.networks import architecture, families
from benchmarks.conformance.part_results import TOLERANCE
from benchmarks.conformance.published import (
    PublishedModel,
    facts_of,
    num_params,
    published_models,
    save_published,
    start_problem,
    toy_config,
    write_config,
)
from common.config.learner import Layout
from learner.policy.model import load_policy

MODELS = published_models()
FEWEST = 30
# Options that change the forward pass, none of which is a size.
OPTIONS = (
    "attention_bias",
    "attention_k_eq_v",
    "attn_logit_softcapping",
    "attn_output_gate",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layernorm_epsilon",
    "logits_scaling",
    "moe_router_use_sigmoid",
    "n_group",
    "norm_topk_prob",
    "partial_rotary_factor",
    "qk_norm",
    "rms_norm_eps",
    "rope_theta",
    "routed_scaling_factor",
    "scoring_func",
    "swiglu_limit",
    "tie_word_embeddings",
    "topk_group",
    "topk_method",
    "use_qk_norm",
)


def scaling_of(config: dict[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    sizes = ("original_max_position_embeddings", "long_factor", "short_factor", "mrope_section")
    return {name: value for name, value in rope.items() if name not in sizes}


def test_table_has_models_of_many_families() -> None:
    assert len(MODELS) >= FEWEST
    assert len({each.family for each in MODELS.values()}) >= FEWEST
    assert all(each.source for each in MODELS.values())


@pytest.mark.slow
def test_every_model_belongs_to_a_measured_family() -> None:
    assert {each.family for each in MODELS.values()} <= set(families())


@pytest.mark.parametrize("name", MODELS)
def test_small_network_has_the_published_options(name: str) -> None:
    model = MODELS[name]
    toy = toy_config(model)
    own = {key: model.text[key] for key in OPTIONS if key in model.text}
    assert {key: toy[key] for key in own} == own
    assert scaling_of(toy) == scaling_of(model.text)
    assert toy["architectures"] == [architecture(model.family)]
    assert "quantization_config" not in toy


@pytest.mark.parametrize("name", MODELS)
def test_lists_have_an_entry_for_each_layer(name: str) -> None:
    for config in (MODELS[name].text, toy_config(MODELS[name])):
        for key in ("layer_types", "no_rope_layers", "hybrid_layer_pattern", "moe_layer_freq"):
            if isinstance(config.get(key), list):
                assert len(config[key]) == config["num_hidden_layers"], key


def test_small_network_has_each_kind_of_layer_and_the_ratio_of_heads() -> None:
    toy = toy_config(MODELS["Qwen3.5-4B"])
    assert toy["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert toy["num_attention_heads"] == 4 * toy["num_key_value_heads"]  # 16 heads for 4.
    assert toy["linear_num_value_heads"] == 2 * toy["linear_num_key_heads"]  # 32 for 16.
    assert toy_config(MODELS["GLM-4.7"])["num_attention_heads"] == 12  # 96 heads for 8.
    assert toy_config(MODELS["DeepSeek-V3"])["first_k_dense_replace"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.596),
        ("Qwen3-30B-A3B", 30.5),
        ("gpt-oss-120b", 116.8),
        ("DeepSeek-V3", 671.0),
        ("MiniMax-M2.7", 228.7),
        ("GLM-4.5-Air", 106.9),
        ("Llama-3.1-8B-Instruct", 8.03),
        ("SmolLM2-135M-Instruct", 0.1345),
    ],
)
def test_parameters_are_those_of_the_model_card(name: str, billions: float, tmp_path: Path) -> None:
    assert num_params(MODELS[name], tmp_path) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.slow
def test_files_have_the_weights_of_further_heads(tmp_path: Path) -> None:
    glm = save_published("GLM-4.5-Air", tmp_path / "glm")
    names = load_file(glm / "model.safetensors").keys()
    assert "model.layers.2.eh_proj.weight" in names  # The network has layers 0 and 1.
    assert "model.layers.2.self_attn.q_proj.weight" in names
    qwen = save_published("Qwen3.5-4B", tmp_path / "qwen")
    assert "mtp.fc.weight" in load_file(qwen / "model.safetensors")


@pytest.mark.slow
def test_published_type_of_kimi_is_read_as_its_family(tmp_path: Path) -> None:
    start = save_published("Kimi-K2-Instruct", tmp_path)
    assert (
        json.loads((start / "config.json").read_text(encoding="utf-8"))["model_type"] == "kimi_k2"
    )
    names = load_file(start / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in names, "the published names"
    policy = load_policy(str(start), device="cpu")
    passes = passes_of(policy, Layout.PADDED)
    passes.check_start(may_pad=False)
    expected = plain_scores(load_plain(str(start)))
    assert gap_of(passes.score_sequences(SEQUENCES), expected) <= TOLERANCE


def model_of(**config: Any) -> PublishedModel:
    return PublishedModel(
        name="m", source="s", config=config, default=(), toy={}, is_pretrained=False
    )


def test_start_problem_is_that_of_the_checks(tmp_path: Path) -> None:
    plain = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert start_problem(write_config(model_of(**plain), tmp_path / "a")) == ""
    biased = write_config(model_of(**plain, attention_bias=True), tmp_path / "b")
    assert start_problem(biased).startswith("Qwen3ForCausalLM with attention_bias=true")


def test_memory_of_a_model_is_that_of_the_plan() -> None:
    facts = facts_of(MODELS["Qwen3-0.6B"], 596_049_920)
    # Weights and gradients in fp32 with two moments are 16 bytes a weight, 8.9 GiB.
    gib = float(facts["all weights"].split()[0])
    assert 596_049_920 * 16 / 2**30 < gib < 20
    assert facts["all weights"].endswith(" GiB, 1 GPU")
    assert float(facts["LoRA"].split()[0]) < gib
    assert facts["engine"] == "1 GiB"  # 596M weights of 2 bytes.
