"""Writes checkpoints that transformers 4.57 and 5, vLLM and this project read alike.

The files of the tokenizer and `generation_config.json` are copied as they came with the model.
"""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from common.errors import LongstrideError
from common.formats.chat_template import template_of
from learner.policy.composite import source_of
from learner.policy.expert_weights import plan_reads
from learner.policy.model_shape import INDEX, weight_entries, weight_files

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
# Settings of a composite: of its processors for images or sound, too.
COMPOSITE_FILES = "*config.json"
STYLE = "prompt_style"  # Key of a configuration that the learner sets.
ADAPTER_CONFIG = "adapter_config.json"
# Keys of tokenizer_config.json that transformers 4 cannot read, or that describe one load.
UNREADABLE = ("backend", "is_local", "local_files_only")


def save_model(folder: Path, model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Write the weights and `config.json`, with RoPE in both notations of transformers.

    The checkpoint of a composite has the files of its source, with other weights of the language
    model. All other weights are those of the source, bit for bit.
    """
    source = source_of(model)
    if source is not None:
        _save_composite(folder, source, model, state)
        return
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


def _save_composite(
    folder: Path, source: Path, model: PreTrainedModel, state: Mapping[str, Tensor]
) -> None:
    """Write the files of `source` with the weights in `state`; one file is in memory at a time."""
    files = {path: list(weight_entries(path)[1]) for path in weight_files(source)}
    names = {name for each in files.values() for name in each}
    trained = _named_as(names, model, state, source)
    total_bytes = 0
    for path, stored in files.items():
        with safe_open(path, "pt") as reader:
            tensors = {
                name: trained[name] if name in trained else reader.get_tensor(name)
                for name in stored
            }
            metadata = reader.metadata() or {"format": "pt"}
        total_bytes += sum(each.nbytes for each in tensors.values())
        save_file(tensors, folder / path.name, metadata=metadata)
    index = source / INDEX
    if index.is_file():
        tree = json.loads(index.read_text(encoding="utf-8"))
        tree["metadata"] = {**(tree.get("metadata") or {}), "total_size": total_bytes}
        (folder / INDEX).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
    for path in source.glob(COMPOSITE_FILES):
        if path.name != ADAPTER_CONFIG:
            shutil.copy(path, folder / path.name)
    style = getattr(model.config, STYLE, None)
    if style is not None:
        _rewrite(folder / CONFIG, lambda config: {**config, STYLE: style})


def _named_as(
    names: Collection[str], model: PreTrainedModel, state: Mapping[str, Tensor], source: Path
) -> dict[str, Tensor]:
    """Return the weights of a language model under their names in the files of its composite.

    Raises: LongstrideError: the files lack one of the names.
    """
    plan_reads(model, names, dict(state))  # Finds the conversions between both names.
    whole = {name: each.detach().cpu().contiguous() for name, each in state.items()}
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for name, origin in tied.items():  # The files may have both names of a tied weight.
        if origin in whole:
            whole[name] = whole[origin].clone()
    stored = revert_weight_conversion(model, whole)
    once = revert_weight_conversion(
        model, {name: each for name, each in whole.items() if name not in tied}
    )
    lacking = sorted(once.keys() - set(names))
    if lacking:
        raise LongstrideError(
            f"{source}: its files have no tensor {lacking[0]}, so the checkpoint of this run cannot"
            " be written. Restore the files with which the run began"
        )
    return {name: each.contiguous() for name, each in stored.items() if name in names}


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
