"""Small mixtures of experts for the tests, with random weights."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCAB = 320
HEAD: dict[str, Any] = {"head_dim": 32}
KINDS = ("qwen3_moe", "mixtral", "gpt_oss")
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def config_of(kind: str) -> Any:
    """Return a configuration of two layers, with 2 chosen experts for each token."""
    chosen: dict[str, Any] = {"num_experts_per_tok": 2}
    own: dict[str, Any]
    match kind:
        case "qwen3_moe":
            own = {"moe_intermediate_size": 32, "num_experts": 8, "norm_topk_prob": True}
            return Qwen3MoeConfig(**_SIZES, **chosen, **own, intermediate_size=96, **HEAD)
        case "mixtral":
            own = {"num_local_experts": 4, "sliding_window": None, "head_dim": 32}
            return MixtralConfig(**_SIZES, **chosen, **own, intermediate_size=64)
        case "gpt_oss":
            own = {"num_local_experts": 4, "head_dim": 32}
            return GptOssConfig(**_SIZES, **chosen, **own, intermediate_size=64)
        case "qwen2_moe":
            own = {"moe_intermediate_size": 32, "num_experts": 4}
            shared: dict[str, Any] = {"shared_expert_intermediate_size": 64}
            return Qwen2MoeConfig(**_SIZES, **chosen, **own, **shared, intermediate_size=96)
        case "olmoe":
            return OlmoeConfig(**_SIZES, **chosen, num_experts=4, intermediate_size=64)
        case "granitemoe":
            return GraniteMoeConfig(**_SIZES, **chosen, num_local_experts=4, intermediate_size=64)
        case "deepseek_v3":
            return DeepseekV3Config(**(_SIZES | chosen | _deepseek()), intermediate_size=96)
    raise ValueError(kind)


def _deepseek() -> dict[str, Any]:
    """Return sizes of an attention with latent keys, and experts in two groups."""
    return {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    }


def make_experts(kind: str, *, seed: int = 0) -> Any:
    """Build a mixture of experts whose choices depend on the token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.15)
            elif "norm" not in name:
                parameter.normal_(0.0, 0.1)
    return model.train()


def save_experts(folder: Path, kind: str, *, seed: int = 0) -> Any:
    """Build a mixture of experts and write its checkpoint, without a tokenizer."""
    model = make_experts(kind, seed=seed)
    model.save_pretrained(folder)
    return model
