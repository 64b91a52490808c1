"""The sizes of a checkpoint, read without loading its weights."""

import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from common.errors import ConfigError
from common.text import counted
from learner.policy.model_kind import is_composite

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # Head sizes of vLLM 0.32.
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
# Keys of a configuration with the number of experts in a layer.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_KEYS = ("dtype", "torch_dtype")
# Beginnings of the names of a composite's weights that belong to its language model.
LANGUAGE = re.compile(
    r"(model\.)?(language_model|text_model|llm|lm_head|layers|embed_tokens|norm)\."
)
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


# Families that torch's fused attention cannot serve; a cap of the scores is a further reason.
NOT_FUSED = (
    "bloom",
    "deepseek_v4",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "mimo_v2_flash",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a checkpoint that determine its memory."""

    num_params: int  # Weights of the language model.
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # Units of the feed-forward layers that one token passes through.
    vocab: int
    context_tokens: int  # Supported positions; 0: unspecified or scaled.
    dtype: str
    experts: int = 0  # Experts of a layer; 0: the feed-forward layers have none.
    expert_units: int = 0  # Units of one expert.
    cached: int = 0  # Numbers of one token in the caches of all layers; 0: keys and values in each.
    # Weights in the files that neither learner nor engine loads, such as towers for images.
    num_unused: int = 0
    # The learner stores the attention scores of all pairs of tokens on a GPU, too.
    stores_scores: bool = False
    is_tied: bool = False  # The head is the table of the embedding.
    has_head_norms: bool = False  # Queries and keys have norms.

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of one token in the key-value cache of all layers."""
        plain = 2 * self.layers * self.kv_heads * self.head_dim
        return (self.cached or plain) * BYTES_OF[dtype]


def check_heads(shape: ModelShape, path: str) -> None:
    """Check that vLLM on a CPU supports the model's heads; vLLM itself would report no reason.

    Raises: ConfigError: the heads are too small.
    """
    if shape.head_dim < CPU_HEADS[0]:
        raise ConfigError(
            f"model.path={path}: its attention heads have size {shape.head_dim}, and the engine"
            f" (vLLM on a CPU) supports {', '.join(map(str, CPU_HEADS))}. Use a GPU, or a policy"
            f" with fewer heads, such as sft.num_heads={max(1, shape.hidden // CPU_HEADS[0])} with"
            f" sft.hidden_size={shape.hidden}"
        )


def read_shape(folder: Path) -> ModelShape:
    """Return the shape of the checkpoint in `folder`, from config.json and the weights' headers.

    Without weight files, the number of parameters is calculated from config.json.

    Raises: ConfigError: config.json is not JSON, or lacks the sizes of a transformer.
    """
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        is_mixed = is_composite(tree)
        text = _language_model(folder, tree) if is_mixed else _with_defaults(tree)
        heads = int(text["num_attention_heads"])
        hidden = int(text["hidden_size"])
        is_tied = text.get("tie_word_embeddings", True)
        chosen = int(text.get("num_experts_per_tok") or 1)
        experts = _num_experts(text)
        width = int(
            text.get("moe_intermediate_size") or text.get("intermediate_size") or 4 * hidden
        )
        counted, num_unused = _count_params(folder, is_tied=bool(is_tied), is_mixed=is_mixed)
        return ModelShape(
            num_params=counted or _params_of_config(text, is_tied=bool(is_tied)),
            hidden=hidden,
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            intermediate=int(width) * chosen,
            num_unused=num_unused,
            experts=experts,
            expert_units=int(width) if experts else 0,
            cached=_cached_numbers(text),
            vocab=int(text["vocab_size"]),
            stores_scores=bool(text.get("attn_logit_softcapping"))
            or text.get("model_type") in NOT_FUSED,
            is_tied=bool(is_tied),
            has_head_norms=_has_head_norms(text),
            context_tokens=0
            if _is_stretched(text)
            else int(text.get("max_position_embeddings") or 0),
            dtype=str(
                next((tree[n] for n in DTYPE_KEYS if tree.get(n)), text.get("dtype") or "bfloat16")
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        message = f"model.path={folder}: its config.json describes no transformer ({error!r})"
        raise ConfigError(message) from error


def _with_defaults(text: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the defaults of its class for the sizes that it lacks.

    Published files leave out values that are the defaults of transformers, as those of Gemma 3 do.
    """
    if all(name in text for name in SIZES) or "model_type" not in text:
        return text
    from transformers import CONFIG_MAPPING  # Seconds; most files have all sizes.

    if text["model_type"] not in CONFIG_MAPPING:
        return text
    return {**CONFIG_MAPPING[text["model_type"]]().to_dict(), **text}


def _cached_numbers(text: dict[str, Any]) -> int:
    """Return the numbers of one token in the caches of all layers; 0: keys and values in each.

    Latent attention stores its latent vector and the rotated part of the key. Layers with a state
    of fixed size store nothing for a token.
    """
    layers = int(text["num_hidden_layers"])
    kinds: object = text.get("layer_types") or text.get("layers_block_type")
    interval = text.get("full_attention_interval")
    pattern = text.get("hybrid_override_pattern")
    if isinstance(kinds, list):
        names = [str(each) for each in cast(list[object], kinds)]
        attending = sum("attention" in each and "linear" not in each for each in names)
        attending = attending or layers
    elif isinstance(pattern, str):
        attending = pattern.count("*")
    else:
        attending = layers // int(interval) if interval else layers
    if text.get("kv_lora_rank"):
        return attending * (int(text["kv_lora_rank"]) + int(text.get("qk_rope_head_dim") or 0))
    if attending == layers:
        return 0
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
    return 2 * attending * int(text.get("num_key_value_heads") or heads) * head_dim


def _language_model(folder: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a composite's language model, with the defaults of its family.

    A family that transformers lacks has those of config.json; other checks refuse it.
    """
    from transformers import AutoConfig  # Imported here, because the import takes seconds.

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError, TypeError):
        return _with_defaults(cast(dict[str, Any], tree.get("text_config") or tree))
    text = config.get_text_config(decoder=True).to_dict()
    tied = getattr(config, "tie_word_embeddings", None)
    return text if tied is None else {**text, "tie_word_embeddings": tied}


def _is_stretched(text: dict[str, Any]) -> bool:
    """Return whether rotary positions are scaled, as in YaRN."""
    rope: object = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        return True
    settings = cast(dict[str, object], rope)
    return any(settings.get(name) not in (None, "default") for name in ("rope_type", "type"))


def _params_of_config(text: dict[str, Any], *, is_tied: bool) -> int:
    """Return a decoder's number of weights: embedding, head, attention, gated units."""
    hidden = int(text["hidden_size"])
    heads = int(text["num_attention_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    queries = heads * head_dim
    keys = int(text.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * (queries + keys)
    if text.get("attention_bias", text.get("model_type") == "qwen2"):
        attention += queries + 2 * keys
    if _has_head_norms(text):
        attention += 2 * head_dim  # The norms of queries and keys.
    layers = int(text["num_hidden_layers"])
    units = _units_of_config(text, hidden, layers)
    tables = int(text["vocab_size"]) * hidden * (1 if is_tied else 2)
    return tables + layers * (attention + 2 * hidden) + units + hidden


def _has_head_norms(text: dict[str, Any]) -> bool:
    return str(text.get("model_type", "")).startswith(("qwen3", "gemma3"))


def _units_of_config(text: dict[str, Any], hidden: int, layers: int) -> int:
    """Return the number of weights of all feed-forward layers, with experts and routers."""
    # The size is absent if all layers have experts.
    dense = 3 * hidden * int(text.get("intermediate_size") or 0)
    experts = _num_experts(text)
    if not experts:
        return layers * dense
    width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    shared = int(text.get("shared_expert_intermediate_size") or 0)
    shared += width * int(text.get("n_shared_experts") or 0)
    routed = 3 * hidden * (width * experts + shared) + experts * hidden  # The last term: router.
    num_dense = min(layers, int(text.get("first_k_dense_replace") or 0))
    return num_dense * dense + (layers - num_dense) * routed


def _num_experts(text: dict[str, Any]) -> int:
    return next((int(text[name]) for name in NUM_EXPERTS if text.get(name)), 0)


def _count_params(folder: Path, *, is_tied: bool, is_mixed: bool) -> tuple[int, int]:
    """Return the numbers of weights in the safetensors files that are used, and that are not.

    A tied head counts once. Both are 0 without files.

    Args:
        is_mixed: only the language model of a composite is used.
    """
    used = unused = 0
    for path in weight_files(folder):
        for name, entry in weight_entries(path)[1].items():
            if is_tied and name.endswith("lm_head.weight"):
                continue
            num = math.prod(entry["shape"])
            if is_mixed and not LANGUAGE.match(name):
                unused += num
            else:
                used += num
    return used, unused


def weight_entries(path: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the data in a safetensors file, and its header by names of tensors."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > path.stat().st_size:
            raise ValueError(f"{path.name}: the header is longer than the file")
        header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def weight_files(folder: Path, names: Iterable[str] | None = None) -> list[Path]:
    """Return the files that transformers and vLLM load of a checkpoint, in their order.

    A folder may have others beside them, such as the same weights in another format.

    Args:
        names: names of the files in the folder; None: as they are on this machine.
    """
    if names is None:
        names = [each.name for each in folder.glob("*.safetensors")]
    present = sorted(name for name in names if name.endswith(".safetensors"))
    listed = {WHOLE} if WHOLE in present else _indexed(folder)
    return [folder / name for name in present if not listed or name in listed]


def _indexed(folder: Path) -> set[str]:
    """Return the names of the files in the index of a checkpoint; empty without an index.

    Raises: ValueError: the index has no list of files.
    """
    index = folder / INDEX
    if not index.is_file():
        return set()
    tree: object = json.loads(index.read_text(encoding="utf-8"))
    entries = cast(dict[str, object], tree) if isinstance(tree, dict) else {}
    files = entries.get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{INDEX} has no list of files (weight_map)")
    return {str(name) for name in cast(dict[str, object], files).values()}


def check_weights(folder: Path, *, key: str, shown: str) -> None:
    """Check that the files of weights are complete, and that all libraries read the same ones.

    A copy or a download may have been cut off, and a folder may have files of two checkpoints.

    Raises: ConfigError: a file is missing, shorter than its header states, or ambiguous.
    """
    try:
        problem = _choice_problem(folder)
    except ValueError as error:
        problem = f"{error}; copy or download this file again"
    if problem:
        raise ConfigError(f"{key}={shown}: {problem}")
    for path in weight_files(folder):
        try:
            # The last tensor ends with the file.
            start, header = weight_entries(path)
            stored = [each for each in header.values() if "data_offsets" in each]
            ends = [int(each["data_offsets"][1]) for each in stored]
            missing = start + max(ends, default=0) - path.stat().st_size
            problem = f"lacks its last {counted(missing, 'byte', form=',')}" if missing > 0 else ""
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            problem = "has no header of safetensors"
        if problem:
            law = f"{path.name} {problem}; copy or download it again"
            raise ConfigError(f"{key}={shown}: {law}")


def _choice_problem(folder: Path) -> str:
    """Return why the libraries would read other files than each other, and the remedy; or "".

    Transformers prefers model.safetensors, and vLLM prefers the index. Without an index vLLM reads
    all files.
    """
    present = {each.name for each in folder.glob("*.safetensors")}
    listed = _indexed(folder)
    if WHOLE in present and listed and listed != {WHOLE}:
        return (
            f"the learner would read {WHOLE}, and the engine the files of {INDEX}. Remove the"
            " weights that are not those of this model"
        )
    missing = sorted(listed - present)
    if missing:
        return (
            f"lacks {missing[0]}, which {INDEX} names (missing files: {len(missing)} of"
            f" {len(listed)}). Copy or download it again"
        )
    others = sorted(present - {WHOLE})
    if not listed and WHOLE in present and others:
        return (
            f"the engine would read {others[0]} beside {WHOLE}, and the learner {WHOLE} only. Move"
            f" {others[0]} to another folder"
        )
    if not listed and WHOLE not in present:
        return (
            f"lacks {WHOLE}, or {INDEX} with the names of {', '.join(others[:2])}. Copy or"
            " download it again"
        )
    return ""
