"""Laws of the sizes of checkpoints: all experts count."""

from pathlib import Path

import pytest

from common.config.learner import LoraSection
from learner.policy.model import load_policy
from learner.policy.model_shape import read_shape
from tests.learner.experts import config_of, make_experts, save_experts
from tools.checks.memory_plan import lora_params


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe", "granitemoe"])
def test_parameters_of_a_config_include_all_experts(tmp_path: Path, kind: str) -> None:
    config_of(kind).save_pretrained(tmp_path)
    actual = make_experts(kind).num_parameters()
    assert read_shape(tmp_path).num_params == pytest.approx(actual, rel=0.01)


def test_parameters_of_files_include_all_experts(tmp_path: Path) -> None:
    model = save_experts(tmp_path, "qwen3_moe")
    assert read_shape(tmp_path).num_params == model.num_parameters()


def test_adapters_of_experts_are_counted_exactly(tmp_path: Path) -> None:
    save_experts(tmp_path, "qwen3_moe")
    lora = LoraSection(rank=4, targets=["q_proj", "experts"])
    model = load_policy(str(tmp_path), device="cpu", gradient_checkpointing=False, lora=lora)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert lora_params(lora, read_shape(tmp_path)) == trained
