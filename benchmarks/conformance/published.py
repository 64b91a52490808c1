"""Published models by name: their config.json, and a small network with the same settings.

`published.yaml` has the values. The small network keeps every option and the ratios of heads, of
units and of experts; widths, windows and positions shrink.
"""

import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.conformance.networks import (
    LATENT,
    TEXTS,
    VOCAB,
    architecture,
    layers_of,
    perturb,
    stored,
)
from common.config.load import load_config
from common.errors import ConfigError
from common.host.machine import GIB
from learner.policy.model_kind import (
    QUANTISED_KEYS,
    check_engine_equal,
    check_kind,
    check_trainable,
    family_of,
)
from learner.policy.model_shape import ModelShape, read_shape
from tools.checks.memory_plan import engine_weights, learner_parts
from tools.dequantise.checkpoints import find_quantised
from tools.offline.scratch import make_tokenizer

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("published.yaml").read_text(encoding="utf-8")
)
RUNS = re.compile(r"\d+ \w+(,\s*\d+ \w+)*")  # Run lengths of a list with an entry for each layer.
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
HEAD = 32  # vLLM has no smaller attention heads on a CPU.
WINDOW = 16
CHUNK = 32
POSITIONS = 256
ORIGINAL = 64  # Positions before the scaling of a rotary embedding.
# The long factors must count for the shortest test sequence, and the scale of queries for none.
LONG_ORIGINAL, SCALED_ORIGINAL = 16, 128
EXPERTS, CHOSEN, UNITS = 8, 4, 64
LATENT_WIDTH = 128
GRAIN = 32  # Widths are multiples of it.
# Settings of the memory plan of the first table.
PLANNED = (
    "model.path=unset",
    "model.dtype=bfloat16",
    "learner.device=cuda",
    "learner.precision=bf16",
    "learner.optimizer=adamw",
    "learner.activations=recompute",
    "learner.max_tokens_per_microbatch=8192",
    "actor.max_model_len=8192",
)
ADAPTERS = "learner.lora.rank=16"
MAX_TOKENS = 8192
GPU_BYTES = 80 * GIB
USABLE = 0.95  # Part of a GPU's memory that a plan may fill.
GPUS_PER_NODE = 8
MOST_GPUS = 2048
PLANS = ("all weights", "LoRA", "engine")
DROPPED = ("quantization_config", "torch_dtype", "dtype")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NUM_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_k",
    "moe_topk",
)
# Units of experts; the first one that a family has is the unit of the others.
EXPERT_UNITS = (
    "moe_intermediate_size",
    "expert_hidden_dim",
    "expert_ffn_hidden_size",
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """One entry of the table."""

    name: str
    source: str
    config: dict[str, Any]  # Content of config.json, with whole lists.
    default: tuple[str, ...]  # Keys whose published value was not found.
    toy: dict[str, Any]
    is_pretrained: bool  # The weights were trained with this product.

    @property
    def text(self) -> dict[str, Any]:
        """The configuration of the language model alone."""
        inner = self.config.get("text_config")
        if not isinstance(inner, dict):
            return self.config
        shared = {
            name: self.config[name] for name in ("tie_word_embeddings",) if name in self.config
        }
        return {**shared, **inner}

    @property
    def family(self) -> str:
        """The family of the language model, as `docs/MODELS.md` names it."""
        return family_of(self.text)


def published_models() -> dict[str, PublishedModel]:
    """Return the models of the table by name."""
    return {
        name: PublishedModel(
            name=name,
            source=entry["source"],
            config=_expanded(entry["config"]),
            default=tuple(entry.get("default", ())),
            toy=entry.get("toy", {}),
            is_pretrained=entry.get("pretrained", False),
        )
        for name, entry in TABLE.items()
    }


def _expanded(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section in which run lengths are lists with one entry for each layer."""
    total = section.get("num_hidden_layers", 0)
    return {
        name: _expanded(value)
        if isinstance(value, dict)
        else _repeated(value, total)
        if isinstance(value, str) and RUNS.fullmatch(value)
        else value
        for name, value in section.items()
    }


def _repeated(runs: str, total: int) -> list[Any]:
    """Return the list of run lengths such as "3 conv, 1 full_attention", up to `total` entries."""
    once: list[Any] = []
    for run in runs.split(","):
        length, entry = run.split()
        once += [int(entry) if entry.isdigit() else entry] * int(length)
    return (once * (total // len(once) + 1))[:total]


def write_config(model: PublishedModel, folder: Path) -> Path:
    """Write the published config.json without weights. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(model.config, indent=1), encoding="utf-8")
    return folder


def num_params(model: PublishedModel, folder: Path) -> int:
    """Return the number of weights of the language model at its published size.

    Args:
        folder: receives config.json.
    """
    text = {"pad_token_id": None, **model.text, "architectures": [architecture(model.family)]}
    text = {name: value for name, value in text.items() if name not in DROPPED}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(text), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in network.parameters())


def toy_config(model: PublishedModel) -> dict[str, Any]:
    """Return the config.json of a small text-only network with a published model's options."""
    text = deepcopy({name: each for name, each in model.text.items() if name not in DROPPED})
    heads, keys = _heads(text)
    text |= layers_of(text, {}) | text_overrides(model)
    head_dim = int(model.toy.get("head_dim", HEAD))
    sizes = _Sizes(model.text, heads=heads, keys=keys, head_dim=head_dim)
    small = {name: sizes.of(name, value) for name, value in text.items()}
    small |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    small |= {"vocab_size": VOCAB, "architectures": [architecture(model.family)]}
    return small | model.toy


def text_overrides(model: PublishedModel) -> dict[str, Any]:
    """Return the lists with an entry for each layer in a small network with a set depth."""
    depth = model.toy.get("num_hidden_layers")
    if depth is None:
        return {}
    total = model.text["num_hidden_layers"]
    lists = {
        name: value[:depth]
        for name, value in model.text.items()
        if isinstance(value, list) and len(value) == total
    }
    return {**lists, "num_hidden_layers": depth}


def _heads(text: Mapping[str, Any]) -> tuple[int, int]:
    """Return the small numbers of query heads and of key heads, in the published ratio."""
    heads = text["num_attention_heads"]
    keys = text.get("num_key_value_heads") or heads
    if text.get("kv_lora_rank"):
        return 4, 4
    group = heads // keys
    few = 2 if group <= 4 and keys > 1 else 1
    return group * few, few


class _Sizes:
    """Small values for the sizes of one configuration."""

    def __init__(self, text: Mapping[str, Any], *, heads: int, keys: int, head_dim: int) -> None:
        self._text = text
        self._heads = heads
        self._keys = keys
        self._head_dim = head_dim
        self._hidden = text["hidden_size"]
        self._all_heads = text["num_attention_heads"]
        self._full_head = text.get("head_dim") or self._hidden // self._all_heads
        self.hidden = self._width()
        self._original = self._small_original()

    def of(self, name: str, value: Any) -> Any:
        """Return the small value of a key; options stay as they are."""
        if value is None or isinstance(value, bool):
            return value
        made = self._by_name().get(name)
        if made is not None:
            return made(value)
        if name in ("rope_scaling", "rope_parameters"):
            return self._rope(value)
        return value

    def _by_name(self) -> dict[str, Callable[[Any], Any]]:
        head = self._head_dim / self._full_head
        share = self._heads / self._all_heads
        width = self.hidden / self._hidden
        rules: dict[str, Callable[[Any], Any]] = {
            "hidden_size": lambda _: self.hidden,
            "block_dim": lambda _: self.hidden,
            "conv_dim": lambda _: self.hidden,
            "intermediate_size": lambda value: _even(value * width),
            "intermediate_size_mlp": lambda value: _even(value * width),
            "num_attention_heads": lambda _: self._heads,
            "num_heads": lambda _: self._heads,
            "num_key_value_heads": lambda _: self._keys,
            "swa_num_attention_heads": lambda value: max(1, round(value * share)),
            "swa_num_key_value_heads": lambda value: max(1, round(value * share)),
            "head_dim": lambda _: self._head_dim,
            "global_head_dim": lambda value: int(value * head),
            "rotary_dim": lambda value: int(value * head),
            "query_pre_attn_scalar": lambda value: int(value * head),
            "attention_multiplier": lambda value: value / head,
            "max_position_embeddings": lambda value: self._positions(value),
            "original_max_position_embeddings": lambda _: self._original,
            "initial_context_length": lambda _: self._original,
            "sliding_window": self._window,
            "sliding_window_size": self._window,
            "attention_chunk_size": lambda _: CHUNK,
            "vocab_size_per_layer_input": lambda _: VOCAB,
            "first_k_dense_replace": lambda value: min(value, 1),
            "num_dense_layers": lambda value: min(value, 1),
            "linear_num_key_heads": lambda _: 2,
            "linear_num_value_heads": self._value_heads,
            "mamba_n_heads": self._mamba_heads,
            "mamba_num_heads": self._mamba_heads,
            "mamba_d_head": lambda _: HEAD,
            "mamba_head_dim": lambda _: HEAD,
            "mamba_d_ssm": lambda _: HEAD * self._mamba_heads(0),
            "mamba_d_state": lambda _: 16,
            "ssm_state_size": lambda _: 16,
            "mamba_chunk_size": lambda _: 16,
            "chunk_size": lambda _: 16,
            "n_groups": lambda value: min(value, 2),
            # All heads of the indexer remain, because scores of few heads tie.
            "index_topk": lambda _: WINDOW,
            "o_lora_rank": lambda _: 32,
            "o_groups": lambda value: min(value, 2),
        }
        rules |= dict.fromkeys(NUM_EXPERTS, self._experts)
        rules |= dict.fromkeys(NUM_CHOSEN, lambda value: min(value, CHOSEN))
        rules |= dict.fromkeys(EXPERT_UNITS, self._units)
        if self._text.get("kv_lora_rank"):
            rules |= {name: lambda _, size=size: size for name, size in LATENT.items()}
            rules["qk_nope_head_dim"] = lambda value: value * 32 // 128
            rules["v_head_dim"] = lambda value: value * 32 // 128
            rules["num_key_value_heads"] = lambda _: self._heads
        return rules

    def _width(self) -> int:
        """Return the hidden size in the published ratio to the width of all heads."""
        if self._text.get("kv_lora_rank"):
            return LATENT_WIDTH
        width = self._heads * self._head_dim
        whole = self._all_heads * self._full_head
        return width if whole == self._hidden else _even(width * self._hidden / whole)

    def _window(self, value: int) -> int:
        """Return a window; one that no sequence reaches stays beyond all positions."""
        return WINDOW if value < self._text["max_position_embeddings"] else value

    def _value_heads(self, value: int) -> int:
        return 2 * value // self._text["linear_num_key_heads"]

    def _mamba_heads(self, _: int) -> int:
        expand = self._text.get("mamba_expand", 2)
        is_expanded = "mamba_n_heads" in self._text and "mamba_d_ssm" not in self._text
        return expand * self.hidden // HEAD if is_expanded else 8

    def _experts(self, value: int) -> int:
        groups = self._text.get("n_group") or 1
        return 0 if not value else 2 * groups if groups > 1 else EXPERTS

    def _units(self, value: int) -> int:
        unit = next((self._text[name] for name in EXPERT_UNITS if self._text.get(name)), 1)
        if not any(self._text.get(name) for name in EXPERT_UNITS[:3]):
            unit = self._text["intermediate_size"]
            return _even(value / unit * self.of("intermediate_size", unit))
        return UNITS * value // unit

    def _small_original(self) -> int:
        rope = self._text.get("rope_scaling") or self._text.get("rope_parameters") or {}
        if (rope.get("rope_type") or rope.get("type")) == "longrope":
            return LONG_ORIGINAL
        return SCALED_ORIGINAL if rope.get("llama_4_scaling_beta") else ORIGINAL

    def _positions(self, value: int) -> int:
        """Return the positions in the published ratio to those before the scaling."""
        rope = self._text.get("rope_scaling") or self._text.get("rope_parameters") or {}
        key = "original_max_position_embeddings"
        before = self._text.get(key) or rope.get(key)
        return POSITIONS if not before else max(POSITIONS, self._original * value // before)

    def _rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        """Return the section of a rotary embedding for small heads."""
        if any(isinstance(each, dict) for each in rope.values()):
            return {name: self._rope(each) for name, each in rope.items()}
        made = dict(rope)
        if "original_max_position_embeddings" in rope:
            made["original_max_position_embeddings"] = self._original
        partial = rope.get("partial_rotary_factor", self._text.get("partial_rotary_factor", 1.0))
        pairs = int(self._head_dim * partial) // 2
        for name in ("long_factor", "short_factor"):
            if name in rope:
                step = len(rope[name]) // pairs
                made[name] = rope[name][::step][:pairs]
        if "mrope_section" in rope:
            third = pairs // 3
            made["mrope_section"] = [pairs - 2 * third, third, third]
        return made


def _even(value: float) -> int:
    return max(GRAIN, round(value / GRAIN) * GRAIN)


def save_published(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a small network with the options of a published model, and its published config.json.

    The weights of heads for further tokens are beside those of the network, as in the original.
    """
    model = published_models()[name]
    tree = toy_config(model)
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / CONFIG
    whole.write_text(json.dumps(tree), encoding="utf-8")
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    perturb(stored(network), seed=seed)
    network.save_pretrained(folder)
    tree["dtype"] = "float32"
    whole.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | _further_heads(tree, tensors), folder / WEIGHTS, metadata={"format": "pt"})
    make_tokenizer(list(TEXTS), vocab_size=VOCAB).save_pretrained(folder)
    return folder


def _further_heads(tree: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of heads that predict further tokens, under their published names."""
    last = tree["num_hidden_layers"] - 1
    block = f"model.layers.{last}."
    hidden = tree["hidden_size"]
    if tree.get("num_nextn_predict_layers"):
        layer = f"model.layers.{last + 1}."
        vectors = ("enorm", "hnorm", "shared_head.norm")
        made = {f"{layer}{name}.weight": torch.ones(hidden) for name in vectors}
        made[f"{layer}eh_proj.weight"] = torch.zeros(hidden, 2 * hidden)
        copied = layer
    elif tree.get("mtp_num_hidden_layers") or tree["model_type"] == "qwen3_next":
        made = {"mtp.fc.weight": torch.zeros(hidden, 2 * hidden)}
        copied = "mtp.layers.0."
    else:
        return {}
    inner = {
        copied + name.removeprefix(block): each.clone()
        for name, each in tensors.items()
        if name.startswith(block)
    }
    return made | inner


def facts_of(model: PublishedModel, num_params: int) -> dict[str, str]:
    """Return the facts of a published model at its own size.

    Args:
        num_params: weights of the language model.

    Returns: "problem", why it does not start, and the memory of each of `PLANS`.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(model, Path(name))
        problem = start_problem(folder)
        shape = replace(read_shape(folder), num_params=num_params)
    weights, _ = engine_weights(load_config("smoke", list(PLANNED)), shape)
    memory = (_memory(shape), _memory(shape, ADAPTERS), f"{weights / GIB:,.0f} GiB")
    return {"problem": problem, **dict(zip(PLANS, memory, strict=True))}


def start_problem(folder: Path) -> str:
    """Return why a checkpoint with the config.json in a folder does not start, "" if it does."""
    try:
        if find_quantised(folder, "bfloat16", key="model.path"):
            _remove_quantisation(folder)
        check_kind(folder, shown="it")
        check_trainable(folder, shown="it")
        check_engine_equal(folder, MAX_TOKENS, shown="it")
    except ConfigError as error:
        return " ".join(str(error).split()).removeprefix("model.path=it: ")
    return ""


def _remove_quantisation(folder: Path) -> None:
    """Write the config.json of a folder as that of its dequantised weights."""
    tree = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    tree = {name: value for name, value in tree.items() if name not in QUANTISED_KEYS}
    (folder / CONFIG).write_text(json.dumps(tree), encoding="utf-8")


def _memory(shape: ModelShape, *settings: str) -> str:
    """Return the learner's memory on one GPU, and the smallest number of GPUs that have it."""
    whole = f"{_planned(shape, settings, num_gpus=1) / GIB:,.0f} GiB"
    num = 1
    while _planned(shape, settings, num_gpus=num) > USABLE * GPU_BYTES:
        if num == MOST_GPUS:
            return f"{whole}, more than {num:,} GPUs"
        num *= 2
    return f"{whole}, {num:,} GPU{'s' * (num > 1)}"


def _planned(shape: ModelShape, settings: Sequence[str], *, num_gpus: int) -> int:
    """Return the bytes of a learner on its first GPU, by the memory plan of every start."""
    ranks = [f"learner.num_ranks={num_gpus}"]
    ranks.append(f"learner.num_nodes={max(1, num_gpus // GPUS_PER_NODE)}")
    cfg = load_config("smoke", [*PLANNED, *ranks, *settings])
    parts = learner_parts(cfg, shape, is_cuda=True, rank=0)
    return sum(part.num_bytes for part in parts if not part.is_peak)
