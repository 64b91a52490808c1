"""The policy's adapter in the engine: vLLM's own LoRA layers, filled from memory.

It is not merged into the weights. LoRA's changes are far below the resolution of bf16 and would be
rounded away.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
from vllm.config import VllmConfig
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest

from common.config.compute import LoraSection
from common.errors import EngineError

# The only adapter. Its path does not exist: the engine must never load it from disk.
REQUEST = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="/published/in/memory")


def adapter_at(folder: Path) -> LoRARequest:
    """Return the request for the adapter in a folder, for an engine without a learner."""
    return LoRARequest(lora_name="kept", lora_int_id=2, lora_path=str(folder.resolve()))


def engine_options(cfg: LoraSection) -> dict[str, Any]:
    """Return the engine's arguments for adapters; {} if full weights are trained."""
    if not cfg.rank:
        return {}
    sizes = sorted(get_args(MaxLoRARanks))
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(size for size in sizes if size >= cfg.rank),
        # Other target modules cost time, and an adapter on the head breaks scores on CPU (0.32.0).
        "lora_target_modules": list(cfg.targets),
        "additional_config": {"lora_alpha": cfg.alpha},
    }


def load_adapter(
    model_runner: Any, tensors: Iterable[tuple[str, torch.Tensor]], config: VllmConfig
) -> None:
    """Replace the engine's adapter by `tensors` (peft's names). Runs in a worker, while paused.

    Raises: EngineError: the engine has no LoRA layer for one of the tensors.
    """
    named = dict(tensors)
    alpha = cast(dict[str, Any], config.additional_config)["lora_alpha"]
    rank = next(tensor.shape[0] for name, tensor in named.items() if ".lora_A." in name)
    model = model_runner.get_model()
    renamed = getattr(model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        REQUEST.lora_int_id,
        # The staging buffer is reused, so the tensors are copied.
        {name: tensor.clone() for name, tensor in named.items()},
        PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[]),  # pyright: ignore
        device="cpu",
        dtype=model_runner.lora_config.lora_dtype,
        weights_mapper=None if renamed is None else renamed.get_rename_mapper(),
    )
    manager = model.lora_manager
    places = {*manager.modules, *chain.from_iterable(manager.packed_modules.values())}
    strangers = sorted(adapter.loras.keys() - places)
    if strangers:
        raise EngineError(
            f"learner.lora.targets: the engine (vLLM) cannot adapt {strangers[0]}; remove it"
        )
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)


class OneAdapter(PunicaWrapperCPU):
    """One adapter for all requests on a CPU: two matrix products per layer.

    vLLM's own operations copy the adapter for every token and are 5 to 60 times slower.
    """

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: Any,
    ) -> None:
        """Add (x A^T) B^T, computed in fp32, to `y` [tokens, outputs], slice by slice.

        Args:
            x: [tokens, inputs]
            lora_a_stacked: per slice [1, 1, rank, inputs]
            lora_b_stacked: per slice [1, 1, outputs of the slice, rank]
        """
        if self.no_lora:
            return
        rows = x.reshape(-1, x.shape[-1]).float()
        outputs = y.view(-1, y.shape[-1])
        first = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            change = scale * (rows @ a[0, 0].float().T @ b[0, 0].float().T)
            outputs[:, first : first + width] += change.to(y.dtype)
            first += width
