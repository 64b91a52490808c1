"""Writes checkpoints that transformers 4.57 and 5, vLLM and this project read alike.

The files of the tokenizer and `generation_config.json` are copied as they came with the model.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from common.formats.chat_template import template_of

_ROPE = "rope_parameters"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TOKENIZER_CONFIG = "tokenizer_config.json"
# Files of a tokenizer of any family, and of the generation settings.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    GENERATION_CONFIG,
)
# Keys of tokenizer_config.json that transformers 4 cannot read, or that describe one load.
UNREADABLE = ("backend", "is_local", "local_files_only")


def save_model(folder: Path, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Write the weights and `config.json`, with RoPE in both notations of transformers."""
    generation = getattr(model, "generation_config", None)  # None: the model cannot generate text.
    # Its file is copied from the model's folder, since some published ones cannot be saved again.
    if generation is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, state_dict=dict(state))
    finally:
        if generation is not None:
            model.generation_config = generation
    _add_rope_of_4(folder, model)


def _add_rope_of_4(folder: Path, model: PreTrainedModel) -> None:
    """Add the keys of transformers 4, unless transformers 5 would then read another RoPE."""
    path = folder / CONFIG
    if not path.is_file():
        return
    written = path.read_text(encoding="utf-8")
    _rewrite(path, lambda config: {**config, **rope_of_4(config)})
    original = model.config
    try:
        again = type(original).from_pretrained(folder, local_files_only=True)
        is_same = getattr(again, _ROPE, None) == getattr(original, _ROPE, None)
    except (KeyError, ValueError, TypeError, StrictDataclassError):
        is_same = False
    if not is_same:
        path.write_text(written, encoding="utf-8")


def save_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer: the files of the folder that it came from, or new ones."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    if name and Path(name).is_dir():
        files = {path for each in TOKENIZER_FILES for path in Path(name).glob(each)}
        for path in sorted(files):
            shutil.copy(path, folder / path.name)
    else:
        tokenizer.save_pretrained(folder)
        _rewrite(folder / TOKENIZER_CONFIG, readable_by_4)
    template = template_of(tokenizer)
    if template and template != tokenizer.chat_template:  # That of `model.chat_template`.
        (folder / TEMPLATE).write_text(template, encoding="utf-8")


def rope_of_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for `rope_parameters`, {} without any.

    Example: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6} -> rope_theta 1e6 and
    rope_scaling {"rope_type": "linear", "factor": 8.0}.
    """
    rope = config.get(_ROPE)
    if not isinstance(rope, dict):
        return {}
    parameters = cast(dict[str, Any], rope)
    if "rope_theta" in parameters:
        rest = {key: value for key, value in parameters.items() if key != "rope_theta"}
        is_scaled = rest.get("rope_type", "default") != "default"
        scaling = {"rope_scaling": rest} if is_scaled else {}
        return {"rope_theta": parameters["rope_theta"], **scaling}
    local = parameters.get("sliding_attention")
    whole = parameters.get("full_attention")
    if not isinstance(local, dict) or not isinstance(whole, dict):
        return {}
    keys = rope_of_4({"rope_parameters": whole})
    return {**keys, "rope_local_base_freq": cast(dict[str, Any], local).get("rope_theta")}


def readable_by_4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `tokenizer_config.json` with names that transformers 4 and 5 know."""
    readable = {key: value for key, value in config.items() if key not in UNREADABLE}
    if readable.get("tokenizer_class") == "TokenizersBackend":
        readable["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(readable.get("extra_special_tokens"), list):
        readable["additional_special_tokens"] = readable.pop("extra_special_tokens")
    return readable


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a JSON file that the save has written, if there is one."""
    if path.is_file():
        tree = change(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
