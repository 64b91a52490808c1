"""Laws of vLLM's models on a CPU: no torchvision, recurrent states and latent attention."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Mamba2Config, Mamba2ForCausalLM

from common.config.actor import ActorSection
from common.config.model import ModelSection
from tests.learner.experts import save_experts
from tools.offline.scratch import make_tokenizer, save_policy

pytestmark = pytest.mark.slow
WITH_IMAGES = "Qwen3_5ForCausalLM"  # Its module holds the variant for images, too.
PLAIN = "Qwen2ForCausalLM"


def test_text_model_needs_no_torchvision_and_no_process() -> None:
    from vllm.model_executor.models import registry

    from actor.engine.cpu.text_models import register_text_models

    ModelRegistry = registry.ModelRegistry
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    before = dict(ModelRegistry.models)
    try:
        register_text_models([WITH_IMAGES, PLAIN, "Unknown"])
        found = ModelRegistry.models[WITH_IMAGES].load_model_cls()
        assert found.__name__ == WITH_IMAGES
        for name in (WITH_IMAGES, PLAIN):
            assert isinstance(ModelRegistry.models[name], registry._RegisteredModel)
        assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
        assert importlib.util.find_spec("torchvision") is None
    finally:
        ModelRegistry.models.update(before)


def test_model_for_images_needs_no_package_for_images() -> None:
    from vllm.model_executor.models import registry

    from actor.engine.cpu.text_models import OPTIONAL, register_text_models

    name = "Mistral3ForConditionalGeneration"  # Its module imports both packages.
    before = dict(registry.ModelRegistry.models)
    lacking = [each for each in OPTIONAL if importlib.util.find_spec(each) is None]
    try:
        register_text_models([name])
        assert isinstance(registry.ModelRegistry.models[name], registry._RegisteredModel)
        assert not [each for each in sys.modules if each.partition(".")[0] in lacking]
    finally:
        registry.ModelRegistry.models.update(before)


def test_recurrent_states_have_no_cached_prefix_on_a_cpu(tmp_path: Path) -> None:
    from vllm.platforms import current_platform

    from actor.engine.start import engine_arguments, engine_config

    if not current_platform.is_cpu():
        pytest.skip("vLLM is built for a GPU")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "state_size": 8,
    }
    network = Mamba2ForCausalLM(Mamba2Config(vocab_size=320, num_hidden_layers=1, **sizes))
    save_policy(tmp_path, network, make_tokenizer(["go to the red ball"], vocab_size=320))
    model = ModelSection(path=str(tmp_path), dtype="float32")
    arguments = engine_arguments(model, ActorSection(max_model_len=64), seed=0)
    assert arguments.enable_prefix_caching
    assert not engine_config(arguments).cache_config.enable_prefix_caching


def test_latent_attention_in_fp32_has_its_own_kernel(tmp_path: Path) -> None:
    """The kernel that vLLM chooses on a CPU with AMX units computes in bf16 only."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from actor.engine.start import engine_arguments, engine_config

    if not current_platform.is_cpu():
        pytest.skip("vLLM is built for a GPU")
    save_experts(tmp_path, "deepseek_v3")

    def backend(dtype: str) -> Any:
        cfg = ActorSection(max_concurrent=4, max_model_len=128)
        arguments = engine_arguments(ModelSection(path=str(tmp_path), dtype=dtype), cfg, seed=0)
        config = engine_config(arguments)
        assert config.model_config.use_mla
        return config.attention_config.backend

    assert backend("float32") is AttentionBackendEnum.CPU_MLA
    assert backend("bfloat16") is None, "vLLM chooses"
