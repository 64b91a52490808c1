"""Construction of the engine: vLLM's arguments, processes and load meter."""

import faulthandler
import json
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import zmq
from huggingface_hub.errors import StrictDataclassError
from pydantic import ValidationError
from vllm import envs
from vllm.config import VllmConfig
from vllm.config.model import ModelDType
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import BackgroundResources, MPClient
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerBase, StatLoggerFactory

from actor.engine import routing
from actor.engine.adapter import engine_options
from actor.engine.arguments import as_declared
from actor.engine.concurrency import EngineLoad
from actor.engine.cpu.text_models import register_text_models
from actor.engine.process_watch import ProcessWatch, kernel_hint, own_engines
from actor.engine.whole_turns import send_whole_turns
from common.config.actor import ActorSection, EnforceEager
from common.config.learner import FULL, LoraSection
from common.config.model import ModelSection
from common.errors import ConfigError, EngineError
from common.host.process_settings import ONE_THREAD, is_set_by_user

logger = logging.getLogger(__name__)

PROGRESS_S = 15.0  # Seconds between two log lines about a start.
# Only whole blocks are reused, so each turn recomputes the tokens after the last one. vLLM's
# default on a CPU is 128.
CPU_BLOCK_TOKENS = 32
BINDING = ("VLLM_CPU_OMP_THREADS_BIND", ONE_THREAD["VLLM_CPU_OMP_THREADS_BIND"])
# Errors of vLLM about a model, the arguments or the machine.
REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError, StrictDataclassError)
WHOLE_TOKENS = 8_192  # Tokens of a step when prompts are not computed in chunks.


def engine_arguments(
    model: ModelSection,
    cfg: ActorSection,
    *,
    seed: int,
    has_weights: bool = True,
    lora: LoraSection = FULL,
    is_repeatable: bool = False,
    records_experts: bool = False,
) -> AsyncEngineArgs:
    """Return vLLM's arguments for an engine of this configuration."""
    # A prompt that is computed in chunks draws a sample for each chunk and rewinds the generator
    # afterwards. The CPU generators of a repeatable run, one for each request, cannot be rewound.
    is_whole = is_repeatable and current_platform.is_cpu()
    engine_args = as_declared(cfg.engine_args)
    if is_whole and engine_args.get("enable_chunked_prefill"):
        raise ConfigError(
            "actor.engine_args.enable_chunked_prefill=true: an engine on a CPU computes each prompt"
            " in one step, so that its samples can be repeated. Remove the argument"
        )
    if current_platform.is_cpu() and engine_args.get("enable_expert_parallel"):
        raise ConfigError(
            "actor.engine_args.enable_expert_parallel=true: vLLM's kernel of experts on a CPU needs"
            " all experts in each worker, and crashes without them. Remove the argument"
        )
    defaults: dict[str, Any] = dict(
        model=model.path,
        # The files that the learner reads, also beside those of Mistral's own format.
        load_format="hf" if has_weights else "dummy",
        config_format="hf",
        # A model for images or sound starts as its language model: vLLM makes no towers.
        language_model_only=True,
        dtype=cast(ModelDType, model.dtype),
        seed=seed,
        max_model_len=cfg.max_model_len,
        max_num_seqs=cfg.max_concurrent,
        tensor_parallel_size=cfg.tensor_parallel_size,
        gpu_memory_utilization=cfg.gpu_memory_frac,
        enforce_eager=is_eager(cfg.enforce_eager),
        enable_sleep_mode=cfg.sleep > 0,
        enable_prefix_caching=True,
        enable_chunked_prefill=False if is_whole else None,
        max_num_batched_tokens=max(WHOLE_TOKENS, cfg.max_model_len) if is_whole else None,
        block_size=CPU_BLOCK_TOKENS if current_platform.is_cpu() else None,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="actor.engine.worker.WorkerExtension",
        weight_transfer_config=WeightTransferConfig(backend="longstride"),
        worker_cls="actor.engine.cpu.worker.TileWorker" if current_platform.is_cpu() else "auto",
        # The class, not its name: vLLM replaces the name "uni" by "mp" on CPU. The two processes of
        # "mp" poll each other and occupy a core.
        distributed_executor_backend=UniProcExecutor if cfg.tensor_parallel_size == 1 else "mp",
        disable_log_stats=True,
        num_gpu_blocks_override=cfg.kv_cache_blocks or None,
        **_merged(engine_options(lora), routing.engine_options(records_experts)),
    )
    return AsyncEngineArgs(**(defaults | engine_args))


def is_eager(cfg: EnforceEager) -> bool:
    """Return whether an engine on this machine runs without compilation."""
    if cfg is EnforceEager.AUTO:
        return current_platform.is_cpu()
    return cfg is EnforceEager.TRUE


@contextmanager
def reporting_progress(*, is_compiled: bool) -> Iterator[None]:
    """Log every `PROGRESS_S` that the engine still starts, and where compiled code is kept."""
    is_over = threading.Event()
    started = time.monotonic()
    doing = f"compiling cache={envs.VLLM_CACHE_ROOT}" if is_compiled else "loading"

    def report() -> None:
        """Log at regular intervals until the start is over."""
        while not is_over.wait(PROGRESS_S):
            passed_s = time.monotonic() - started
            logger.info("engine is still starting passed_s=%.0f doing=%s", passed_s, doing)

    reporter = threading.Thread(target=report, name="engine-start", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        is_over.set()
        reporter.join()


def _merged(adapters: dict[str, Any], experts: dict[str, Any]) -> dict[str, Any]:
    """Return the options of both; each may have its own `additional_config`."""
    key = "additional_config"
    both = adapters.get(key, {}) | experts.get(key, {})
    return adapters | experts | ({key: both} if both else {})


def use_threads_of_a_run() -> None:
    """Give an engine on a CPU the threads that the launcher gives an actor.

    Several threads that are bound to cores wait for each other at every layer. Beside a busy core
    an answer then takes ten times as long. OMP_NUM_THREADS of the user's own shell is kept.
    """
    if not current_platform.is_cpu():
        return
    if not is_set_by_user(os.environ):
        os.environ.update(ONE_THREAD)
    os.environ.setdefault(*BINDING)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))


def start_llm(
    model: ModelSection,
    cfg: ActorSection,
    *,
    seed: int,
    meter: EngineLoad | None,
    has_weights: bool = True,
    lora: LoraSection = FULL,
    is_repeatable: bool = False,
    records_experts: bool = False,
) -> tuple[AsyncLLM, ProcessWatch]:
    """Start the engine's processes; blocks. With a meter, the engine reports its load to it.

    Raises:
        ConfigError: vLLM refuses the arguments, so a retry cannot succeed.
        EngineError: the processes did not start; the message names the exit and the last lines.
    """
    use_threads_of_a_run()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(cfg.kv_cache_gib))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(max(1, int(cfg.start_timeout_s))))
    # Makes a spawned process print its stack when it crashes.
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    own_engines()
    if not faulthandler.is_enabled():
        faulthandler.enable()  # Makes a forked process print its stack when it crashes.
    watch = ProcessWatch()
    try:
        is_compiled = not is_eager(cfg.enforce_eager)
        with watch.printing(), reporting_progress(is_compiled=is_compiled):
            arguments = engine_arguments(
                model,
                cfg,
                seed=seed,
                has_weights=has_weights,
                lora=lora,
                is_repeatable=is_repeatable,
                records_experts=records_experts,
            )
            config = engine_config(arguments)
            if records_experts:
                routing.check_recordable(config)
            llm = _start(config, meter)
    except ConfigError:
        raise
    except (RuntimeError, ValueError, OSError, TimeoutError) as error:
        _close_contexts_in(error)
        raise EngineError(f"engine did not start: {watch.describe_failed_start(error)}") from error
    manager = _resources(llm).engine_manager
    watch.processes = list(getattr(manager, "processes", []))
    return llm, watch


def engine_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's configuration for these arguments on this machine. Raises: ConfigError.

    vLLM's kernels for CPUs (0.32) do not keep recurrent states, such as Mamba's, inside a prompt.
    Such models have no cache of prefixes there. Its faster kernel of latent attention computes in
    bf16 only, so fp32 uses the other one.
    """
    if not current_platform.is_cpu():
        return _checked(arguments)
    register_text_models(_architectures(arguments.model))
    try:
        config = _checked(arguments)
    except ConfigError:
        # vLLM refuses a cache of recurrent states, as of Qwen3.5, beside prompts in one step.
        if arguments.enable_chunked_prefill is not False or not arguments.enable_prefix_caching:
            raise
        arguments.enable_prefix_caching = False
        config = _checked(arguments)
    if config.cache_config.enable_prefix_caching and config.model_config.has_inner_state:
        arguments.enable_prefix_caching = False
        config = _checked(arguments)
    is_fp32 = config.model_config.dtype == torch.float32
    if config.model_config.use_mla and is_fp32 and config.attention_config.backend is None:
        arguments.attention_backend = AttentionBackendEnum.CPU_MLA
        config = _checked(arguments)
    return config


def _architectures(path: str) -> list[str]:
    """Return the classes that a model's config.json names; [] without this file."""
    file = Path(path) / "config.json"
    if not file.is_file():
        return []
    return json.loads(file.read_text(encoding="utf-8-sig")).get("architectures") or []


def shut_down_llm(llm: AsyncLLM, *, timeout_s: float) -> None:
    """Stop the engine's processes, and close the sockets that vLLM leaves to the garbage collector.

    Call it on the engine's event loop.
    """
    llm.shutdown(timeout=timeout_s)
    resources = _resources(llm)
    for socket in (resources.output_socket, resources.input_socket, resources.stats_update_socket):
        if socket is not None:  # A dead engine closes them itself, a little later.
            socket.close(linger=0)
    resources.ctx.destroy(linger=0)


def _resources(llm: AsyncLLM) -> BackgroundResources:
    return cast(MPClient, llm.engine_core).resources


def _close_contexts_in(error: BaseException) -> None:
    """Close the ZeroMQ context of a half-built engine, which only its constructor holds."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        context = frame.f_locals.get("sync_ctx")
        if isinstance(context, zmq.Context):
            context.destroy(linger=0)


class _LoadWatch(StatLoggerBase):
    """Receives vLLM's statistics after every engine step, and adds them to the meter."""

    def __init__(self, meter: EngineLoad) -> None:
        self._meter = meter

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Add the statistics of one engine step to the meter."""
        if scheduler_stats is not None:
            self._meter.add(
                num_running=scheduler_stats.num_running_reqs,
                num_waiting=scheduler_stats.num_waiting_reqs,
                kv_frac=scheduler_stats.kv_cache_usage,
                num_preemptions=iteration_stats.num_preempted_reqs if iteration_stats else 0,
            )

    def log_engine_initialized(self) -> None: ...


def _checked(arguments: AsyncEngineArgs) -> VllmConfig:
    """Return vLLM's configuration for these arguments. Raises: ConfigError."""
    try:
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except REFUSALS as error:
        reason = _refusal_reason(error)
        raise ConfigError(
            f"{kernel_hint(reason)}vLLM refuses its arguments: {reason}."
            " Change the keys of actor or model."
        ) from error


def _refusal_reason(error: Exception) -> str:
    """Return why vLLM refuses its arguments, as one line without the arguments themselves."""
    if isinstance(error, ValidationError):
        texts = [each["msg"].removeprefix("Value error, ") for each in error.errors()]
        return " ".join("; ".join(texts).split()).rstrip(".")
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def connect_llm(config: VllmConfig, **options: Any) -> AsyncLLM:
    """Return vLLM's engine for whole turns.

    The end-of-sequence token is read once. vLLM borrows a tokenizer from a pool to read it for each
    request.

    Args:
        options: arguments of `AsyncLLM.from_vllm_config`.
    """
    send_whole_turns(config)
    llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True, **options)
    eos = llm.renderer.get_eos_token_id()
    llm.renderer.get_eos_token_id = lambda: eos
    return llm


def _start(config: VllmConfig, meter: EngineLoad | None) -> AsyncLLM:
    """Start vLLM's engine; it sends whole turns, and reports its load to the meter."""
    loggers: list[StatLoggerFactory] = [lambda *_: _LoadWatch(meter)] if meter is not None else []
    llm = connect_llm(config, stat_loggers=loggers or None)
    if meter is None:
        return llm
    manager = llm.logger_manager
    assert manager is not None, "vLLM has one whenever there are loggers"
    manager.stat_loggers = [  # Prometheus counts at every step, and its counts are not used.
        stat_logger
        for stat_logger in manager.stat_loggers
        if not isinstance(stat_logger, PrometheusStatLogger)
    ]
    return llm
