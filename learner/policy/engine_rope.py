"""Rotary embeddings that vLLM 0.32 computes in another way than transformers 5.

The check reads `config.json` in both notations of transformers, `rope_scaling` and
`rope_parameters`, so it runs before any library is imported.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml

DIFFERENCES: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("engine_differences.yaml").read_text(encoding="utf-8")
)
# Types that both libraries compute.
TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
SECTIONS = ("rope_scaling", "rope_parameters")  # The first one has priority in transformers.
ORIGINAL = "original_max_position_embeddings"
PHI3_ORIGINAL = 4096
QUERIES = "llama_4_scaling_beta"  # Key of Ministral 3.
MAX_GAP = 1e-6  # Difference of two factors that is no rounding.


def rope_problem(tree: dict[str, Any], max_tokens: int) -> str:
    """Return the setting that both libraries read differently, and the remedy; or "".

    Args:
        tree: content of config.json.
        max_tokens: value of `actor.max_model_len`.
    """
    return next((found for rope in _ropes(tree) if (found := _problem(tree, rope, max_tokens))), "")


def _ropes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rotary embeddings of a network, one for each kind of layer."""
    found: object = next((tree[name] for name in SECTIONS if tree.get(name)), None)
    if not isinstance(found, dict):
        return
    section = cast(dict[str, Any], found)
    inner = [cast(dict[str, Any], each) for each in section.values() if isinstance(each, dict)]
    yield from inner or [section]


def _problem(tree: dict[str, Any], rope: dict[str, Any], max_tokens: int) -> str:
    family = tree.get("model_type")
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    named = [str(rope[name]) for name in ("type", "rope_type") if rope.get(name)]
    if len(set(named)) > 1 and "su" not in named and "mrope" not in named:
        return f"has two types of RoPE, {' and '.join(named)}. Remove the wrong one"
    if kind not in TYPES:
        other = " Write rope_type=longrope" if kind == "su" else " Choose another model"
        return f"has rope_type={kind}, and the learner has {', '.join(TYPES)}.{other}"
    if family in DIFFERENCES["latent"] and kind not in ("default", "yarn"):
        return f"has rope_type={kind}, and vLLM computes it as yarn. Choose another model"
    original = rope.get(ORIGINAL)
    if rope.get(QUERIES) and isinstance(original, int) and max_tokens > original:
        return (
            f"has {QUERIES}={rope[QUERIES]}: the learner scales queries beyond {original}"
            " positions, and the engine does not. Set"
            f" actor.max_model_len={original} or lower, or choose another model"
        )
    if kind == "default":
        partial = rope.get("partial_rotary_factor") or tree.get("partial_rotary_factor") or 1.0
        if family in DIFFERENCES["whole_heads"] and float(partial) != 1.0:
            return (
                f"has partial_rotary_factor={partial}: the learner rotates whole heads, and the"
                " engine a part of them. Remove the key, or choose another model"
            )
    if kind == "dynamic":
        return _dynamic_problem(family, rope)
    if kind == "yarn":
        return _yarn_problem(family, rope)
    return _long_problem(tree, rope, max_tokens) if kind == "longrope" else ""


def _dynamic_problem(family: object, rope: dict[str, Any]) -> str:
    own = ["max_trained_positions"]
    if not str(family).startswith("hunyuan"):  # Transformers reads `alpha` in these families only.
        own.append("alpha")
    name = next((each for each in own if rope.get(each)), "")
    return f"has {name} in rope_type=dynamic, which the learner ignores. Remove it" if name else ""


def _yarn_problem(family: object, rope: dict[str, Any]) -> str:
    both = [bool(rope.get(name)) for name in ("mscale", "mscale_all_dim")]
    if family in DIFFERENCES["latent"] and both == [True, False]:
        return "has mscale without mscale_all_dim in rope_type=yarn. Set both to the same number"
    if family == "gpt_oss" and rope.get("attention_factor"):
        return "has attention_factor in rope_type=yarn, which the engine ignores. Remove it"
    return ""


def _long_problem(tree: dict[str, Any], rope: dict[str, Any], max_tokens: int) -> str:
    """Compare the factors of the cosines and sines of `longrope`."""
    most = tree.get("max_position_embeddings")
    # Phi-3 has a default of its own, and transformers prefers the key outside the section.
    default = PHI3_ORIGINAL if tree.get("model_type") == "phi3" else rope.get(ORIGINAL, most)
    original = tree.get(ORIGINAL, default)
    if not isinstance(most, int) or not isinstance(original, int):
        return ""
    given = rope.get("attention_factor")
    ours = float(given) if given else _scale(rope.get("factor") or most / original, original)
    length = "long" if max_tokens > original else "short"
    theirs = float(rope.get(f"{length}_mscale") or _scale(most / original, original))
    if abs(ours - theirs) <= MAX_GAP:
        return ""
    return (
        f"has rope_type=longrope, whose cosines are scaled by {ours:.4g} in the learner and by"
        f" {theirs:.4g} in the engine. Remove attention_factor, factor, short_mscale and"
        " long_mscale from config.json, or choose another model"
    )


def _scale(factor: float, original: int) -> float:
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
