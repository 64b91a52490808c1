"""Laws of adapters: their effect, their training and their files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2Config

from common.config.learner import LearnerSection, LoraSection, OptimizerKind
from common.config.model import ModelSection
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT
from learner.policy.lora import ADAPTER_TENSORS, adapters_off, save_adapter, trained_state
from learner.policy.model import load_policy, published_tensors
from tests.learner.builders import make_model, make_model_with_adapters
from tools.checks.role_starts import check_networks
from tools.offline.scratch import save_policy

IDS = torch.arange(12)[None]


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loaded(folder: Path, **lora: Any):
    return load_policy(str(folder), device="cpu", lora=LoraSection(**lora))


def test_new_adapters_change_nothing_and_train(tmp_path: Path) -> None:
    base = make_model()
    base.save_pretrained(tmp_path)
    model = loaded(tmp_path, rank=4)
    assert torch.equal(logits_of(model), logits_of(base))
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(trained) == 2 * 7 * 2  # factors, layers of a block, blocks
    assert {each.dtype for each in trained_state(model).values()} == {torch.float32}


def test_adapters_are_the_same_on_every_rank(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    states = []
    for _ in range(2):
        torch.manual_seed(7)  # Every rank sets this seed before it loads.
        states.append(trained_state(loaded(tmp_path, rank=4)))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_frozen_weights_may_be_bf16_beside_fp32_adapters(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    model = load_policy(
        str(tmp_path), device="cpu", lora=LoraSection(rank=4), base_dtype=torch.bfloat16
    )
    frozen = {each.dtype for each in model.parameters() if not each.requires_grad}
    assert frozen == {torch.bfloat16}
    assert {each.dtype for each in trained_state(model).values()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(input_ids=IDS).logits.float().sum().backward()
    assert all(each.grad is not None for each in trained_state(model).values())


def test_only_the_targets_get_adapters(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    model = loaded(tmp_path, rank=2, targets=["q_proj", "down_proj"])
    assert {name.split(".")[4] for name in trained_state(model)} == {"q_proj", "down_proj"}


def test_adapters_without_a_layer_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"learner\.lora\.targets='\[\]': must name at least one layer"
    ):
        RunConfig(learner=LearnerSection(lora=LoraSection(rank=2, targets=[])))


@pytest.mark.parametrize("target", ["q_projection", "lm_head", "embed_tokens"])
def test_target_outside_linear_layers_is_refused(tmp_path: Path, target: str) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"learner\.lora\.targets={target}.*o_proj"):
        loaded(tmp_path, rank=2, targets=["q_proj", target])


def test_muon_is_refused_for_adapters() -> None:
    section = LearnerSection(optimizer=OptimizerKind.MUON, lora=LoraSection(rank=4))
    assert [key for key, *_ in section.contradictions()] == ["optimizer"]
    assert not [*LearnerSection(optimizer=OptimizerKind.MUON).contradictions()]


def test_policy_without_adapters_equals_base() -> None:
    model = make_model_with_adapters()
    after = logits_of(model)
    with adapters_off(model):
        assert torch.equal(logits_of(model), logits_of(make_model()))
    assert torch.equal(logits_of(model), after)
    assert (after - logits_of(make_model())).abs().max() > 0.1


def test_merged_policy_equals_the_adapted_one(tmp_path: Path) -> None:
    model = make_model_with_adapters()
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
    save_policy(tmp_path, model, tokenizer)
    plain = loaded(tmp_path)
    assert type(plain.model.layers[0].mlp.up_proj) is torch.nn.Linear
    torch.testing.assert_close(logits_of(plain), logits_of(model), atol=1e-5, rtol=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_adapter_folder_is_one_that_peft_loads(tmp_path: Path) -> None:
    model = make_model_with_adapters()
    make_model().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", model, trained_state(model))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(theirs), logits_of(model), atol=1e-5, rtol=1e-5)
    assert not any(each.requires_grad for each in theirs.parameters())


def test_published_tensors_are_those_of_the_adapter_file(tmp_path: Path) -> None:
    model = make_model_with_adapters()
    published: dict[str, Any] = dict(published_tensors(model))
    save_adapter(tmp_path, model, trained_state(model))
    written = load_file(tmp_path / ADAPTER_TENSORS)
    assert published.keys() == written.keys()
    assert all(torch.equal(published[name], written[name]) for name in written)


def test_layers_that_peft_refuses_are_found_before_start(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "state_size": 8}
    config = Mamba2Config(**sizes, n_groups=1, vocab_size=64, num_hidden_layers=1)
    config.architectures = ["Mamba2ForCausalLM"]
    config.save_pretrained(tmp_path)
    lora = LoraSection(rank=2, targets=["out_proj"])
    cfg = RunConfig(
        model=ModelSection(path=str(tmp_path)), learner=LearnerSection(device="cpu", lora=lora)
    )
    # A kernel reads these weights directly, so an adapter beside them would have no effect.
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets=out_proj: peft cannot adapt"):
        check_networks(cfg)


@pytest.mark.parametrize("autocast", [False, True])
def test_adapted_layer_computes_the_three_products_of_peft(autocast: bool) -> None:
    torch.manual_seed(0)
    model: Any = make_model_with_adapters()
    layer = model.model.layers[0].mlp.down_proj
    for factor in (layer.lora_A["default"], layer.lora_B["default"]):
        torch.nn.init.normal_(factor.weight)
    states = torch.randn(2, 5, 64)
    results = []
    for forward in (layer.forward, lambda each: type(layer).forward(layer, each)):
        tensors = (states.clone().requires_grad_(), *adapter_weights(layer))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            made = forward(tensors[0])
        upstream = torch.linspace(-1, 1, made.numel()).view_as(made)
        results.append((made, *torch.autograd.grad(made, tensors, upstream.to(made.dtype))))
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        limit = 0.02 if autocast else 1e-5
        assert (ours - theirs).abs().max() <= limit * theirs.abs().max()


def adapter_weights(layer: Any) -> list[torch.Tensor]:
    return [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
