"""Refusal of checkpoints that are no decoder of text: images, sound, encoders, other heads.

The check reads `config.json` only, so it runs before any library is imported.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError
from learner.policy.engine_rope import DIFFERENCES, rope_problem

CONFIG = "config.json"
# Sections of a configuration by the sense that they add to text.
SENSES = {
    "images": re.compile(r"vision|visual|image|video|img_|(^|_)vq|qformer|patch"),
    "sound": re.compile(r"audio|speech|sound|acoustic|codec|talker|vocoder"),
    "other input": re.compile(r"encoder_config|projector_config|dit_config|vlm_config"),
}
NESTED = re.compile(r"(text|llm|language|thinker|decoder|model)(_config)?$")
# Ends of the names of networks with a head that predicts the next token.
CAUSAL = re.compile(r"(ForCausalLM|LMHeadModel|LMHead|ForCausalLMV\d+)$")
BOTH = "ForConditionalGeneration"  # An encoder beside the decoder: of text, images or sound.


def check_kind(folder: Path, *, key: str = "model.path", shown: str = "") -> None:
    """Check that the checkpoint in a folder is a decoder-only network for text.

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
        ignores a setting, or attends to one token more.
    """
    tree = _read(folder)
    _check_settings(tree, shown)
    if problem := _other_problem(tree, max_tokens):
        raise ConfigError(f"model.path={shown}: {_name(tree)} {problem}")
    difference = DIFFERENCES["unequal"].get(str(tree.get("model_type")))
    if difference:
        raise ConfigError(
            f"model.path={shown}: {_name(tree)} has other log-probabilities in the engine than in"
            f" the learner: {difference}. Choose another model"
        )
    window = tree.get("sliding_window")
    if tree.get("model_type") not in DIFFERENCES["wider_windows"] or not isinstance(window, int):
        return
    if max_tokens > window:
        raise ConfigError(
            f"model.path={shown}: the sliding window of {_name(tree)} has {window} tokens in the"
            f" learner (transformers) and {window + 1} in the engine (vLLM), so their"
            f" log-probabilities differ beyond it. Set actor.max_model_len={window} or lower, or"
            " choose another model"
        )


def _other_problem(tree: dict[str, Any], max_tokens: int) -> str:
    """Return the setting that both libraries read differently, and the remedy; or ""."""
    family = str(tree.get("model_type"))
    needed = DIFFERENCES["needed"].get(family, {})
    lacking = {name: value for name, value in needed.items() if tree.get(name) != value}
    if lacking:
        return (
            f"lacks {json.dumps(lacking)[1:-1]} in config.json, so the engine would choose experts"
            " in another way than the learner. Add it"
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
    settings = DIFFERENCES["settings"].get(str(tree.get("model_type")), {})
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
    """Return why a configuration is no decoder-only network for text, and the remedy; or ""."""
    senses = dict(_senses(config))
    if not senses and isinstance(config.get("text_config"), dict):
        senses = {"other input": "text_config"}
    if senses:
        kinds = " and ".join(senses)
        section = next(iter(senses.values()))
        return (
            f"reads {kinds} beside text ({section} in its config.json). The product has no {kinds}"
            " in its episodes, in its requests to the engine and in its training batches, so this"
            f" network could not be sampled and trained alike. {_text_remedy(config)}"
        )
    if config.get("is_encoder_decoder"):
        return (
            "is an encoder-decoder (is_encoder_decoder in its config.json). An episode is one"
            " sequence of tokens, and a prompt has no encoder. Use a decoder-only model, with"
            " architectures=...ForCausalLM"
        )
    names = _architectures(config)
    if not names or any(CAUSAL.search(name) for name in names):
        return ""
    if any(name.endswith(BOTH) for name in names):
        return (
            "has an encoder for other input beside its decoder. Episodes, requests and training"
            f" batches of the product have text only. {_text_remedy(config)}"
        )
    return (
        "has no head that predicts the next token, so it cannot generate text. Use a decoder-only"
        " model, with architectures=...ForCausalLM"
    )


def _text_remedy(config: dict[str, Any]) -> str:
    """Return the remedy for a checkpoint that has more than a decoder of text."""
    inner: list[dict[str, Any]] = [
        value for name, value in config.items() if NESTED.search(name) and isinstance(value, dict)
    ]
    kind = inner[0].get("model_type") if inner else None
    own = f" with model_type={kind}" if kind and kind != config.get("model_type") else ""
    return (
        f"Use the text-only checkpoint of this family{own}, with architectures=...ForCausalLM and"
        " without such sections; a checkpoint for images is not read as text only"
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
    found: object = config.get("architectures")
    return [str(each) for each in cast(list[object], found)] if isinstance(found, list) else []


def _read(folder: Path) -> dict[str, Any]:
    """Return config.json, {} if it is missing or damaged, which other checks report."""
    try:
        tree: object = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], tree) if isinstance(tree, dict) else {}
