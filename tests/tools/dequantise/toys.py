"""Small networks in the layouts of published quantised checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from common.repository import ROOT

HIDDEN, HEADS, KV_HEADS, UNITS, WORDS = 64, 2, 1, 96, 64
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "intermediate_size": UNITS,
    "vocab_size": WORDS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def llama_weights() -> dict[str, Tensor]:
    """Return random weights of the network `LLAMA` in fp32 by their names in a checkpoint."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / 8

    kv = KV_HEADS * HIDDEN // HEADS
    weights = {"model.embed_tokens.weight": random(WORDS, HIDDEN)}
    for number in range(LLAMA["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": random(HIDDEN, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": random(kv, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": random(kv, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": random(HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": random(UNITS, HIDDEN),
            f"{layer}.mlp.up_proj.weight": random(UNITS, HIDDEN),
            f"{layer}.mlp.down_proj.weight": random(HIDDEN, UNITS),
            f"{layer}.input_layernorm.weight": 1 + random(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": 1 + random(HIDDEN),
        }
    return weights | {
        "model.norm.weight": 1 + random(HIDDEN),
        "lm_head.weight": random(WORDS, HIDDEN),
    }


def write_fp8(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """Write `LLAMA` with FP8 blocks of 16 x 16 in two files; return its numbers in fp32.

    The scales of a weight are in the other file, as happens in published checkpoints.
    """
    folder.mkdir(parents=True)
    expected: dict[str, Tensor] = {}
    shards: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for number, (name, weight) in enumerate(llama_weights().items()):
        if ".layers." not in name or weight.ndim < 2:
            shards[number % 2][name] = weight.bfloat16()
            expected[name] = weight.bfloat16().float()
            continue
        scales = torch.rand(weight.shape[0] // 16, weight.shape[1] // 16) + 0.5
        eight = weight.to(torch.float8_e4m3fn)
        shards[number % 2][name] = eight
        shards[1 - number % 2][f"{name}_scale_inv"] = scales
        expected[name] = eight.float() * scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / name)
    index = {key: name for name, tensors in zip(names, shards, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    section = {"quant_method": "fp8", "weight_block_size": [16, 16], "fmt": "e4m3"}
    write_small_files(folder, quantization_config=section, **changes)
    return expected


def write_small_files(folder: Path, **config: Any) -> None:
    """Write a configuration and a tokenizer."""
    (folder / "config.json").write_text(json.dumps(LLAMA | config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        shutil.copyfile(ROOT / "configs" / "policies" / "tiny" / name, folder / name)


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
}
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_gguf(
    path: Path, *, tensors_per_file: int = 0, table: np.ndarray | None = None, **fields: Any
) -> dict[str, Tensor]:
    """Write `LLAMA` in Q8_0 with a byte-level tokenizer; return its numbers in fp32.

    Args:
        tensors_per_file: splits the model into parts; 0 is one file.
        table: divisors of the rotary frequencies.
        fields: strings and numbers of the metadata, with `__` for a point.
    """
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=tensors_per_file)
    writer.add_name("toy")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_feed_forward_length(UNITS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(WORDS)
    letters = [chr(number) for number in range(ord("!"), ord("!") + WORDS - len(SPECIAL) - 2)]
    tokens = [*SPECIAL, *letters, "\u0120", "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (WORDS - len(SPECIAL)))
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(4)
    writer.add_chat_template(TEMPLATE)
    for key, value in fields.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](key.replace("__", "."), value)
    if table is not None:
        writer.add_tensor("rope_freqs.weight", table.astype(np.float32))
    expected: dict[str, Tensor] = {}
    for name, weight in llama_weights().items():
        short = name
        for ours, theirs in GGUF_NAMES.items():
            short = short.replace(ours, theirs)
        if weight.ndim == 1:
            writer.add_tensor(short, weight.numpy())
            expected[name] = weight
            continue
        kind = gguf.GGMLQuantizationType.Q8_0
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = weight if heads is None else permuted(weight, heads)
        packed = gguf.quantize(stored.numpy(), kind)
        writer.add_tensor(short, packed, raw_dtype=kind)
        numbers = read_q8_0(packed, weight.shape)
        expected[name] = numbers if heads is None else restored(numbers, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Return rows in the order of llama.cpp: the halves of a head alternate."""
    rows = weight.shape[0] // heads // 2
    order = [
        h * 2 * rows + half * rows + n for h in range(heads) for n in range(rows) for half in (0, 1)
    ]
    return weight[order]


def restored(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of `permuted` in their first order."""
    numbers = permuted(torch.arange(weight.shape[0]), heads)
    made = torch.empty_like(weight)
    made[numbers] = weight
    return made


def read_q8_0(packed: np.ndarray, shape: torch.Size) -> Tensor:
    """Return the numbers of Q8_0: blocks of 32 integers behind their scale in fp16."""
    blocks = packed.reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    whole = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
    return torch.from_numpy((whole * scales).reshape(shape))
