"""Refusal of checkpoints without a decoder of text: encoders, other heads, unknown composites.

The check reads `config.json` only, so it runs before any library is imported.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from common.errors import ConfigError

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
    content: object = next((tree[name] for name in SECTIONS if tree.get(name)), None)
    if not isinstance(content, dict):
        return
    section = cast(dict[str, Any], content)
    inner = [cast(dict[str, Any], each) for each in section.values() if isinstance(each, dict)]
    yield from inner or [section]


def _problem(tree: dict[str, Any], rope: dict[str, Any], max_tokens: int) -> str:
    family = family_of(tree)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    # Three positions for each token. Those of a text are equal, so they rotate as one.
    kind = "default" if kind == "mrope" else kind
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
    ignored = ["max_trained_positions"]
    if not str(family).startswith("hunyuan"):  # Transformers reads `alpha` in these families only.
        ignored.append("alpha")
    name = next((each for each in ignored if rope.get(each)), "")
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
    default = PHI3_ORIGINAL if family_of(tree) == "phi3" else rope.get(ORIGINAL, most)
    original = tree.get(ORIGINAL, default)
    if not isinstance(most, int) or not isinstance(original, int):
        return ""
    configured = rope.get("attention_factor")
    ours = (
        float(configured) if configured else _scale(rope.get("factor") or most / original, original)
    )
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


def family_of(tree: Mapping[str, Any]) -> str:
    """Return the family of a configuration by the name that transformers has for it, "" if none."""
    kind = str(tree.get("model_type") or "")
    return DIFFERENCES["aliases"].get(kind, kind)


CONFIG = "config.json"
# Sections of a configuration by the sense that they add to text.
SENSES = {
    "images": re.compile(r"vision|visual|image|video|img_|(^|_)vq|qformer|patch"),
    "sound": re.compile(r"audio|speech|sound|acoustic|codec|talker|vocoder"),
    "other input": re.compile(r"encoder_config|projector_config|dit_config|vlm_config"),
}
NESTED = re.compile(r"(text|llm|language|thinker|decoder|model)(_config)?$")
ARCHITECTURES = "architectures"
TIED = "tie_word_embeddings"
# Ends of the names of networks with a head that predicts the next token.
CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel|LMHead|ForCausalLMV\d+)$")
BOTH = "ForConditionalGeneration"  # An encoder beside the decoder: of text, images or sound.


def check_kind(folder: Path, *, key: str = "model.path", shown: str = "") -> None:
    """Check that the checkpoint in a folder is a decoder-only network, or a composite with one.

    A composite reads images, videos or sound, too. Its language model is used alone.

    Args:
        key: configuration key that names the folder.
        shown: value of the key; "" is the folder.

    Raises: ConfigError: the checkpoint is of another kind; names it and the remedy.
    """
    tree = _read(folder)
    problem = kind_problem(tree)
    if problem:
        raise ConfigError(f"{key}={shown or folder}: {_name(tree)} {problem}")


def check_engine_equal(folder: Path, max_tokens: int, *, shown: str) -> None:
    """Check that the engine computes a network as the learner does.

    Args:
        max_tokens: value of `actor.max_model_len`.

    Raises: ConfigError: the engine (vLLM 0.32) has another activation or layer than transformers 5,
        ignores a setting, lacks a weight, or attends to one token more.
    """
    whole = _read(folder)
    tree = _language_model(whole)
    _check_settings(tree, shown)
    if problem := _other_problem(tree, max_tokens):
        raise ConfigError(f"model.path={shown}: {_name(tree)} {problem}")
    unread = DIFFERENCES["unread"].get(family_of(tree))
    if unread:
        raise ConfigError(
            f"model.path={shown}: the engine (vLLM 0.32) does not load the weights of {_name(tree)}"
            f" that the learner publishes: {unread}. Choose another model"
        )
    unequal: dict[str, str] = DIFFERENCES["unequal"]
    difference = unequal.get(family_of(whole)) or unequal.get(family_of(tree))
    if difference:
        raise ConfigError(
            f"model.path={shown}: {_name(tree)} has other log-probabilities in the engine than in"
            f" the learner: {difference}. Choose another model"
        )
    window = tree.get("sliding_window")
    if family_of(tree) not in DIFFERENCES["wider_windows"] or not isinstance(window, int):
        return
    if max_tokens > window:
        raise ConfigError(
            f"model.path={shown}: the sliding window of {_name(tree)} has {window} tokens in the"
            f" learner (transformers) and {window + 1} in the engine (vLLM), so their"
            f" log-probabilities differ beyond it. Set actor.max_model_len={window} or lower, or"
            " choose another model"
        )


def takes_no_adapter_files(folder: Path) -> bool:
    """Return whether the engine would misread the files of an adapter for this model."""
    return family_of(_language_model(_read(folder))) in DIFFERENCES["reordered"]


def _language_model(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of the language model in a composite's config.json, else all settings."""
    section: object = tree.get("text_config")
    if not isinstance(section, dict):
        return tree
    text = {**cast(dict[str, Any], section), ARCHITECTURES: tree.get(ARCHITECTURES)}
    tied = {name: tree[name] for name in (TIED,) if name in tree}
    return text | tied


def _other_problem(tree: dict[str, Any], max_tokens: int) -> str:
    """Return the setting that both libraries read differently, and the remedy; or ""."""
    family = family_of(tree)
    needed = DIFFERENCES["needed"].get(family, {})
    lacking = {name: value for name, value in needed.items() if tree.get(name) != value}
    if lacking:
        return (
            f"lacks {json.dumps(lacking)[1:-1]} in config.json, so the engine would compute another"
            " function than the learner. Add it"
        )
    is_greedy = tree.get("topk_method", "greedy") == "greedy"
    if family == "deepseek_v2" and is_greedy and (tree.get("n_group") or 1) > 1:
        return (
            f"has topk_method=greedy with n_group={tree['n_group']} in config.json. The engine"
            " chooses experts by groups, and the learner does not. Set n_group=1, or choose another"
            " model"
        )
    layers: object = tree.get("layer_types")
    if (
        family in DIFFERENCES["without_windows"]
        and isinstance(layers, list)
        and "sliding_attention" in layers
    ):
        return (
            "has layer_types with sliding_attention in config.json. The engine attends within a"
            " window there, and the learner does not. Remove layer_types, or choose another model"
        )
    return rope_problem(tree, max_tokens)


def _check_settings(tree: dict[str, Any], shown: str) -> None:
    """Raise ConfigError if a setting makes the engine compute otherwise than the learner."""
    settings = DIFFERENCES["settings"].get(family_of(tree), {})
    for key, (alike, difference) in settings.items():
        value = _value_of(tree.get(key, alike[0]))
        if value not in alike:
            raise ConfigError(
                f"model.path={shown}: {_name(tree)} with {key}={json.dumps(value)} in config.json"
                " has other log-probabilities in the engine than in the learner:"
                f" {difference}. Choose another model"
            )


def _value_of(entry: object) -> object:
    """Return an entry of config.json. Transformers 5 writes infinity as a section `__float__`."""
    if isinstance(entry, list):
        return [_value_of(each) for each in cast(list[object], entry)]
    if isinstance(entry, dict) and "__float__" in entry:
        return float(str(cast(dict[str, object], entry)["__float__"]))
    return cast(object, entry)


def kind_problem(config: dict[str, Any]) -> str:
    """Return why a configuration has no decoder-only network for text, and the remedy; or ""."""
    if config.get("is_encoder_decoder"):
        return (
            "is an encoder-decoder (is_encoder_decoder in its config.json). An episode is one"
            " sequence of tokens, and a prompt has no encoder. Use a decoder-only model, with"
            " architectures=...ForCausalLM"
        )
    names = _architectures(config)
    senses = dict(_senses(config))
    if not senses and isinstance(config.get("text_config"), dict):
        senses = {"other input": "text_config"}
    if senses and not any(name.endswith(BOTH) for name in names):
        kinds = " and ".join(senses)
        section = next(iter(senses.values()))
        return (
            f"reads {kinds} beside text ({section} in its config.json), and the language model of"
            f" such a checkpoint is loaded for architectures=...{BOTH} only. {_text_remedy(config)}"
        )
    if senses or not names or any(CAUSAL.search(name) for name in names):
        return ""
    if any(name.endswith(BOTH) for name in names):
        return (
            "has an encoder beside its decoder, and no section for it in config.json. Episodes,"
            f" requests and training batches of the product have text only. {_text_remedy(config)}"
        )
    return (
        "has no head that predicts the next token, so it cannot generate text. Use a decoder-only"
        " model, with architectures=...ForCausalLM"
    )


def is_composite(config: dict[str, Any]) -> bool:
    """Return whether a configuration has sections for more than text."""
    return bool(dict(_senses(config))) or isinstance(config.get("text_config"), dict)


def is_composite_in(folder: Path) -> bool:
    """Return whether the checkpoint in a folder reads more than text."""
    return is_composite(_read(folder))


def _text_remedy(config: dict[str, Any]) -> str:
    """Return the remedy for a checkpoint that has more than a decoder of text."""
    inner: list[dict[str, Any]] = [
        value for name, value in config.items() if NESTED.search(name) and isinstance(value, dict)
    ]
    kind = inner[0].get("model_type") if inner else None
    description = f" with model_type={kind}" if kind and kind != config.get("model_type") else ""
    return (
        f"Use the text-only checkpoint of this family{description}, with"
        " architectures=...ForCausalLM and without such sections"
    )


def _senses(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (sense, section) of a configuration and of its inner sections."""
    for name, value in config.items():
        is_section = isinstance(value, dict) and bool(cast(dict[str, Any], value))
        if NESTED.search(name) and is_section:
            yield from _senses(cast(dict[str, Any], value))
        elif is_section or (isinstance(value, str) and name.endswith("_tower")):
            for sense, pattern in SENSES.items():
                if pattern.search(name):
                    yield sense, name
                    break


def _name(config: dict[str, Any]) -> str:
    return ", ".join(_architectures(config)) or str(config.get("model_type") or "this model")


def _architectures(config: dict[str, Any]) -> list[str]:
    names: object = config.get(ARCHITECTURES)
    return [str(each) for each in cast(list[object], names)] if isinstance(names, list) else []


def _read(folder: Path) -> dict[str, Any]:
    """Return config.json, {} if it is missing or damaged, which other checks report."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], tree) if isinstance(tree, dict) else {}


QUANTISED_KEYS = ("quantization_config", "compression_config")
NARROW = ("F4", "F6", "F8")  # Beginnings of the names of dtypes in the headers of weight files.


def check_trainable(folder: Path, *, key: str = "model.path", shown: str = "") -> None:
    """Check that the weights of a checkpoint are numbers of 16 or 32 bits.

    Args:
        key: configuration key that names the folder.
        shown: value of the key; "" is the folder.

    Raises: ConfigError: the weights are quantised; names the method and the remedy.
    """
    method = _method_of(_config_in(folder)) or next(_narrow_weights(folder), "")
    if method:
        raise ConfigError(
            f"{key}={shown or folder}: the weights are quantised ({method}), and training cannot"
            " change quantised weights. Use the checkpoint of this model in bf16, without"
            f" {QUANTISED_KEYS[0]} in its {CONFIG}, or one in GGUF, MXFP4, FP8, compressed-tensors"
            " or bitsandbytes, which a command dequantises at its start"
        )


def quantisation_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the quantisation of a network, or of its part for text; or {}."""
    for section in (config, *_inner(config)):
        for name in QUANTISED_KEYS:
            content: object = section.get(name)
            if isinstance(content, dict) and content:
                return cast(dict[str, Any], content)
    return {}


def _method_of(config: Mapping[str, Any]) -> str:
    """Return the method by which a network, or its part for text, is quantised; or ""."""
    section = quantisation_of(config)
    if not section:
        return ""
    return str(section.get("quant_method") or section.get("quant_algo") or QUANTISED_KEYS[0])


def _inner(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sections of a configuration for other networks, such as the one for text."""
    for name, value in config.items():
        if name.endswith("_config") and name not in QUANTISED_KEYS and isinstance(value, dict):
            yield cast(dict[str, Any], value)


def _narrow_weights(folder: Path) -> Iterator[str]:
    """Yield the name and the dtype of weights with 8 bits or fewer."""
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in _header_of(path).items():
            dtype = str(entry.get("dtype", ""))
            if dtype.startswith(NARROW):
                yield f"{name} has the dtype {dtype}"


def _header_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a weight file, {} of a damaged one, which other checks report."""
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            tree = json.loads(file.read(size))
    except (OSError, ValueError, struct.error):
        return {}
    return {name: entry for name, entry in tree.items() if name != "__metadata__"}


def _config_in(folder: Path) -> dict[str, Any]:
    """Return config.json, {} if it is missing or damaged, which other checks report."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
