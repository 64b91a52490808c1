"""Tiny random networks of every family that transformers and vLLM have.

Decoders: one routine shrinks the default configuration of a family. `families.yaml` holds the few
settings that a family needs beside it. Composites for images or sound: the configuration is shrunk
section by section. Transformers writes them under the names of the published checkpoints, in
several files with an index.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # pyright: ignore[reportPrivateImportUsage]
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from learner.policy.model_shape import INDEX
from tools.offline.scratch import make_tokenizer, save_policy

AMENDMENTS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("families.yaml").read_text(encoding="utf-8")
)
OTHER_SENSES = {"vision_config", "audio_config"}  # Sections of networks for images or sound.
VOCAB = 320
TEXTS = ("go to the red ball", "pick up the grey key")
MIN_LAYERS = 2
MOST_KINDS = 4  # Kinds of layers in one network.
WEIGHT_STD = 0.08  # About 1 / sqrt(hidden): activations keep their size from layer to layer.
NOISE_STD = 0.1  # Change of vectors such as norms, biases and decay rates.

# Sizes by the names that configurations use. Attention heads have 32 numbers: vLLM has no smaller
# attention kernel on a CPU.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "sliding_window": 16,
    "attention_chunk_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4
)
EXPERTS |= dict.fromkeys(
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk"), 2
)
EXPERTS |= dict.fromkeys(
    (
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_ffn_hidden_size",
    ),
    64,
)
EXPERTS |= dict.fromkeys(
    (
        "n_group",
        "num_expert_group",
        "topk_group",
        "n_shared_experts",
        "num_shared_experts",
        "first_k_dense_replace",
        "num_dense_layers",
    ),
    1,
)
# Multi-head latent attention. vLLM's kernels for CPUs have one size: a rank of 512, and 64 rotated
# numbers in a head.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 96,
    "v_head_dim": 32,
}
RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,  # vLLM has no smaller kernel on a CPU.
    "linear_value_head_dim": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
SMALL = SIZES | EXPERTS | LATENT | RECURRENT


def use_own_configs() -> None:
    """Let transformers read config.json with its own classes, as in a learner's process.

    The import of vLLM puts classes of vLLM in their place, such as that of DeepSeek V4.
    """
    registered: dict[str, Any] = CONFIG_MAPPING._extra_content
    for name in registered.keys() & CONFIG_MAPPING_NAMES.keys():
        del registered[name]


def families() -> list[str]:
    """Return the model types that both libraries have, sorted by name."""
    from vllm.model_executor.models import registry

    supported = {*registry._TEXT_GENERATION_MODELS, *registry._TRANSFORMERS_SUPPORTED_MODELS}
    return sorted(
        family
        for family, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if supported.intersection([classes] if isinstance(classes, str) else classes)
        and not CONFIG_MAPPING[family].sub_configs.keys() & OTHER_SENSES
    )


def tiny_config(family: str, settings: Mapping[str, Any] | None = None) -> PretrainedConfig:
    """Return the configuration of a family's small network, with other settings if there are some.

    The layers are the first ones of the default configuration, as many as have each kind of layer.
    """
    kind = CONFIG_MAPPING[family]
    default = kind()
    layers = layers_of(vars(default), kind.attribute_map)
    made = kind(
        **(layers | sizes_of(default, SMALL) | AMENDMENTS.get(family, {}) | dict(settings or {}))
    )
    made.architectures = [architecture(family)]
    return made


def sizes_of(default: PretrainedConfig, small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the small sizes that a configuration has by name."""
    values = vars(default)
    names = type(default).attribute_map
    sizes = {
        name: value
        for name, value in small.items()
        if names.get(name, name) in values and values[names.get(name, name)] is not None
    }
    if "kv_lora_rank" in sizes:  # Latent attention has one key head for each query head.
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        if "head_dim" in sizes:  # The family rotates a part of each head.
            sizes["head_dim"] = sizes["qk_rope_head_dim"]
    return sizes


def layers_of(default: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Return the number of layers and the lists with one entry for each layer."""
    key = names.get("num_hidden_layers", "num_hidden_layers")
    total = default.get(key)
    lists = {
        name: value
        for name, value in default.items()
        if isinstance(value, list) and len(value) == total
    }
    num = MIN_LAYERS
    for value in lists.values():
        entries = cast(list[Any], value)
        kinds = {str(each): index for index, each in reversed([*enumerate(entries)])}
        if len(kinds) <= MOST_KINDS:  # Otherwise the entries are numbers of layers.
            num = max(num, *(index + 1 for index in kinds.values()))
    return {"num_hidden_layers": num} | {name: value[:num] for name, value in lists.items()}


def architecture(family: str) -> str:
    """Return the class of a family's causal language model."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return names if isinstance(names, str) else names[0]


def save_network(
    family: str, folder: Path, *, seed: int = 0, settings: Mapping[str, Any] | None = None
) -> Path:
    """Write a small random network of a family with a tokenizer, as transformers writes it."""
    torch.manual_seed(seed)
    config = tiny_config(family, settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(stored(model), seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(list(TEXTS), vocab_size=VOCAB).save_pretrained(folder)
    return folder


def save_as_learner(model: PreTrainedModel, folder: Path, *, start: str) -> Path:
    """Write a policy with the learner's own code, and the tokenizer of the folder `start`."""
    return save_policy(folder, model, AutoTokenizer.from_pretrained(start, local_files_only=True))


@torch.no_grad()
def perturb(weights: Iterable[Tensor], *, seed: int) -> None:
    """Draw new matrices, and change vectors a little. Random numbers are large enough to matter.

    Weights without a gradient, such as the correction of a router, are only shifted.
    """
    generator = torch.Generator().manual_seed(seed)
    for weight in weights:
        if weight.ndim > 1 and weight.requires_grad:
            weight.normal_(0.0, WEIGHT_STD, generator=generator)
        else:
            weight += NOISE_STD * torch.randn(weight.shape, generator=generator)


def stored(model: nn.Module) -> Iterator[Tensor]:
    """Yield the numbers that a checkpoint has: weights and stored buffers, tied ones once.

    Buffers with one number are constants of an activation, such as those of Apertus.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {
        id(each): each
        for each in state.values()
        if each.is_floating_point() and (each.requires_grad or each.ndim)
    }
    yield from tensors.values()


def trained(model: nn.Module) -> Iterator[Tensor]:
    """Yield the weights that training changes."""
    return (each for each in model.parameters() if each.requires_grad)


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

    supported = registry._MULTIMODAL_MODELS
    return sorted(
        family
        for family in COMPOSITES
        if composite_architecture(family) in supported
        and family not in UNSHRUNK
        and "text_config" in CONFIG_MAPPING[family].sub_configs
    )


def composite_architecture(family: str) -> str:
    """Return the class of a composite family; "" for another family."""
    names = COMPOSITES.get(family, "")
    return names if isinstance(names, str) else names[0]


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
