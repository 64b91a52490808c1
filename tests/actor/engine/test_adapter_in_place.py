"""Laws of loading an adapter into the slots of vLLM's LoRA layers, without an engine."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from common.config.actor import ActorSection
from common.config.learner import LoraSection
from common.config.model import ModelSection
from common.errors import EngineError
from tests.actor.engine import test_load

pytestmark = pytest.mark.slow

process_group = test_load.process_group
RANK = 32
LORA = LoraSection(rank=RANK, alpha=64.0)  # B is scaled by 2.
HIDDEN, UNITS, LAYERS = 512, 2048, 4
WIDTHS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.v_proj": (HIDDEN, HIDDEN // 2),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, UNITS),
    "mlp.up_proj": (HIDDEN, UNITS),
    "mlp.down_proj": (UNITS, HIDDEN),
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A worker's model with vLLM's LoRA layers, as `load_adapter` uses it."""
    from vllm.config import set_current_vllm_config
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.model_executor.model_loader import get_model

    from actor.engine.start import engine_arguments, engine_config

    folder = tmp_path_factory.mktemp("policy")
    Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=UNITS,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    cfg = ActorSection(max_concurrent=4, max_model_len=128)
    model = ModelSection(path=str(folder), dtype="float32")
    arguments = engine_arguments(model, cfg, seed=0, has_weights=False, lora=LORA)
    arguments.weight_transfer_config = None
    arguments.skip_tokenizer_init = True
    config = engine_config(arguments)
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        network = get_model(vllm_config=config)
        manager = LRUCacheWorkerLoRAManager(config, torch.device("cpu"), {})
        network = manager.create_lora_manager(network, config)
    assert config.lora_config is not None
    return SimpleNamespace(
        get_model=lambda: network, lora_config=config.lora_config, vllm_config=config
    )


def adapter(seed: int) -> list[tuple[str, Tensor]]:
    """Return the tensors of a version by peft's names."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight", tensor)
        for layer in range(LAYERS)
        for name, (inputs, outputs) in WIDTHS.items()
        for side, tensor in (
            ("A", torch.randn((RANK, inputs), generator=generator)),
            ("B", torch.randn((outputs, RANK), generator=generator)),
        )
    ]


def slots(runner: Any) -> dict[str, Tensor]:
    """Return a copy of the matrices in every slot."""
    return {
        f"{name} {side} {part}": stacked.clone()
        for name, layer in runner.get_model().lora_manager.modules.items()
        for side in ("a", "b")
        for part, stacked in enumerate(getattr(layer, f"lora_{side}_stacked"))
    }


def test_filled_slots_equal_an_adapter_loaded_anew(runner: Any) -> None:
    from actor.engine import adapter as loading

    loading.load_adapter(runner, adapter(1), runner.vllm_config)
    loading.load_adapter(runner, adapter(2), runner.vllm_config)
    in_place = slots(runner)
    loading._reload_adapter(
        runner.get_model().lora_manager,
        loading._by_module(adapter(2), None),
        scaling=LORA.alpha / RANK,
        dtype=torch.float32,
    )
    anew = slots(runner)
    assert in_place.keys() == anew.keys()
    assert all(torch.equal(in_place[name], anew[name]) for name in anew)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    wanted = 2 * dict(adapter(2))[name]  # alpha / rank = 64 / 32
    assert torch.equal(in_place["model.layers.0.mlp.down_proj b 0"][0, 0, :, :RANK], wanted)


def test_unknown_target_is_refused_before_a_slot_changes(runner: Any) -> None:
    from actor.engine.adapter import load_adapter

    load_adapter(runner, adapter(3), runner.vllm_config)
    before = slots(runner)
    strange = ("base_model.model.model.layers.0.mlp.odd.lora_A.weight", torch.ones(RANK, 4))
    other = ("base_model.model.model.layers.0.mlp.odd.lora_B.weight", torch.ones(4, RANK))
    with pytest.raises(EngineError, match=r"cannot adapt model\.layers\.0\.mlp\.odd; remove it"):
        load_adapter(runner, [*adapter(4), strange, other], runner.vllm_config)
    assert all(torch.equal(before[name], each) for name, each in slots(runner).items())


def test_loading_takes_at_most_five_copies_of_the_bytes(runner: Any) -> None:
    from actor.engine.adapter import load_adapter

    tensors = adapter(5)
    targets = [torch.empty_like(tensor) for _, tensor in tensors]

    def copy() -> None:
        for target, (_, tensor) in zip(targets, tensors, strict=True):
            target.copy_(tensor)

    load_s = best_s(lambda: load_adapter(runner, tensors, runner.vllm_config))
    copy_s = best_s(copy)
    assert load_s <= 5 * copy_s + 0.002  # and 2 ms for the calls of 16 layers


def best_s(work: Any) -> float:
    """Return the shortest of several processor times, without the time of other programs."""
    took: list[float] = []
    for _ in range(15):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return min(took)
