"""vLLM's CPU worker with support for AMX tiles, a single adapter and records of experts."""

import gc
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_worker import CPUWorker

from actor.engine.cpu.text_models import register_text_models
from actor.engine.routing import RECORDS, ExpertRecorder
from common.host.machine import TilePermission, request_tiles


class TileWorker(CPUWorker):
    """vLLM's CPU worker, which requests AMX tiles before any code of the model runs.

    vLLM's bf16 attention uses tiles but does not request them. Without a request the process would
    crash at the first token.
    """

    tile_permission: TilePermission | None = None  # None: not requested yet.
    experts: ExpertRecorder | None = None  # None: experts are not recorded.

    def init_device(self) -> None:
        """Request AMX tiles, and replace the parts of vLLM that a CPU lacks."""
        gc.freeze()  # vLLM collects garbage twice for a model. Its modules are permanent.
        self.tile_permission = request_tiles()
        rotate_all_heads()
        keep_activations_in(self.vllm_config.model_config.dtype)
        register_text_models(self.vllm_config.model_config.architectures)
        if self.vllm_config.lora_config is not None:
            CpuPlatform.get_punica_wrapper = classmethod(lambda _: f"{__name__}.OneAdapter")  # pyright: ignore
            _keep_cpu_experts()
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and attach the recorder of experts if records are configured."""
        super().load_model(*args, **kwargs)
        complete_routers(self.model_runner.get_model())
        options: Any = self.vllm_config.additional_config
        if options and options.get(RECORDS):
            self.experts = ExpertRecorder(self.model_runner, self.vllm_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute one step, and record its experts."""
        made = super().execute_model(scheduler_output)
        if self.experts is not None:
            self.experts.record(self.model_runner, scheduler_output)
        return made

    def take_experts(self, request: str) -> list[Any]:
        """Return the choices of a finished request: bytes, shape and dtype."""
        assert self.experts is not None
        choices: np.ndarray = self.experts.take(request)
        return [choices.tobytes(), list(choices.shape), choices.dtype.name]


def rotate_all_heads() -> None:
    """Let vLLM's rotary embedding take one axis for the heads and one for their numbers on a CPU.

    The kernel for CPUs (0.32) takes a tensor [token, head, number] for [token, number]. It would
    rotate the first head only.
    """
    rotate = RotaryEmbedding.forward_cpu
    if getattr(rotate, "is_for_all_heads", False):
        return

    def rotate_flat(
        self: RotaryEmbedding, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Rotate query and key with all heads on one axis."""
        flat_key = key if key is None else key.reshape(positions.numel(), -1)
        flat = rotate(self, positions, query.reshape(positions.numel(), -1), flat_key)
        rotated = flat[1] if key is None or flat[1] is None else flat[1].view(key.shape)
        return flat[0].view(query.shape), rotated

    rotate_flat.is_for_all_heads = True  # pyright: ignore[reportFunctionMemberAccess]
    RotaryEmbedding.forward_cpu = rotate_flat


def keep_activations_in(dtype: torch.dtype) -> None:
    """Let xIELU, as in Apertus, keep its parameters in this dtype. vLLM (0.32) rounds them to bf16.

    Args:
        dtype: dtype of the engine's weights.
    """
    defaults = XIELU.__init__.__defaults__ or ()
    XIELU.__init__.__defaults__ = tuple(
        dtype if isinstance(value, torch.dtype) else value for value in defaults
    )


def complete_routers(model: nn.Module) -> None:
    """Let routers on a CPU choose experts with a bias, and by a sigmoid, as on a GPU.

    vLLM (0.32) ignores `e_score_correction_bias` beside a softmax on a CPU, as in Ernie 4.5, and
    stops at a sigmoid, as in MiniMax-M2.
    """
    for layer in model.modules():
        for router in vars(layer).values():
            if isinstance(router, CPURouter) and _is_incomplete(router):
                router.custom_routing_function = partial(
                    chosen_experts,
                    router.e_score_correction_bias,
                    router.scoring_func == "sigmoid",
                    router.routed_scaling_factor,
                )


def _is_incomplete(router: CPURouter) -> bool:
    """Return whether vLLM would ignore this router's bias or its sigmoid."""
    if router.use_grouped_topk or router.custom_routing_function is not None:
        return False
    has_bias = router.e_score_correction_bias is not None
    return router.scoring_func == "sigmoid" or (has_bias and router.scoring_func == "softmax")


def chosen_experts(
    bias: Tensor | None,
    is_sigmoid: bool,
    scale: float,
    *,
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
) -> tuple[Tensor, Tensor]:
    """Return gates [token, chosen] and ids [token, chosen]; the bias changes the choice only.

    Args:
        bias: [expert].
        is_sigmoid: whether a score is the sigmoid of a logit, not the softmax of all.
        scale: factor of the gates, after `renormalize`.
        hidden_states: [token, hidden], not used.
        gating_output: [token, expert] logits of the router.
        topk: number of chosen experts.
        renormalize: whether the gates of a token sum to 1.
    """
    logits = gating_output.float()
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    ids = (scores if bias is None else scores + bias).topk(topk, dim=-1).indices
    gates = scores.gather(-1, ids)
    if renormalize:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates * scale, ids


def _keep_cpu_experts() -> None:
    """Let experts compute by the CPU's kernels also beside adapters of other layers.

    vLLM (0.32) chooses Triton's kernels for all experts of an engine with adapters, and they need a
    GPU. Published adapters never change experts, see `LoraSection.is_merged`.
    """
    place: Any = unquantized_fused_moe_method
    select = place.select_unquantized_moe_backend

    def select_for_cpu(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    place.select_unquantized_moe_backend = select_for_cpu


class OneAdapter(PunicaWrapperCPU):
    """One adapter for all requests on a CPU: two matrix products per layer.

    vLLM's own operations copy the adapter for every token and are 5 to 60 times slower.
    """

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
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
