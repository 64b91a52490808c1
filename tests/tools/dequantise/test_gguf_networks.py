"""Laws of GGUF files of other networks: each weight of the network is in the checkpoint again."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from tests.tools.dequantise.test_models import config
from tools.checks.preflight import check_model
from tools.dequantise.models import plain_models

pytestmark = pytest.mark.slow
TOKENS = [f"<t{number}>" for number in range(40)] + [*"abcdefghijklmnopqrstuvw", "ab"]


@pytest.fixture(autouse=True)
def folder_of_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def write(
    path: Path, architecture: str, fields: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write a GGUF file in fp32 with a byte-level tokenizer of 64 tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        name = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 40 + [1] * 24)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_same(tmp_path: Path, network: PreTrainedModel) -> None:
    """Check that the plain checkpoint of x.gguf gives the same logits as the network."""
    plain = plain_models(config(tmp_path, tmp_path / "x.gguf", dtype="float32")).model.path
    check_model(plain)
    loading: Any = AutoModelForCausalLM
    loaded, report = loading.from_pretrained(
        plain, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"] | report["unexpected_keys"]
    tokens = torch.tensor([[3, 9, 14, 27, 5, 60, 33]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, network.eval()(tokens).logits)


def renamed(name: str, names: dict[str, str]) -> str:
    for ours, theirs in names.items():
        name = name.replace(ours, theirs)
    return name


def test_mixture_of_experts_is_split_into_its_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make: Any = Qwen3MoeConfig  # Its own keys are not in the signature that it inherits.
    settings = make(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        rope_theta=1e6,
    )
    network = Qwen3MoeForCausalLM(settings).float()
    names = {
        "model.embed_tokens": "token_embd",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "mlp.gate.": "ffn_gate_inp.",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
    }
    tensors: dict[str, Tensor] = {}
    for name, weight in network.state_dict().items():
        if name.endswith("gate_up_proj"):
            gate, up = weight.chunk(2, dim=1)
            layer = name.split(".")[2]
            tensors[f"blk.{layer}.ffn_gate_exps.weight"] = gate
            tensors[f"blk.{layer}.ffn_up_exps.weight"] = up
        else:
            tensors[renamed(name, names)] = weight
    fields = {
        "context_length": 128,
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "expert_feed_forward_length": 48,
        "expert_count": 4,
        "expert_used_count": 2,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    write(tmp_path / "x.gguf", "qwen3moe", fields, tensors)
    check_same(tmp_path, network)


def test_linear_attention_is_converted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = Qwen3_5TextConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=96,
        linear_num_key_heads=2,
        linear_num_value_heads=2,  # One value head for each key head: their order is the same.
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    network = Qwen3_5ForCausalLM(settings).float()
    for name, weight in network.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, std=0.1)
    names = {
        "model.embed_tokens": "token_embd",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "model.norm": "output_norm",
        "lm_head": "output",
        "model.layers.": "blk.",
    }
    tensors: dict[str, Tensor] = {}
    for name, weight in network.state_dict().items():
        if "norm" in name and "linear_attn" not in name:
            weight = weight + 1
        elif name.endswith("A_log"):
            weight = -weight.exp()
        elif name.endswith("conv1d.weight"):
            weight = weight[:, 0]
        tensors[renamed(name, names)] = weight
    tensors["blk.4.nextn.eh_proj.weight"] = torch.zeros(64, 128)
    fields = {
        "context_length": 128,
        "block_count": 5,
        "nextn_predict_layers": 1,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 2,
        "ssm.inner_size": 32,
        "rope.freq_base": 1e6,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [2, 1, 1, 0],
    }
    write(tmp_path / "x.gguf", "qwen35", fields, tensors)
    check_same(tmp_path, network)
