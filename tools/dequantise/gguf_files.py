"""GGUF files as checkpoints: configuration, tokenizer and weights by transformers' conversions."""

import math
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict
from transformers.integrations.gguf.utils import (
    add_gguf_load_ops,
    get_gguf_conversion_mapping,
    get_gguf_plan,
    is_gguf_arch_supported,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from learner.policy.expert_weights import WeightRead, convert_read
from tools.dequantise.tensors import NAMES, Output

# Keys of the file that transformers' older conversion leaves out, by key of config.json.
SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Rules that split a text, for which the rule of GPT-2 gives the same tokens: in their vocabularies
# no token has two digits.
LIKE_GPT2 = (
    "gpt-2",
    "smollm",
    "starcoder",
    "refact",
    "command-r",
    "codeshell",
    "exaone",
    "mpt",
    "olmo",
)
# Tensors that have no place in the network: tables that follow from the configuration, and the
# layers that predict several tokens.
LEFT_OUT = re.compile(r"rope_freqs\.weight$|attn_rot_embd|\.nextn\.")
MTP = "mtp."  # Names of these layers in a checkpoint of Qwen3.5.
LLAMA3_TABLE = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MAX_TABLE_GAP = 1e-3


class GgufModel:
    """One model in one or several GGUF files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Read the metadata of all parts. Raises: ValueError, KeyError: a file is damaged."""
        self._paths = paths
        self._readers = [gguf.GGUFReader(path) for path in paths]
        self.tensors = {each.name: each for reader in self._readers for each in reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        num_parts = self._value("split.count") or 1
        if num_parts != len(paths):
            raise ValueError(f"{paths[0].name}: {len(paths)} of its {num_parts} parts are there")
        declared = self._value("split.tensors.count")
        if declared not in (None, len(self.tensors)):
            raise ValueError(
                f"{paths[0].name}: {len(self.tensors)} of {declared} tensors are there"
            )

    def _value(self, key: str) -> Any:
        field = self._readers[0].get_field(key)
        return None if field is None else field.contents()

    @property
    def types(self) -> str:
        """Type of most numbers, as in Q4_K."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors.values():
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
        return counts.most_common(1)[0][0]

    @cached_property
    def config(self) -> Any:
        """Configuration of the network. Raises: ValueError: the network cannot be described."""
        first = self._paths[0]
        config: Any = AutoConfig.from_pretrained(
            str(first.parent), gguf_file=first.name, local_files_only=True
        )
        # Transformers reads the first part only, and the head may be in another one.
        if self.architecture not in ("falcon", "bloom"):
            config.tie_word_embeddings = "output.weight" not in self.tensors
        if not is_gguf_arch_supported(self.architecture):
            for name, key in SIZES.items():
                size = self._value(f"{self.architecture}.{name}")
                if size is not None and hasattr(config, key) and self.architecture != "gemma4":
                    setattr(config, key, int(size))
        self._set_rope(config)
        with torch.device("meta"):
            config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
        return config

    def _set_rope(self, config: Any) -> None:
        """Set the scaling of rotary positions, which transformers leaves out for most networks.

        Raises: ValueError: the scaling is of an unknown kind.
        """
        rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
        is_set = rope.get("rope_type", "default") != "default"
        kind = self._value(f"{self.architecture}.rope.scaling.type")
        if LLAMA3_TABLE in self.tensors:
            table = np.array(self.tensors[LLAMA3_TABLE].data, dtype=np.float64)
            expected = {"rope_type": "llama3", "factor": float(table.max()), **LLAMA3}
            gap = np.abs(llama3_table(float(rope["rope_theta"]), 2 * len(table), expected) - table)
            if gap.max() > MAX_TABLE_GAP * table.max():
                raise ValueError(f"{LLAMA3_TABLE} is not the table of rope_type=llama3")
            config.rope_parameters = {**rope, **expected}
        elif kind not in (None, "none") and not is_set:
            prefix = f"{self.architecture}.rope.scaling"
            if kind not in ("linear", "yarn"):
                raise ValueError(f"{prefix}.type={kind} is not supported")
            scaling = {"rope_type": kind, "factor": float(self._value(f"{prefix}.factor"))}
            original = self._value(f"{prefix}.original_context_length")
            if original is not None:
                scaling["original_max_position_embeddings"] = int(original)
            config.rope_parameters = {**rope, **scaling}

    @cached_property
    def network(self) -> PreTrainedModel:
        """The network without weights."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)

    def save_small_files(self, folder: Path, *, dtype: torch.dtype, has_tokenizer: bool) -> None:
        """Write the configuration, and the tokenizer unless the folder has it already.

        Raises: ValueError: the tokenizer cannot be converted.
        """
        self.config.dtype = dtype
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config
        self.config.save_pretrained(folder)
        generation: Any = self.network.generation_config
        end = self._value("tokenizer.ggml.eot_token_id")
        ends = generation.eos_token_id
        if end is not None and ends is not None:
            stops = ends if isinstance(ends, list) else [ends]
            generation.eos_token_id = ends if end in stops else [*stops, int(end)]
        generation.save_pretrained(folder)
        if has_tokenizer:
            return
        rule = self._value("tokenizer.ggml.pre")
        is_split = self._value("tokenizer.ggml.model") == "gpt2"
        if is_split and rule not in (None, "default", *LIKE_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
            raise ValueError(
                f"its tokenizer splits texts by the rule {rule!r}, which transformers does not"
                " know. Put the model's tokenizer.json and the GGUF file into one folder, and give"
                " the folder"
            )
        first = self._paths[0]
        tokenizer: Any = AutoTokenizer.from_pretrained(
            str(first.parent), gguf_file=first.name, local_files_only=True
        )
        tokenizer.save_pretrained(folder)

    def outputs(self, dtype: torch.dtype) -> list[Output]:
        """Return the weights under their names in a checkpoint.

        Raises: ValueError: a weight is missing, has another shape or no place in the network.
        """
        groups = self._groups()
        weights: dict[str, Tensor] = dict(self.network.state_dict())
        tied = set(self.network.get_expanded_tied_weights_keys(all_submodels=True))
        lacking = sorted(weights.keys() - groups.keys() - tied)
        if lacking:
            raise ValueError(f"the file has no {lacking[0]} ({len(lacking)} are missing)")
        placed = {
            name
            for target, group in groups.items()
            for name in group.sources
            if target in weights or target.startswith(MTP)
        }
        if unknown := [n for n in self.tensors if n not in placed and not LEFT_OUT.search(n)]:
            raise ValueError(f"{self.config.architectures[0]} has no place for {unknown[0]}")
        outputs: list[Output] = []
        newest = _Newest()
        bare = {t: weights[t] for t in groups if t in weights and t not in tied}
        stored = revert_weight_conversion(self.network, dict(bare)).items()
        origins = {id(weight): target for target, weight in bare.items()}
        # Most weights have the same tensor in a checkpoint.
        unchanged = {origins[id(each)]: name for name, each in stored if id(each) in origins}
        for target, group in groups.items():
            if target not in bare:
                continue
            named = {unchanged.get(target, ""): bare[target]}
            if target not in unchanged:
                named = revert_weight_conversion(self.network, {target: bare[target]})
            load = partial(self._load, target, group, bare[target].shape, dtype)
            outputs += [
                Output(
                    name=name,
                    dtype=NAMES[dtype],
                    shape=tuple(each.shape),
                    parts=partial(newest.parts, target, load, name),
                )
                for name, each in named.items()
            ]
        return outputs

    def _load(
        self, target: str, group: "_WeightSource", shape: torch.Size, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that one weight of the network makes."""
        weight = group.convert(target)
        for reader in self._readers:  # Pages that were read count as memory of this process.
            mapped: Any = reader.data
            mapped._mmap.madvise(mmap.MADV_DONTNEED)
        if weight.shape != shape:
            raise ValueError(f"{target} has shape {list(weight.shape)}, not {list(shape)}")
        return revert_weight_conversion(self.network, {target: weight.to(dtype)})

    def _groups(self) -> "dict[str, _WeightSource]":
        """Return the tensors of the file that make each weight of the network."""
        if is_gguf_arch_supported(self.architecture):
            return self._converted_groups()
        processor = TENSOR_PROCESSORS.get(self.architecture, TensorProcessor)(
            config=self.config.to_dict()
        )
        mapping = get_gguf_hf_weights_map(self.network, processor)
        groups: dict[str, _WeightSource] = {}
        for name in self.tensors:
            # Experts have no ending in the map.
            target = mapping.get(name) or mapping.get(name.removesuffix(".weight"))
            if target is not None:
                group = groups.setdefault(target, _Processed([], self.tensors, processor, mapping))
                group.sources.append(name)
        return groups

    def _converted_groups(self) -> "dict[str, _WeightSource]":
        """Return the groups of a network that transformers loads by converters."""
        headers = [GgufHeader.from_file(str(path)) for path in self._paths]
        stored = {n: each for h in headers for n, each in load_gguf_state_dict(h).items()}
        whole = headers[0]._replace(tensors=tuple(t for h in headers for t in h.tensors))
        transforms = get_gguf_conversion_mapping(self.architecture, self.config)
        quantised, _, _ = get_gguf_plan(whole, transforms)
        transforms = add_gguf_load_ops(transforms, quantised, whole, torch.float32)
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        groups: dict[str, _WeightSource] = {}
        for name in self.tensors:
            target, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                continue
            read = WeightRead(target, by_pattern[pattern])
            group = groups.setdefault(target, _Converted([], self.network, read, stored))
            group.sources.append(name)
            assert isinstance(group, _Converted)
            group.read.sources.setdefault(pattern, []).append(name)
        return groups


def llama3_table(theta: float, head_dim: int, rope: Mapping[str, Any]) -> np.ndarray:
    """Return by how much rope_type=llama3 divides each frequency, [head_dim / 2]."""
    periods = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((original / periods - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / rope["factor"] + smooth)


@dataclass
class _WeightSource:
    """The tensors of a file that make one weight."""

    sources: list[str]

    def convert(self, target: str) -> Tensor:
        raise NotImplementedError


@dataclass
class _Processed(_WeightSource):
    """A weight of a network that transformers loads by a processor of its family."""

    tensors: Mapping[str, Any]
    processor: TensorProcessor
    mapping: dict[str, str]

    def convert(self, target: str) -> Tensor:
        made: dict[str, Tensor] = {}
        for name in self.sources:
            tensor = self.tensors[name]
            result = self.processor.process(
                weights=gguf.dequantize(tensor.data, tensor.tensor_type),
                name=name,
                tensor_key_mapping=self.mapping,
                parsed_parameters={"tensors": made},
            )
            if result.name is not None:
                made[target] = torch.from_numpy(np.array(result.weights, dtype=np.float32))
        return made[target]


@dataclass
class _Converted(_WeightSource):
    """A weight of a network that transformers loads by converters."""

    network: PreTrainedModel
    read: WeightRead
    stored: Mapping[str, Any]

    def convert(self, target: str) -> Tensor:
        return convert_read(self.network, self.read, lambda name: self.stored[name][...])[target]


class _Newest:
    """The newest weight, whose tensors are written one after another."""

    def __init__(self) -> None:
        self._target = ""
        self._made: dict[str, Tensor] = {}

    def parts(self, target: str, load: Any, name: str) -> Iterator[Tensor]:
        if self._target != target:
            self._made = {}
            self._made = load()
            self._target = target
        yield self._made[name]
