"""Laws of adapters on the weights of experts: their effect, their files, and merged versions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from common.config.learner import FULL, LearnerSection, LoraSection
from common.errors import ConfigError
from common.repository import ROOT
from learner.policy.lora import adapters_off, load_adapter, save_adapter, trained_state
from learner.policy.model import load_policy, published_tensors
from learner.weights.source import LiveWeights
from tests.learner.builders import make_model, recompute, tensors_of
from tests.learner.experts import KINDS, save_experts
from tools.offline.scratch import save_policy

IDS = torch.arange(3, 27)[None]
LORA = LoraSection(rank=4, targets=["q_proj", "o_proj", "experts"])


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def loaded(folder: Path, *, is_trained: bool = False, checkpointing: bool = False) -> Any:
    torch.manual_seed(1)
    model = load_policy(str(folder), device="cpu", lora=LORA)
    if checkpointing:
        recompute(model)
    if is_trained:
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_new_adapters_of_experts_change_nothing_and_train(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path, kind)
    model = loaded(tmp_path, checkpointing=True)
    plain = load_policy(str(tmp_path), device="cpu")
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=1e-5, rtol=1e-5)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert len(trained) == 2 * 4 * 2  # factors, adapted weights of a layer, layers
    model(input_ids=IDS).logits.square().sum().backward()
    factors = [
        each for name, each in model.named_parameters() if "experts" in name and "lora_B" in name
    ]
    assert len(factors) == 4
    assert all(each.grad is not None and each.grad.abs().max() > 0 for each in factors)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_experts_equal_the_adapted_ones(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path / "base", kind)
    model = loaded(tmp_path / "base", is_trained=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
    save_policy(tmp_path / "merged", model, tokenizer)
    plain = load_policy(str(tmp_path / "merged"), device="cpu")
    torch.testing.assert_close(logits_of(plain), logits_of(model), atol=1e-4, rtol=1e-4)
    base = load_policy(str(tmp_path / "base"), device="cpu")
    assert (logits_of(plain) - logits_of(base)).abs().max() > 0.1
    with adapters_off(model):
        torch.testing.assert_close(logits_of(model), logits_of(base), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_engines_receive_merged_experts_of_each_version(tmp_path: Path, kind: str) -> None:
    save_experts(tmp_path / "base", kind)
    model = loaded(tmp_path / "base", is_trained=True)
    tokenizer: Any = AutoTokenizer.from_pretrained(ROOT / "configs/policies/tiny")
    source = LiveWeights(published_tensors(model), torch.float32)
    for number in range(2):
        if number:  # The optimizer changes the factors in place.
            with torch.no_grad():
                for each in trained_state(model).values():
                    each.add_(0.01)
        save_policy(tmp_path / str(number), model, tokenizer)
        files = load_file(tmp_path / str(number) / "model.safetensors")
        published = tensors_of(source)
        assert published.keys() == files.keys()
        for name, each in files.items():
            torch.testing.assert_close(published[name], each, atol=1e-6, rtol=1e-6, msg=name)


def test_adapters_of_experts_are_read_again_by_peft_too(tmp_path: Path) -> None:
    save_experts(tmp_path / "base", "qwen3_moe")
    model = loaded(tmp_path / "base", is_trained=True)
    save_adapter(tmp_path / "adapter", model, trained_state(model))
    again = loaded(tmp_path / "base")
    with torch.no_grad():
        load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits_of(again), logits_of(model))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(theirs), logits_of(model), atol=1e-4, rtol=1e-4)


def test_adapters_of_gathered_experts_are_refused() -> None:
    section = LearnerSection(num_ranks=2, lora=LORA)
    assert [key for key, *_ in section.contradictions()] == ["lora.targets"]
    divided = LearnerSection(num_ranks=2, expert_ranks=2, lora=LORA)
    assert list(divided.contradictions()) == []
    assert LORA.in_engine == FULL


def test_target_experts_of_a_dense_model_is_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"learner\.lora\.targets=experts"):
        loaded(tmp_path)
