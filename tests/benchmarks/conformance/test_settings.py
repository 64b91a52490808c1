"""Laws of settings beside the defaults of a family: engine and network agree, or a refusal."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from benchmarks.conformance.learner_side import SEQUENCES, gap_of, load_plain, plain_scores
from benchmarks.conformance.networks import save_network
from benchmarks.conformance.part_results import TOLERANCE
from common.config.actor import ActorSection, EnforceEager
from common.config.model import ModelSection
from common.errors import ConfigError
from learner.policy.model_kind import DIFFERENCES, check_engine_equal

pytestmark = [pytest.mark.slow, pytest.mark.long]

MAX_LEN = 128
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
}
AGREED: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"tie_word_embeddings": False}),
    ("gemma3_text", {"tie_word_embeddings": False}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 64}),
    ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("mixtral", {"sliding_window": 16}),
    ("deepseek_v3", {"n_group": 2, "topk_group": 1, "norm_topk_prob": False}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0, "attention_bias": False}),
    ("gpt2", {"tie_word_embeddings": False}),
    ("phi", {"qk_layernorm": True, "partial_rotary_factor": 1.0}),
    ("starcoder2", {"tie_word_embeddings": False, "sliding_window": 16, "use_bias": False}),
    ("olmo", {"clip_qkv": 0.5, "attention_bias": True}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 64}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 64}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 16}),
    ("granite", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 16}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
    ("lfm2", {"conv_bias": True}),
    ("falcon_h1", {"mamba_norm_before_gate": False, "mamba_rms_norm": True}),
    ("granitemoehybrid", {"attention_bias": True}),
    ("exaone4", {"sliding_window_pattern": "LG"}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"attention_bias": True}),
    ("olmoe", {"clip_qkv": 0.5}),
    ("gpt_oss", {"swiglu_limit": 0.5}),
    ("gpt2", {"scale_attn_weights": False}),
    ("olmoe", {"rms_norm_eps": 0.1}),
    ("gpt_oss", {"rms_norm_eps": 0.1}),
    ("llama", {"logit_scale": 0.5}),
    ("mixtral", {"hidden_act": "gelu"}),
    ("stablelm", {"hidden_act": "gelu"}),
    ("cohere", {"hidden_act": "gelu"}),
    ("cohere", {"tie_word_embeddings": False}),
    ("deepseek_v2", {"norm_topk_prob": True}),
    ("ernie4_5_moe", {"moe_norm_min": 0.9}),
    ("minicpm3", {"mlp_bias": True}),
    ("granitemoe_swa", {"attention_bias": True}),
]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
}
WINDOWS = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
# Settings that one library ignores, outside the table of single keys.
IGNORED: list[tuple[str, dict[str, Any]]] = [
    ("llama", WINDOWS),
    ("llama", {"rope_parameters": LONG | {"attention_factor": 1.5}}),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 2, "topk_group": 1}),
    (
        "gpt_oss",
        {
            "rope_parameters": YARN
            | {"attention_factor": 1.5, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        },
    ),
    ("ministral3", {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5, "beta_fast": 32.0}}),
]


async def engine_gap(path: Path) -> float:
    """Return the largest difference of the engine's scores and those of the network, in nats."""
    from actor.engine.engine import Engine

    cfg = ActorSection(
        max_concurrent=4, max_model_len=MAX_LEN, kv_cache_gib=1, enforce_eager=EnforceEager.TRUE
    )
    model = ModelSection(path=str(path), dtype="float32")
    engine = await Engine.start(model, cfg, end_of_turn_ids=[], seed=0)
    try:
        scores = await engine.score(SEQUENCES, request_id="first")
    finally:
        engine.shut_down()
    return gap_of(scores, plain_scores(load_plain(str(path))))


@pytest.fixture(autouse=True)
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


@pytest.mark.parametrize(("family", "settings"), AGREED)
def test_engine_follows_the_settings_of_a_checkpoint(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    path = save_network(family, tmp_path, settings=settings)
    check_engine_equal(path, MAX_LEN, shown="m")
    assert asyncio.run(engine_gap(path)) <= TOLERANCE


@pytest.mark.parametrize(("family", "settings"), REFUSED)
def test_refused_setting_gives_other_scores_in_the_engine(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """An entry of the table that vLLM has mended is red here, and leaves the table."""
    path = save_network(family, tmp_path, settings=settings)
    assert settings.keys() <= DIFFERENCES["settings"][family].keys()
    with pytest.raises(ConfigError, match=next(iter(settings))):
        check_engine_equal(path, MAX_LEN, shown="m")
    assert asyncio.run(engine_gap(path)) > 100 * TOLERANCE


@pytest.mark.parametrize(("family", "settings"), IGNORED)
def test_ignored_setting_gives_other_scores_in_the_engine(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    path = save_network(family, tmp_path, settings=settings)
    with pytest.raises(ConfigError, match=r"choose another model|Remove"):
        check_engine_equal(path, MAX_LEN, shown="m")
    assert asyncio.run(engine_gap(path)) > 100 * TOLERANCE
