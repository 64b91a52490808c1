"""Laws of the kind of a checkpoint: it has a decoder of text, by config.json alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.policy.model import load_policy, make_bare
from learner.policy.model_kind import DIFFERENCES, check_engine_equal, check_kind
from tests.tools.checks.models import write_model
from tools.checks.preflight import check, check_dry, check_model
from tools.evaluate.config import EvalConfig
from tools.evaluate.settings import check_policy
from tools.offline.checks import check_dpo, check_sft
from tools.offline.config import DpoConfig, SftConfig

VISION = {"hidden_size": 32, "num_hidden_layers": 1}
# Published layouts: with a section for text, and with its settings beside the other section.
COMPOSITES: dict[str, dict[str, Any]] = {
    "Qwen2_5_VLForConditionalGeneration": {"model_type": "qwen2_5_vl", "vision_config": VISION},
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text"},
        "vision_config": VISION,
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text"},
        "vision_config": VISION,
    },
    "Llama4ForConditionalGeneration": {
        "model_type": "llama4",
        "text_config": {"model_type": "llama4_text"},
        "vision_config": VISION,
    },
    "Mistral3ForConditionalGeneration": {"model_type": "mistral3", "vision_config": VISION},
    "VoxtralForConditionalGeneration": {"model_type": "voxtral", "audio_config": VISION},
}
IMAGES: dict[str, dict[str, Any]] = {
    # A class name of a decoder does not help: the section decides.
    "Qwen3_5ForCausalLM": {"model_type": "qwen3_5", "vision_config": VISION},
    "InternVLChatModel": {"llm_config": {"model_type": "qwen2"}, "vision_config": VISION},
    "LlavaLlamaForCausalLM": {"mm_vision_tower": "openai/clip-vit-large-patch14"},
}
SOUND = {"Qwen2_5OmniModel": {"thinker_config": {"audio_config": VISION}}}


def save(folder: Path, **config: Any) -> Path:
    return write_model(folder, num_rest=1, vocab_size=64, num_hidden_layers=1, **config)


def commands(folder: Path) -> dict[str, Any]:
    """Return everything that reads a model, by name."""
    where = [f"model.path={folder}", f"run.dir={folder.parent / 'runs'}"]

    def configured(*more: str, schema: Any = RunConfig) -> Any:
        return load_config("smoke", [*where, *more], schema=schema)

    return {
        "train": lambda: check(configured()),
        "--dry-run": lambda: check_dry(configured()),
        "--dry-run without weights": lambda: check_dry(configured(f"model.architecture={folder}")),
        "sft": lambda: check_sft(configured("sft.from_scratch=false", schema=SftConfig)),
        "dpo": lambda: check_dpo(configured(schema=DpoConfig)),
        "serve": lambda: check_policy(configured(schema=EvalConfig)),
        "a role": lambda: check_model(str(folder)),
        "the learner": lambda: load_policy(str(folder), device="cpu"),
        "the start check": lambda: make_bare(str(folder)),
    }


def test_every_command_refuses_a_model_for_images(tmp_path: Path) -> None:
    name = "InternVLChatModel"
    folder = save(tmp_path / "model", architectures=[name], **IMAGES[name])
    for command, start in commands(folder).items():
        with pytest.raises(ConfigError) as caught:
            start()
        said = str(caught.value)
        assert name in said, command
        assert "reads images beside text (vision_config in its config.json)" in said, command
        assert "text-only checkpoint of this family with model_type=qwen2" in said, command


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_are_accepted(name: str, tmp_path: Path) -> None:
    check_kind(save(tmp_path / "model", architectures=[name], **COMPOSITES[name]))


@pytest.mark.parametrize("name", IMAGES)
def test_unknown_composites_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", architectures=[name], **IMAGES[name])
    with pytest.raises(ConfigError, match=f"{name} reads images beside text"):
        check_kind(folder)


@pytest.mark.parametrize("name", SOUND)
def test_models_for_sound_are_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", architectures=[name], **SOUND[name])
    with pytest.raises(ConfigError, match=f"{name} reads sound beside text"):
        check_kind(folder)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("T5ForConditionalGeneration", {"is_encoder_decoder": True}, "is an encoder-decoder"),
        ("BertForMaskedLM", {"model_type": "bert"}, "no head that predicts the next token"),
        ("Qwen3Model", {}, "no head that predicts the next token"),
        ("LlamaForSequenceClassification", {}, "no head that predicts the next token"),
    ],
)
def test_encoders_and_headless_models_are_refused(
    name: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "model", architectures=[name], **config)
    with pytest.raises(ConfigError, match=f"model.path=.*: {name} .*{words}.*decoder-only model"):
        check_model(str(folder))


def test_encoder_without_a_section_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", architectures=["NewForConditionalGeneration"])
    with pytest.raises(ConfigError, match="has an encoder beside its decoder, and no section"):
        check_kind(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"rope_type": "yarn"}},
        {"architectures": ["GPT2LMHeadModel"]},
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        {"architectures": ["Llama4ForCausalLM"], "vision_config": None, "image_token_id": 5},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
)
def test_decoders_of_text_are_accepted(config: dict[str, Any], tmp_path: Path) -> None:
    check_model(str(save(tmp_path / "model", **config)))


def test_damaged_config_is_left_to_other_checks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    check_kind(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]), encoding="utf-8")
    check_kind(tmp_path)


def test_window_that_engine_and_learner_differ_in_is_refused(tmp_path: Path) -> None:
    sizes = {
        "sliding_window": 256,
        "model_type": "cohere2",
        "architectures": ["Cohere2ForCausalLM"],
    }
    folder = save(tmp_path / "model", **sizes)
    where = [f"model.path={folder}", f"run.dir={tmp_path / 'runs'}"]
    longer = load_config("smoke", [*where, "actor.max_model_len=512"])
    for start in (check, check_dry):
        with pytest.raises(ConfigError, match=r"256 tokens .* 257 in .*actor\.max_model_len=256"):
            start(longer)
    check_engine_equal(folder, 256, shown="m")
    check_engine_equal(save(tmp_path / "mistral", sliding_window=256), 512, shown="m")


@pytest.mark.parametrize(
    ("family", "reason"), [("bloom", "GELU"), ("laguna", "layers"), ("dbrx", "publishes")]
)
def test_family_that_the_engine_computes_otherwise_is_refused(
    tmp_path: Path, family: str, reason: str
) -> None:
    folder = save(tmp_path / family, model_type=family, architectures=["SomeForCausalLM"])
    with pytest.raises(ConfigError, match=rf"model\.path=m: .*{reason}.*Choose another model"):
        check_engine_equal(folder, 8, shown="m")


def test_composite_that_the_engine_computes_otherwise_is_refused(tmp_path: Path) -> None:
    whole = {"model_type": "granite_speech", "text_config": {"model_type": "granite"}}
    with pytest.raises(ConfigError, match=r"model\.path=m: .*divide the logits"):
        check_engine_equal(save(tmp_path / "m", **whole), 8, shown="m")


def needed_by(family: str) -> dict[str, Any]:
    """Return the keys without which a family is refused."""
    tied = DIFFERENCES["settings"].get(family, {}).get("tie_word_embeddings", [[True]])
    return DIFFERENCES["needed"].get(family, {}) | {"tie_word_embeddings": tied[0][0]}


@pytest.mark.parametrize(
    ("family", "key", "value", "reason"),
    [
        ("qwen3", "attention_bias", True, "leaves out biases"),
        ("olmoe", "clip_qkv", 8.0, "does not clip"),
        ("deepseek_v3", "rope_interleave", False, "interleaved"),
        ("qwen2_moe", "qkv_bias", False, "adds biases"),
        ("mamba2", "time_step_limit", [0.01, 0.1], "does not limit"),
        ("gpt_oss", "rms_norm_eps", 1e-6, "always uses 1e-5"),
        ("mixtral", "hidden_act", "gelu", "always computes SiLU"),
        ("llama", "logit_scale", 0.5, "scales the logits"),
        ("qwen2", "dual_chunk_attention_config", {"chunk_size": 8}, "attends in chunks"),
        ("deepseek_v2", "norm_topk_prob", True, "scales the gates"),
    ],
)
def test_setting_that_the_engine_ignores_is_refused(
    tmp_path: Path, family: str, key: str, value: object, reason: str
) -> None:
    needed = needed_by(family)
    folder = save(tmp_path / "other", model_type=family, **needed | {key: value})
    words = rf"model\.path=m: .*{key}={re.escape(json.dumps(value))} in config\.json .*{reason}"
    with pytest.raises(ConfigError, match=words):
        check_engine_equal(folder, 8, shown="m")
    check_engine_equal(save(tmp_path / "plain", model_type=family, **needed), 8, shown="m")
    alike = needed | {key: DIFFERENCES["settings"][family][key][0][0]}
    check_engine_equal(save(tmp_path / "alike", model_type=family, **alike), 8, shown="m")


@pytest.mark.parametrize("family", DIFFERENCES["needed"])
def test_keys_that_transformers_leaves_out_are_demanded(tmp_path: Path, family: str) -> None:
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r'lacks "\w+": .* Add it'):
        check_engine_equal(tmp_path, 8, shown="m")
    check_engine_equal(save(tmp_path / "a", model_type=family, **needed_by(family)), 8, shown="m")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "Remove layer_types"),
        ("llama", {"layer_types": ["full_attention", "full_attention"]}, ""),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ("deepseek_v2", {"n_group": 2}, "topk_method=greedy with n_group=2"),
        ("deepseek_v2", {"n_group": 2, "topk_method": "group_limited_greedy"}, ""),
        ("deepseek_v2", {"n_group": 1, "topk_method": "greedy"}, ""),
    ],
)
def test_setting_that_the_learner_ignores_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    folder = save(tmp_path / "other", model_type=family, **needed_by(family) | changes)
    if not words:
        check_engine_equal(folder, 8, shown="m")
        return
    with pytest.raises(ConfigError, match=words):
        check_engine_equal(folder, 8, shown="m")


def test_infinity_in_a_config_has_two_notations(tmp_path: Path) -> None:
    CONFIG_MAPPING["mamba2"]().save_pretrained(tmp_path)
    check_engine_equal(tmp_path, 8, shown="m")
    check_engine_equal(
        save(tmp_path / "old", model_type="mamba2", time_step_limit=[0.0, float("inf")]),
        8,
        shown="m",
    )


def test_every_listed_setting_has_the_default_of_transformers() -> None:
    for family, settings in DIFFERENCES["settings"].items():
        plain = CONFIG_MAPPING[family]()
        for key, (alike, _) in settings.items():
            default = getattr(plain, key, alike[0])  # vLLM alone has some of the keys.
            default = list(default) if isinstance(default, tuple) else default
            assert default == alike[0], f"{family}.{key}"


def test_rules_of_a_family_hold_for_its_published_type(tmp_path: Path) -> None:
    lacking = save(tmp_path / "lacking", model_type="kimi_k2", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lacks .*scoring_func"):
        check_engine_equal(lacking, 8, shown="m")
