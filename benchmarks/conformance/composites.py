"""Tiny random composites of every family for images or sound that transformers and vLLM have.

Transformers writes them under the names of the published checkpoints, in several files with an
index. The default configuration of a family is shrunk, section by section.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from benchmarks.conformance.networks import (
    AMENDMENTS,
    SMALL,
    TEXTS,
    VOCAB,
    layers_of,
    perturb,
    save_network,
    sizes_of,
    stored,
)
from learner.policy.model_shape import INDEX
from tools.offline.scratch import make_tokenizer

# Classes by model type.
COMPOSITES: dict[str, Any] = {
    **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
TWICE = ("language_model.model.model.", "language_model.model.")
FILE_SIZE = "300KB"  # Several files for each network.
# Families whose default configuration has no small form by this routine, with the reason.
UNSHRUNK = {
    "cohere_compass": "its layers need a table of rotary embeddings that the defaults lack",
    "diffusion_gemma": "its network is no decoder of the next token",
    "ernie4_5_vl_moe": "its rotary embedding has sections for large heads only",
    "gemma3n": "its tower needs the package timm",
    "glm5_next": "it demands layers without rotary positions",
    "granite4_vision": "its default language model is of another family",
    "nemotron_h_omni": "its default towers are of another family",
    "shieldgemma2": "its published class is a classifier",
    "step3p7": "its default windows are incomplete",
}
# Sizes of the towers by the names that configurations use.
TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "projector_input_dim"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "projector_output_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    # The width of the language model.
    **dict.fromkeys(("out_hidden_size", "vision_output_dim", "output_dim"), 128),
    **dict.fromkeys(("head_dim", "global_head_dim", "vocab_size"), 32),
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [1],
    "num_key_value_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "max_position_embeddings": 64,
    "num_position_embeddings": 16,
}
# Tokens that stand for other input, or begin and end it, have the last ids of the vocabulary.
TOKENS = tuple(
    f"{name}{end}_token_{kind}"
    for name in ("image", "video", "audio", "vision", "boi", "eoi", "boa", "eoa")
    for end in ("", "_start", "_end")
    for kind in ("id", "index")
)


def composites() -> list[str]:
    """Return the model types of the composites that both libraries have, sorted by name.

    Those of `UNSHRUNK` are left out, and those whose language model is a part of a section.
    """
    from vllm.model_executor.models import registry

    known = registry._MULTIMODAL_MODELS
    return sorted(
        family
        for family in COMPOSITES
        if composite_architecture(family) in known
        and family not in UNSHRUNK
        and "text_config" in CONFIG_MAPPING[family].sub_configs
    )


def composite_architecture(family: str) -> str:
    """Return the class of a composite family; "" for another family."""
    found = COMPOSITES.get(family, "")
    return found if isinstance(found, str) else found[0]


def composite_config(family: str, settings: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Return the configuration of a family's small network.

    Args:
        settings: further settings of the whole, such as `tie_word_embeddings`.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    text = default.get_text_config(decoder=True)
    sections: dict[str, PretrainedConfig] = {}
    for name, declared in kind.sub_configs.items():
        section = getattr(default, name, None)
        if section is None and hasattr(declared, "model_type") and declared.model_type:
            section = declared()  # Gemma 4 has no towers by default.
        if section is not None:
            sections[name] = _small(section, is_text=section is text)
    ids = [name for name in TOKENS if getattr(default, name, None) is not None]
    tokens = {name: VOCAB - 1 - place for place, name in enumerate(ids)}
    entries: dict[str, Any] = {**sections, **tokens, **AMENDMENTS.get(family, {})}
    made = kind(**(entries | dict(settings or {})))
    made.architectures = [composite_architecture(family)]
    return made


def _small(section: PretrainedConfig, *, is_text: bool) -> PretrainedConfig:
    """Return a small section of the kind of a default one."""
    kind = type(section)
    amended = AMENDMENTS.get(section.model_type, {})
    if not is_text:
        return kind(**(sizes_of(section, TOWER) | amended))
    layers = layers_of(vars(section), kind.attribute_map)
    return kind(**(layers | sizes_of(section, SMALL) | amended))


def save_family(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a small network of a family, a composite or a decoder of text."""
    write = save_composite if composite_architecture(family) else save_network
    return write(family, folder, seed=seed)


def save_composite(
    family: str, folder: Path, *, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a small composite with a tokenizer, as transformers writes it: in several files."""
    torch.manual_seed(seed)
    config = composite_config(family, settings)
    kind: Any = getattr(transformers, composite_architecture(family))
    model = kind._from_config(config, dtype=torch.float32)
    perturb(stored(model), seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=FILE_SIZE)
    _rename_once(folder)
    make_tokenizer(list(TEXTS), vocab_size=VOCAB).save_pretrained(folder)
    return folder


def _rename_once(folder: Path) -> None:
    """Give weights their published names where transformers (5.19) has applied a conversion twice.

    That of models for sound adds `model.` to the language model and to the whole.
    """
    for path in folder.glob("*.safetensors"):
        tensors = {name.replace(*TWICE): each for name, each in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    index = folder / INDEX
    if index.is_file():
        index.write_text(index.read_text(encoding="utf-8").replace(*TWICE), encoding="utf-8")
