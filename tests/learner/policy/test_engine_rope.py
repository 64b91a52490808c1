"""Laws of rotary embeddings: those that engine and learner compute differently are refused."""

import re
from typing import Any

import pytest

from learner.policy.model_kind import rope_problem

ORIGINAL = "original_max_position_embeddings"
LONG = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [4.0], ORIGINAL: 64}


def config(family: str, rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"model_type": family, "max_position_embeddings": 256, "rope_scaling": rope} | changes


@pytest.mark.parametrize(
    ("family", "rope", "words"),
    [
        ("llama", {"type": "ntk", "factor": 4.0}, "rope_type=ntk"),
        ("phi3", {"type": "su"}, "Write rope_type=longrope"),
        ("llama", {"type": "linear", "rope_type": "yarn", "factor": 4.0}, "linear and yarn"),
        ("llama", {"type": "dynamic", "factor": 4.0, "alpha": 8.0}, "alpha"),
        ("deepseek_v3", {"rope_type": "llama3", "factor": 4.0}, "computes it as yarn"),
        ("deepseek_v3", {"rope_type": "yarn", "mscale": 0.5}, "without mscale_all_dim"),
        ("gpt_oss", {"rope_type": "yarn", "attention_factor": 1.5}, "attention_factor"),
        ("llama", {"rope_type": "default", "partial_rotary_factor": 0.5}, "whole heads"),
        # sqrt(1 + ln 4 / ln 64) = sqrt(4 / 3), and sqrt(1 + ln 2 / ln 64) = sqrt(7 / 6).
        ("llama", LONG | {"factor": 2.0}, r"by 1\.08 in the learner and by 1\.155 in"),
        ("llama", LONG | {"attention_factor": 1.5}, r"by 1\.5 in the learner and by 1\.155"),
        ("llama", LONG | {"long_mscale": 1.5}, r"by 1\.155 in the learner and by 1\.5"),
    ],
)
def test_unequal_rotary_embedding_is_named(family: str, rope: dict[str, Any], words: str) -> None:
    found = rope_problem(config(family, rope), 128)
    assert re.search(words, found)
    new = config(family, {}, rope_parameters=rope)
    assert rope_problem(new, 128) == found, "both notations"
    nested = config(family, {}, rope_parameters={"full_attention": rope})
    assert rope_problem(nested, 128) == found, "each kind of layer"


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("llama", {}),
        ("llama", {"type": "linear", "factor": 4}),
        ("llama", {"rope_type": "llama3", "factor": 8.0, ORIGINAL: 64}),
        ("llama", LONG | {"factor": 4.0}),
        ("llama", LONG | {"short_mscale": 1.5}),  # The engine uses the long factors.
        ("qwen2", {"type": "yarn", "factor": 4.0, "mscale": 0.5}),
        ("deepseek_v3", {"type": "yarn", "mscale": 0.5, "mscale_all_dim": 0.5}),
        ("hunyuan_v1_dense", {"type": "dynamic", "factor": 1.0, "alpha": 8.0}),
        ("phi3", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ],
)
def test_equal_rotary_embedding_is_accepted(family: str, rope: dict[str, Any]) -> None:
    assert rope_problem(config(family, rope), 128) == ""


def test_scaled_queries_limit_the_context() -> None:
    rope = {"type": "yarn", "factor": 4.0, ORIGINAL: 64, "llama_4_scaling_beta": 0.1}
    assert rope_problem(config("ministral3", rope), 64) == ""
    assert "Set actor.max_model_len=64" in rope_problem(config("ministral3", rope), 65)


def test_original_length_outside_the_section_has_priority() -> None:
    rope = LONG | {"factor": 4.0, ORIGINAL: 8}
    assert "rope_type=longrope" in rope_problem(config("phi3", rope), 128), "its default is 4096"
    outside = config("phi3", rope, **{ORIGINAL: 64})
    assert rope_problem(outside, 128) == ""
