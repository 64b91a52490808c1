"""Checkpoints of any size that hold sizes only."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

from common.repository import ROOT

# Qwen2.5-0.5B's own numbers.
HALF_BILLION = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def write_model(folder: Path, *, num_rest: int = 357_898_112, **changes: Any) -> Path:
    """Write a checkpoint's config, a small tokenizer and the header of its weights.

    Args:
        num_rest: weights beside the embedding; the default makes Qwen2.5-0.5B's 494 million.
    """
    folder.mkdir(parents=True)
    sizes = HALF_BILLION | changes
    (folder / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(ROOT / "configs" / "policies" / "tiny" / name, folder / name)
    shapes = {
        "model.embed_tokens.weight": [sizes["vocab_size"], sizes["hidden_size"]],
        "lm_head.weight": [sizes["vocab_size"], sizes["hidden_size"]],
        "rest": [num_rest],
    }
    header = {name: {"dtype": "BF16", "shape": shape} for name, shape in shapes.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder
