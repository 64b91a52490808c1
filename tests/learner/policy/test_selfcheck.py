"""Laws of the start check: scores are the network's own, whatever its family."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    FalconH1Config,
    NemotronConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from common.config.algorithm import Advantage, AlgorithmSection
from common.config.learner import (
    Attention,
    CriticKind,
    CriticSection,
    Layout,
    LearnerSection,
    Precision,
)
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from learner.batch.batching import collate_tokens
from learner.policy.forward import Networks, Passes
from learner.policy.kernels.attention import packing_problem, use_attention
from learner.policy.model import Critic, Scoring, load_policy, make_critic, token_logprobs
from learner.policy.selfcheck import NeighboursDiffer, ScoresDiffer
from learner.training.build import load_start, make_trainer
from tests.learner.builders import VOCAB, make_mixing_model, make_model, make_samples, recompute
from tests.marks import long_for

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXACT = Scoring(chunk_tokens=16, dtype=torch.float32)


def save(config: PretrainedConfig, folder: Path) -> str:
    """Write a network of random weights, larger than usual; return its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


def passes_of(model: Any, **learner: Any) -> Passes:
    cfg = LearnerSection(**{"precision": Precision.FP32, **learner})
    return Passes(cfg, Networks(policy=model), temperature=0.7, engine_dtype="float32")


def load(path: str, **how: Any) -> PreTrainedModel:
    return load_policy(path, device="cpu", **how)


def logits_twice(model: Any) -> list[torch.Tensor]:
    """Return the logits of two passes with gradient, as a training step makes them."""
    ids = torch.arange(12)[None]
    return [model(input_ids=ids, use_cache=False).logits for _ in range(2)]


RANDOM = {
    "seed_oss": {"residual_dropout": 0.4, "attention_dropout": 0.4},
    "gpt2": {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4},
    "mixtral": {"router_jitter_noise": 0.9, "num_local_experts": 4},
    "opt": {"layerdrop": 0.5, "dropout": 0.4, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"hidden_dropout": 0.4},
    "phimoe": {"num_local_experts": 4, "input_jitter_noise": 0.9, "router_jitter_noise": 0.9},
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_repeated_scoring_gives_equal_logits(
    family: str, checkpointing: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(family, **(SMALL | RANDOM[family]))
    path = save(config, tmp_path)
    model = load(path)
    if checkpointing:
        recompute(model)
    first, second = logits_twice(model)
    assert torch.equal(first, second)
    with torch.no_grad():  # The sampler computes them in this way.
        expected = AutoModelForCausalLM.from_pretrained(path).eval()(torch.arange(12)[None]).logits
    torch.testing.assert_close(first.detach(), expected, atol=1e-5, rtol=1e-5)


def test_recomputed_layers_compute_again(tmp_path: Path) -> None:
    model = load(save(AutoConfig.for_model("llama", **SMALL), tmp_path))
    recompute(model)
    num_calls = [0]
    layer = model.base_model.get_submodule("layers.0.mlp")
    layer.register_forward_pre_hook(lambda *_: num_calls.__setitem__(0, num_calls[0] + 1))
    logits_twice(model)[0].sum().backward()
    assert num_calls == [3]  # twice forward, once again for the gradient of one


def test_the_critic_trunk_draws_no_random_numbers(tmp_path: Path) -> None:
    path = save(AutoConfig.for_model("gpt2", **(SMALL | RANDOM["gpt2"])), tmp_path)
    policy = load(path)
    critic: Any = make_critic(CriticSection(kind=CriticKind.MODEL), policy, policy_path=path)
    found = [critic.trunk(torch.arange(12)[None]).last_hidden_state for _ in range(2)]
    assert torch.equal(found[0], found[1])


class Noisy(nn.Module):
    """Adds random numbers in every mode."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.1 * torch.randn_like(states)


def test_random_numbers_in_pass_are_refused() -> None:
    model = make_model().eval()
    model.model.norm = nn.Sequential(model.model.norm, Noisy())  # type: ignore[assignment]
    with pytest.raises(
        ScoresDiffer, match=r"Qwen3.* scores the same tokens differently .*: -\d.* and -\d.* nats"
    ):
        passes_of(model, layout=Layout.PADDED).check_start(may_pad=False)


CHANGED = {
    "gemma2": {"final_logit_softcapping": 1.0, "head_dim": 8},
    "gemma4_text": {
        "final_logit_softcapping": 1.0,
        "head_dim": 8,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
    },
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("family", CHANGED)
def test_logits_changed_behind_head_are_scored_right(family: str, tmp_path: Path) -> None:
    path = save(AutoConfig.for_model(family, **(SMALL | CHANGED[family])), tmp_path)
    model = load(path)
    ids = torch.arange(12)[None]
    block = collate_tokens([ids[0].numpy()], [np.arange(12) > 0], device="cpu")
    head: Any = model.get_output_embeddings()
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path).eval()(ids).logits[0, :-1]
        alone = head(model.base_model(ids)[0])[0, :-1]
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert float((alone - logits).abs().max()) > 0.01, "the head alone is wrong"
    logprobs = token_logprobs(model, block, EXACT)
    torch.testing.assert_close(logprobs.detach(), expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name


def test_temperature_divides_logits_after_their_cap(tmp_path: Path) -> None:
    model = load(save(AutoConfig.for_model("gemma2", **(SMALL | CHANGED["gemma2"])), tmp_path))
    ids = torch.arange(12)[None]
    block = collate_tokens([ids[0].numpy()], [np.arange(12) > 0], device="cpu")
    with torch.no_grad():
        logprobs = token_logprobs(model, block, replace(EXACT, temperature=0.5))
        logits = model(ids).logits[0, :-1] / 0.5
    expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_hybrid_network_with_scaled_logits_is_scored_right(tmp_path: Path) -> None:
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
    mamba |= {"mamba_d_state": 8, "mamba_chunk_size": 16}
    config = FalconH1Config(**SMALL, **mamba, lm_head_multiplier=0.25)  # pyright: ignore
    model = load(save(config, tmp_path))
    passes_of(model, layout=Layout.PADDED).check_start(may_pad=False)


def test_head_that_changes_input_is_refused() -> None:
    model = make_model().eval()
    model.lm_head.register_forward_pre_hook(lambda _, args: (2 * args[0],))
    with pytest.raises(
        ScoresDiffer, match="differ from those of the network's own forward pass: -"
    ):
        passes_of(model, layout=Layout.PADDED).check_start(may_pad=False)


def test_packing_is_refused_for_interacting_sequences() -> None:
    model = make_mixing_model()
    said = (
        "packed: packed sequences of Qwen3ForCausalLM attend to each other: a token scores"
        r" -\d.* and -\d.* nats .*=padded"
    )
    with pytest.raises(ConfigError, match=said):
        use_attention([model], "cpu", Layout.PACKED, Attention.AUTO)
    with pytest.raises(ConfigError, match=said):
        passes_of(model, layout=Layout.PACKED)


def test_auto_layout_pads_interacting_sequences(caplog: pytest.LogCaptureFixture) -> None:
    assert not passes_of(make_mixing_model()).is_packed
    assert "Qwen3ForCausalLM attend to each other: a token scores -" in caplog.text


def test_layout_found_wrong_after_loading_is_padded_or_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_mixing_model()
    # Weights that are read after the layout is chosen, as of several ranks, are not measured.
    monkeypatch.setattr("learner.policy.kernels.attention.is_unloaded", lambda _: True)
    passes = passes_of(model, layout=Layout.PACKED)
    assert passes.is_packed
    with pytest.raises(NeighboursDiffer, match=r"packed: .* -\d.* and -\d.* nats"):
        passes.check_start(may_pad=False)
    passes.check_start(may_pad=True)
    assert not passes.is_packed
    assert "learner.layout=auto: sequences are padded" in caplog.text


def test_start_check_compares_with_the_networks_own_attention(tmp_path: Path) -> None:
    """Transformers' fused attention ignores the cap of Gemma 2; the check notices it."""
    config = AutoConfig.for_model("gemma2", **SMALL, head_dim=8, attn_logit_softcapping=0.5)
    model = load(save(config, tmp_path))
    passes = passes_of(model, layout=Layout.PADDED, attention=Attention.FUSED)
    passes.check_start(may_pad=False)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ScoresDiffer, match="network's own forward pass"):
        passes.check_start(may_pad=False)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("layout", [Layout.PADDED, Layout.PACKED])
def test_bf16_rounding_is_no_difference(layout: Layout) -> None:
    model = make_model().eval()
    passes_of(model, layout=layout, precision=Precision.BF16).check_start(may_pad=False)


def test_start_check_covers_critic_and_reference(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    algorithm = AlgorithmSection(advantage=Advantage.PPO, kl_coef=0.1)
    learner = LearnerSection(device="cpu", critic=CriticSection(kind=CriticKind.MODEL))
    model = ModelSection(path=str(tmp_path), dtype="float32")
    cfg = RunConfig(model=model, learner=learner, algorithm=algorithm)
    policy, _ = load_start(cfg, None, torch.device("cpu"))
    trainer, _ = make_trainer(cfg, policy, None)
    trainer.train_on(make_samples(), version=0)
    networks: Any = trainer._gradients._networks
    for spoilt in (networks.reference.model, networks.critic.trunk):
        hook = spoilt.norm.register_forward_hook(lambda _, args, out: out + torch.randn_like(out))
        with pytest.raises(ScoresDiffer, match="same tokens"):
            trainer.check_start(may_pad=True)
        hook.remove()
    trainer.check_start(may_pad=False)


def test_start_check_covers_shared_tokens_of_critic_and_reference() -> None:
    networks = Networks(
        policy=make_model(),
        critic=Critic(32, make_model(seed=1).model),  # pyright: ignore[reportArgumentType]
        reference=make_model(seed=2),
    )
    learner = LearnerSection(layout=Layout.PACKED, precision=Precision.FP32)
    passes = Passes(learner, networks, temperature=1.0, engine_dtype="float32")
    passes.check_start(may_pad=False)
    reference: Any = networks.reference
    critic: Any = networks.critic
    for spoilt in (reference.model, critic.trunk):
        hook = spoilt.register_forward_pre_hook(_by_row, with_kwargs=True)
        with pytest.raises(NeighboursDiffer):
            passes.check_start(may_pad=False)
        hook.remove()


def _by_row(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Number the positions of rows that share tokens by their place in the block."""
    packing = kwargs.get("packing")
    if packing is None or packing.key_rows is None:
        return None
    positions = torch.arange(kwargs["position_ids"].shape[1])[None]
    return args, kwargs | {"position_ids": positions}


# What a small network of a family needs beside `SMALL`.
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
ROUTED |= {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
MAMBA |= {"mamba_chunk_size": 16}
GPT = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
DBRX = {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}}
DBRX |= {"ffn_config": {"hidden_size": 32, "ffn_hidden_size": 32, "moe_num_experts": 4}}
HEAD = {"head_dim": 8}
ZAMBA = {"mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8, "mamba_headdim": 8}
ZAMBA |= {"num_mem_blocks": 1, "chunk_size": 16, "attention_head_dim": 16}
ZAMBA |= {"attention_hidden_size": 64, "layers_block_type": ["mamba", "hybrid"]}
FAMILIES: dict[str, dict[str, Any]] = {
    name: {}
    for name in [
        "llama",
        "qwen2",
        "phi",
        "phi3",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "granite",
        "cohere",
        "cohere2",
        "stablelm",
        "starcoder2",
        "smollm3",
        "ernie4_5",
        "arcee",
        "persimmon",
        "falcon",
        "gpt_neox",
        "mistral",
        "apertus",
    ]
}
FAMILIES |= dict.fromkeys(
    ["qwen3", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "exaone4", "helium"], HEAD
)
FAMILIES |= {"seed_oss": HEAD, "qwen3_moe": MOE | HEAD, "olmoe": MOE, "mixtral": LOCAL}
FAMILIES |= {"qwen2_moe": MOE | {"shared_expert_intermediate_size": 32}, "phimoe": LOCAL}
FAMILIES |= {"gpt_oss": LOCAL | HEAD | {"sliding_window": 8}, "granitemoe": LOCAL}
FAMILIES |= {"ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}}
FAMILIES |= {"dots1": ROUTED | HEAD, "glm4_moe": ROUTED | HEAD}
FAMILIES |= {"gpt2": GPT, "gptj": GPT | {"rotary_dim": 4}, "mpt": MPT, "dbrx": MPT | DBRX}
LATENT = ROUTED | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES |= {"deepseek_v2": LATENT, "deepseek_v3": LATENT}
FAMILIES |= {"bloom": {"n_head": 4, "n_layer": 2}}
FAMILIES |= {"opt": {"ffn_dim": 64, "word_embed_proj_dim": 32}, "granite_scaled": {}}
FAMILIES |= {"mamba": {"state_size": 8}, "bamba": MAMBA | {"attn_layer_indices": [1]}}
FAMILIES |= {"mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1}}
FAMILIES |= {"jamba": {"num_experts": 2, "mamba_d_state": 8, "use_mamba_kernels": False}}
FAMILIES |= {"falcon_h1": MAMBA | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.25}, "zamba2": ZAMBA}
FAMILIES |= {"recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"]}}
SCALED = {"granite_scaled": ("granite", {"logits_scaling": 8.0})}
# Layers that keep their state in themselves, and a mask that is changed outside the layers.
PADDED = {"recurrent_gemma", "mpt"}


# One family of each kind of layer; the others are nightly.
ROTARY = ["llama", "qwen2", "qwen3", "phi3", "mistral", "gemma2", "gemma3_text", "cohere", "glm4"]
OTHER_POSITIONS = ["gpt_neox", "gpt2", "opt", "mpt", "bloom", "falcon"]
FACTORS = ["granite", "granite_scaled"]
EXPERTS = ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"]
RECURRENT = ["mamba2", "falcon_h1", "recurrent_gemma"]
USUAL = {*ROTARY, *OTHER_POSITIONS, *FACTORS, *EXPERTS, *RECURRENT}


@pytest.mark.slow
@pytest.mark.parametrize("family", long_for(sorted(FAMILIES), FAMILIES.keys() - USUAL))
def test_family_is_scored_right_or_refused(family: str, tmp_path: Path) -> None:
    name, more = SCALED.get(family, (family, {}))
    config = AutoConfig.for_model(name, **(SMALL | FAMILIES[family] | more))
    path = save(config, tmp_path)
    model = load(path)
    passes_of(model, layout=Layout.PADDED).check_start(may_pad=False)
    assert bool(packing_problem(model)) == (family in PADDED)
    if family not in PADDED:
        passes_of(model, layout=Layout.PACKED).check_start(may_pad=False)


def test_networks_without_a_head_are_packed(tmp_path: Path) -> None:
    # Its blocks give no argument of the row to their attention.
    trunk = AutoModel.from_pretrained(save(NemotronConfig(**SMALL), tmp_path))  # pyright: ignore
    assert packing_problem(trunk) == ""
