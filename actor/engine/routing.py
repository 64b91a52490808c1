"""Records of the experts that an engine chose for each token, for `algorithm.routing_replay`.

On GPUs vLLM records them itself (`enable_return_routed_experts`). That needs its newer model
runner, which needs Triton. Engines on CPUs without Triton use vLLM's hook in each router, and
`ExpertRecorder` assigns the choices to requests.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.kv_cache_interface import FullAttentionSpec

from common.errors import ConfigError

RECORDS = "records_experts"  # Key of vLLM's `additional_config` for engines on CPUs.
KEY = "algorithm.routing_replay=true"
SUFFIX_CHARS = 9  # vLLM appends "-" and eight random characters to the id of a request.
MAX_FINISHED = 1_024  # Records of finished requests that are kept until the engine takes them.


def is_recorded_by_vllm() -> bool:
    """Return whether vLLM's own option records experts on this machine."""
    return HAS_TRITON or not current_platform.is_cpu()


def engine_options(records_experts: bool) -> dict[str, Any]:
    """Return vLLM's arguments for records of experts; {} without records."""
    if not records_experts:
        return {}
    if is_recorded_by_vllm():
        return {"enable_return_routed_experts": True}
    return {"additional_config": {RECORDS: True}}


def check_recordable(config: VllmConfig) -> None:
    """Check that an engine can record experts. Raises: ConfigError: names the reason."""
    model = config.model_config
    if not model.is_moe:
        raise ConfigError(
            f"{KEY}: {model.model} is not a mixture of experts. Set algorithm.routing_replay=false."
        )


def narrowed(routed: np.ndarray | None) -> np.ndarray | None:
    """Return the choices of a request in the dtype of a trajectory; None if there are none."""
    if routed is None:
        return None
    return routed if routed.dtype == np.uint8 else routed.astype(np.int16)


class ExpertRecorder:
    """Assigns the choices of each engine step to its requests, on a CPU.

    The choices are also stored at the token's place in the KV cache. A request that reuses a cached
    prefix reads them there.

    Example: recorder.record(runner, scheduled) after each step; recorder.take("a") -> the choices
    of the finished request "a", [token, layer, chosen].
    """

    def __init__(self, runner: Any, config: VllmConfig) -> None:
        """Bind vLLM's hooks of all routers of a loaded model.

        Raises: ConfigError: vLLM has no hook for a router of the model.
        """
        most_tokens = config.scheduler_config.max_num_batched_tokens
        self._capturer = RoutedExpertsCapturer(most_tokens, config)
        try:
            bind_routed_experts_capturer(runner.get_model(), self._capturer)
        except ValueError as error:
            raise ConfigError(
                f"{KEY}: vLLM cannot record the experts of this model: {error}"
            ) from error
        self._by_slot: torch.Tensor | None = None  # [slot of the KV cache, layer, chosen]
        self._group = 0  # KV cache group with all tokens of a request.
        self._block_tokens = 0
        self._records: dict[str, list[np.ndarray]] = {}
        self._finished: dict[str, np.ndarray] = {}

    def record(self, runner: Any, scheduled: Any) -> None:
        """Record the choices of a step that the runner has just computed."""
        for request in scheduled.finished_req_ids:
            self._finish(request)
        num_tokens = scheduled.total_num_scheduled_tokens
        if not num_tokens:
            return
        slots = self._slots(runner)
        chosen = self._capturer.snapshot_routing_data(num_tokens)
        at = 0
        for request in runner.input_batch.req_ids:
            count = scheduled.num_scheduled_tokens[request]
            choices = chosen[at : at + count]
            at += count
            state = runner.requests[request]
            start = state.num_computed_tokens
            places = self._slots_of_tokens(state.block_ids[self._group], start + count)
            parts = self._records.get(request)
            if parts is None:
                parts = self._records[request] = [slots[places[:start]].numpy()]
            slots[places[start:]] = choices
            num_recorded = sum(map(len, parts))
            # A preempted request computes its tokens again. Their first choices are kept.
            parts.append(choices[max(num_recorded - start, 0) :].numpy().copy())

    def _slots(self, runner: Any) -> torch.Tensor:
        """Return the choices by slot of the KV cache, whose size is known after the start."""
        if self._by_slot is None:
            cache = runner.kv_cache_config
            groups = cache.kv_cache_groups
            whole = (n for n, each in enumerate(groups) if _is_full_attention(each.kv_cache_spec))
            self._group = next(whole, 0)
            self._block_tokens = groups[self._group].kv_cache_spec.block_size
            shape = (cache.num_blocks * self._block_tokens, *self._capturer.shape_per_token)
            self._by_slot = torch.zeros(shape, dtype=self._capturer.output_dtype)
        return self._by_slot

    def _slots_of_tokens(self, blocks: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the cache slot of each of a request's first tokens."""
        tokens = torch.arange(num_tokens)
        firsts = torch.tensor(blocks)[tokens // self._block_tokens] * self._block_tokens
        return firsts + tokens % self._block_tokens

    def _finish(self, request: str) -> None:
        """Keep the choices of a finished request, and drop the oldest choices over the limit."""
        parts = self._records.pop(request, None)
        if parts is None:
            return
        self._finished[request[:-SUFFIX_CHARS]] = np.concatenate(parts)
        while len(self._finished) > MAX_FINISHED:
            self._finished.pop(next(iter(self._finished)))

    def take(self, request: str) -> np.ndarray:
        """Return and forget the choices of a finished request.

        Args:
            request: id of the request, without vLLM's suffix.
        """
        for running in [each for each in self._records if each[:-SUFFIX_CHARS] == request]:
            self._finish(running)  # The scheduler reports its end with the next step.
        return self._finished.pop(request)


def _is_full_attention(spec: Any) -> bool:
    return isinstance(spec, FullAttentionSpec) and getattr(spec, "sliding_window", None) is None
