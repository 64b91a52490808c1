"""Laws of vLLM's layers on a CPU."""

import pytest
import torch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_neox", [True, False])
def test_every_head_is_rotated_on_a_cpu(is_neox: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms import current_platform

    from actor.engine.cpu.worker import rotate_all_heads

    if not current_platform.is_cpu():
        pytest.skip("vLLM is built for a GPU")
    rotate_all_heads()
    with set_current_vllm_config(VllmConfig()):
        rotary = RotaryEmbedding(32, 32, 64, 10_000, is_neox, torch.float32)
    query = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0))
    key = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5)
    right = rotary.forward_native(positions, query.clone(), key.clone())
    found = rotary.forward_cpu(positions, query.clone(), key.clone())
    assert right[1] is not None
    assert found[1] is not None
    torch.testing.assert_close(found[0], right[0])
    torch.testing.assert_close(found[1], right[1])


def test_activation_keeps_its_numbers_in_the_engines_dtype() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import XIELU

    from actor.engine.cpu.worker import keep_activations_in

    for dtype in (torch.float32, torch.bfloat16):
        keep_activations_in(dtype)
        with set_current_vllm_config(VllmConfig()):
            assert XIELU().alpha_p.dtype is dtype
