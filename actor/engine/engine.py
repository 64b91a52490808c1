"""The generation engine: vLLM's AsyncLLM, token ids in, token ids out, weights taken in flight.

The only file that imports vllm. `WeightReceiver` runs inside the engine's worker processes.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm import SamplingParams
from vllm.config.model import ModelDType
from vllm.distributed import get_tp_group
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase

from actor.engine.concurrency import LoadMeter
from common.config.run_config import ActorSection, ModelSection
from common.errors import EngineError, WeightSyncError
from common.wire.collective import (
    BroadcastGroup,
    checksum,
    device_id,
    local_address_towards,
    open_store,
    views,
)
from common.wire.messages import TensorSpec, WeightsOffer

logger = logging.getLogger(__name__)

RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
SHUTDOWN_S = 1.0  # until the engine's processes are killed; they hold nothing worth saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine sampled for one turn."""

    token_ids: list[int]  # [num_sampled]
    logprobs: list[float]  # [num_sampled] nats, of the distribution that was sampled from
    versions: list[int]  # [num_sampled] weights that sampled each token
    is_stopped: bool  # True: ended by an end-of-turn token, which is the last of token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one weight transfer did."""

    checksum: str
    pause_s: float
    load_s: float


class WeightReceiver:
    """Mixed into vLLM's worker (`worker_extension_cls`): takes weights over torch.distributed."""

    def device_id(self) -> str:
        """Return the name of this worker's GPU, "" if it has none."""
        return device_id(torch.device(self.device))  # type: ignore[attr-defined]

    def receive_weights(self, offer: dict[str, Any]) -> dict[str, str]:
        """Join the offer's group if it is new, receive the buffer, load it.

        Of several workers (tensor parallel) the first one receives and hands on to the others.

        Returns:
            {"checksum", "error"}: an error means that the transfer failed and the old weights are
            untouched. Whatever is raised instead happened while loading and ends the engine, since
            nobody knows then which weights it holds.
        """
        workers = get_tp_group()
        buffer, error = None, ""
        if workers.is_first_rank:
            try:
                buffer = self._receive(offer)
            except WeightSyncError as e:
                error = str(e)
        if workers.world_size > 1:
            buffer = self._hand_on(buffer, offer["total_bytes"])
        if buffer is None:
            return {"checksum": "", "error": error}
        specs = [TensorSpec(**spec) for spec in offer["tensors"]]
        self._load(views(buffer, specs))
        return {"checksum": offer["checksum"], "error": ""}

    def _hand_on(self, buffer: torch.Tensor | None, num_bytes: int) -> torch.Tensor | None:
        """Return the first worker's buffer [num_bytes] uint8 on every worker, None if it failed."""
        workers = get_tp_group()
        device = torch.device(self.device)  # type: ignore[attr-defined]
        has_come = torch.tensor([buffer is not None], dtype=torch.int32, device=device)
        if not workers.broadcast(has_come, src=0).item():
            return None
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return workers.broadcast(buffer, src=0)

    def _receive(self, offer: dict[str, Any]) -> torch.Tensor:
        """Return the received buffer [num_bytes] uint8.

        Raises:
            WeightSyncError: the broadcast failed, or the bytes are not those that were sent.
        """
        device = torch.device(self.device)  # type: ignore[attr-defined]
        group = self._broadcast_group(offer)
        place = device if offer["backend"] == "nccl" else torch.device("cpu")
        buffer = torch.empty(offer["total_bytes"], dtype=torch.uint8, device=place)
        try:
            group.broadcast(buffer)
        except WeightSyncError:
            self._leave_group()
            raise
        received = checksum(buffer)
        if received != offer["checksum"]:
            raise WeightSyncError(f"checksum {received} is not the sender's {offer['checksum']}")
        return buffer.to(device)

    def _broadcast_group(self, offer: dict[str, Any]) -> BroadcastGroup:
        group: BroadcastGroup | None = getattr(self, "_longstride_group", None)
        host = offer["store_host"]
        # A learner that starts again counts its epochs from the start; its store is another one.
        place = (host, offer["store_port"], offer["group_epoch"])
        if group is not None and getattr(self, "_longstride_place", None) == place:
            return group
        self._leave_group()
        store = open_store(host, offer["store_port"], is_server=False, timeout_s=offer["timeout_s"])
        group = BroadcastGroup(
            store,
            epoch=offer["group_epoch"],
            rank=offer["rank"],
            world_size=offer["world_size"],
            backend=offer["backend"],
            timeout_s=offer["timeout_s"],
            bind_host=local_address_towards(host),
        )
        self._longstride_group = group
        self._longstride_place = place
        return group

    def _leave_group(self) -> None:
        group: BroadcastGroup | None = getattr(self, "_longstride_group", None)
        if group is not None:
            group.close()
        self._longstride_group = None

    def _load(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        # vLLM warns at every reload of layers that no checkpoint has weights for (rotary tables).
        logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.reload_weights(weights_iterator=tensors)
        model = runner.get_model()
        head = getattr(model, "lm_head", None)
        is_tied = getattr(model.config, "tie_word_embeddings", False)
        if head is not None and is_tied and hasattr(head, "quant_method"):
            # A tied head keeps its own packed copy on CPU, which a reload leaves stale.
            head.quant_method.process_weights_after_loading(head)


class _LoadWatch(StatLoggerBase):
    """Hears from vLLM after every step of the engine, and tells the meter."""

    def __init__(self, meter: LoadMeter) -> None:
        self._meter = meter

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self._meter.add(
                num_running=scheduler_stats.num_running_reqs,
                num_waiting=scheduler_stats.num_waiting_reqs,
                kv_frac=scheduler_stats.kv_cache_usage,
                num_preemptions=iteration_stats.num_preempted_reqs if iteration_stats else 0,
            )

    def log_engine_initialized(self) -> None:
        """There is nothing to say."""


class Engine:
    """One vLLM engine and the version of its weights.

    Example:
        engine = await Engine.start(model_cfg, actor_cfg, max_logprobs=0, seed=0)
        completion = await engine.generate([1, 5, 9], request_id="a", max_tokens=16, salt="v3")
        report = await engine.load(offer)      generation freezes, loads, goes on where it was
    """

    def __init__(self, llm: AsyncLLM, cfg: ActorSection, *, end_of_turn_ids: list[int]) -> None:
        self._llm = llm
        self.meter: LoadMeter | None = None
        self._cfg = cfg
        self._end_of_turn_ids = end_of_turn_ids
        self.version = -1  # nothing received yet
        self.num_sampled_tokens = 0
        self.num_running = 0

    @classmethod
    async def start(
        cls,
        model: ModelSection,
        cfg: ActorSection,
        *,
        end_of_turn_ids: list[int],
        seed: int,
        meters_load: bool = False,
    ) -> "Engine":
        """Start the engine processes and warm them up. Raises: EngineError."""
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cfg.kv_cache_gib))
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        arguments = AsyncEngineArgs(
            model=model.path,
            dtype=cast(ModelDType, model.dtype),
            seed=seed,
            max_model_len=cfg.max_model_len,
            max_num_seqs=cfg.max_concurrent,
            tensor_parallel_size=cfg.tensor_parallel_size,
            gpu_memory_utilization=cfg.gpu_memory_frac,
            enforce_eager=cfg.enforce_eager,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            worker_extension_cls="actor.engine.engine.WeightReceiver",
            # The class, not its name: on CPU the name "uni" is turned into "mp", whose two
            # processes poll each other and burn a core.
            distributed_executor_backend=UniProcExecutor if cfg.tensor_parallel_size == 1 else "mp",
            disable_log_stats=True,
            num_gpu_blocks_override=cfg.kv_cache_blocks or None,
        )
        started = time.monotonic()
        try:
            meter = LoadMeter() if meters_load else None
            llm = _start_llm(arguments, meter)
            engine = cls(llm, cfg, end_of_turn_ids=end_of_turn_ids)
            engine.meter = meter
            async with asyncio.timeout(cfg.start_timeout_s):
                await engine.generate([0, 0], request_id="warm-up", max_tokens=2, salt="warm-up")
        except (RuntimeError, ValueError, OSError, TimeoutError) as e:
            raise EngineError(f"engine did not start: {e}") from e
        logger.info("engine ready took_s=%.1f", time.monotonic() - started)
        return engine

    async def device_ids(self) -> list[str]:
        """Return the names of the engine's GPUs, one per worker; "" for a CPU."""
        return cast(list[str], await self._llm.collective_rpc("device_id"))

    def _sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=self._cfg.temperature,
            top_p=self._cfg.top_p,
            top_k=self._cfg.top_k,
            max_tokens=max_tokens,
            logprobs=0,
            detokenize=False,
            stop_token_ids=self._end_of_turn_ids,
            ignore_eos=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def generate(
        self, prompt_ids: list[int], *, request_id: str, max_tokens: int, salt: str
    ) -> Completion:
        """Sample one turn.

        Args:
            prompt_ids: [num_prompt] the whole conversation so far.
            max_tokens: most tokens of this turn.
            salt: prefix-cache name space; differs between weight versions, so that no prefix
                computed by old weights is taken for one of the new.

        Raises:
            EngineError: the engine died.
        """
        prompt = tokens_input(prompt_ids, cache_salt=salt)
        self.num_running += 1
        try:
            async for output in self._llm.generate(prompt, self._sampling(max_tokens), request_id):
                if output.finished:
                    return self._completion(output)
        except EngineDeadError as e:
            raise EngineError(f"engine died: {e}") from e
        finally:
            self.num_running -= 1
        raise EngineError(f"request {request_id} ended without an output")

    async def generate_together(
        self, prompts: dict[str, list[int]], *, max_tokens: int, salt: str
    ) -> dict[str, Completion]:
        """Sample one turn for all prompts (request id -> ids) in one reproducible batch order.

        The scheduler of the engine stands still while the requests are handed over, so the
        batches, and with them every rounding, do not depend on timing.
        """
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        queues = {}
        for request_id, prompt_ids in prompts.items():
            prompt = tokens_input(prompt_ids, cache_salt=salt)
            queues[request_id] = await self._llm.add_request(
                request_id, prompt, self._sampling(max_tokens)
            )
        self._llm._run_output_handler()
        await self._llm.resume_generation()
        completions = {}
        try:
            for request_id, queue in queues.items():
                output = queue.get_nowait() or await queue.get()
                completions[request_id] = self._completion(output)
        except EngineDeadError as e:
            raise EngineError(f"engine died: {e}") from e
        return completions

    def _completion(self, output: Any) -> Completion:
        sample = output.outputs[0]
        token_ids = list(sample.token_ids)
        logprobs = [step[t].logprob for t, step in zip(token_ids, sample.logprobs, strict=True)]
        versions = [self.version] * len(token_ids)
        for span in sample.weight_versions or []:
            if span.version.isdigit():
                versions[span.start : span.end] = [int(span.version)] * (span.end - span.start)
        self.num_sampled_tokens += len(token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            is_stopped=sample.finish_reason == "stop",
        )

    async def load(self, offer: WeightsOffer, *, announce: Any) -> LoadReport:
        """Freeze generation (requests and their KV stay), receive, load, go on.

        Args:
            announce: called once generation stands still, right before the broadcast is entered.

        Raises:
            WeightSyncError: the transfer failed; generation goes on with the old weights.
            EngineError: the engine died, or failed while loading.
        """
        started = time.monotonic()
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        try:
            await announce()
            entered = time.monotonic()
            fields = {name: getattr(offer, name) for name in WeightsOffer.__slots__}
            fields["tensors"] = [
                {name: getattr(spec, name) for name in TensorSpec.__slots__}
                for spec in offer.tensors
            ]
            replies = await self._llm.collective_rpc("receive_weights", args=(fields,))
            errors = [reply["error"] for reply in replies if reply["error"]]
            if errors:
                raise WeightSyncError("; ".join(errors))
            await self._llm.update_weight_version(str(offer.version))
            self.version = offer.version
        except WeightSyncError:
            raise
        except Exception as e:  # the worker's own exception arrives without its type
            raise EngineError(f"loading version {offer.version} failed: {e}") from e
        finally:
            await self._llm.resume_generation()
        now = time.monotonic()
        checksum_of_all = replies[0]["checksum"]
        return LoadReport(checksum=checksum_of_all, pause_s=now - started, load_s=now - entered)

    async def score(self, sequences: list[list[int]], *, request_id: str) -> list[list[float]]:
        """Return the logprob [seq-1] of every token given those before it, nothing cached."""
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        scores: list[list[float]] = []
        for index, token_ids in enumerate(sequences):
            prompt = tokens_input(token_ids)
            async for output in self._llm.generate(prompt, params, f"{request_id}-{index}"):
                if output.finished:
                    known = output.prompt_logprobs or []  # [seq]; the first token has none
                    steps = zip(token_ids[1:], (s for s in known[1:] if s), strict=True)
                    scores.append([step[token].logprob for token, step in steps])
        return scores

    def shut_down(self) -> None:
        """End the engine's processes; one that hangs in a broadcast is killed."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


def _start_llm(arguments: AsyncEngineArgs, meter: LoadMeter | None) -> AsyncLLM:
    """Start the engine processes; with a meter they tell it what they do."""
    if meter is None:
        return AsyncLLM.from_engine_args(arguments)
    llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: _LoadWatch(meter)])
    manager = llm.logger_manager
    assert manager is not None, "vLLM has one whenever there are loggers"
    manager.stat_loggers = [  # Prometheus' own counts at every step, and nobody asks for it
        each for each in manager.stat_loggers if not isinstance(each, PrometheusStatLogger)
    ]
    return llm
