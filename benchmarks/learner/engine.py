"""The learner's part of measuring an engine: two versions, their transfers, their canaries."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from common.errors import EngineError
from common.host.child_process import ChildFailed, ChildProcess
from common.repository import ROOT
from common.store.run_dir import RunDir
from common.wire.security import create_keys
from common.wire.sockets import Router
from learner.training.trainer import Trainer
from learner.weights.lock import WeightsLock
from learner.weights.publisher import Publisher
from learner.weights.source import PublishedWeights
from learner.weights.transfer import PublishSettings
from tools.offline.scratch import save_policy

HOST = "127.0.0.1"
CHILD = "benchmarks.actor.engine"
REPORT = "bench_engine.json"
# CPU time of the actor's process: at most this for each token, and this for each turn beyond it.
MAX_TOKEN_MS = 0.015
MAX_TURN_MS = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """The settings of one measured engine."""

    dtype: str
    # Weights are read from disk; else the engine has random weights until version 0 arrives.
    has_weights: bool = True
    lora_rank: int = 0  # Above 0, versions contain adapters alone.
    gpu_memory_frac: float = 0.3
    num_prompts: int = 32
    max_tokens: int = 64
    enforce_eager: str = ""  # Value of `actor.enforce_eager`; "": the default.
    timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """The figures that one measured engine gives."""

    start_s: float
    tokens_per_s: float
    actor_ms_per_token: float  # CPU time of the process that asks the engine.
    # Each token has a logprob and a version, no logprob is positive, all versions are 1.
    is_sound: bool
    canary_delta: float  # The largest delta of the reported versions, in nats.
    publish_s: float  # Time of version 1 from offer to loaded.
    transfer_s: float  # Time of version 1 to transfer the buckets.
    pause_s: float  # Longest pause of sampling while the engine loads a version.
    num_bytes: int


def measure_engine(
    trainer: Trainer,
    model: PreTrainedModel,
    run: EngineRun,
    *,
    tokenizer_path: str,
    canary: list[list[int]],
    folder: Path,
) -> EngineFigures:
    """Start an engine as an actor does, publish two versions to it, let it sample.

    Versions use the transport of a run: CUDA IPC on the learner's GPU, gloo on a CPU.

    Args:
        trainer: of `model`; scores the canary.
        tokenizer_path: a checkpoint whose tokenizer fits the model's vocabulary.
        canary: [canary, seq] token ids that both sides score.

    Raises:
        EngineError: the engine failed, or did not end in time; holds its last log lines.
    """
    run_dir = RunDir(root=folder)
    keys = create_keys(run_dir.keys)
    path = folder / "policy"
    _save(path, model, tokenizer_path, has_weights=run.has_weights)
    weights_lock = WeightsLock(timeout_s=run.timeout_s)
    publisher = Publisher(
        Router(keys, host=HOST, port=0), _settings(run), weights_lock=weights_lock
    )
    run_dir.publish_address("weights", f"tcp://{HOST}:{publisher.port}")
    publisher.start()
    child = _start(run, run_dir, path)
    try:
        publisher.publish(_version(0, trainer, canary))
        child.wait_until(
            lambda: publisher.drain_metrics()["weights/members"] > 0, timeout_s=run.timeout_s
        )
        weights_lock.close()  # Wait until version 0 has been sent.
        publisher.drain_metrics()  # Exclude the transfer of version 0.
        _randomize(model)
        weights = _version(1, trainer, canary)
        publisher.publish(weights)
        measured = publisher.drain_metrics()
        report = run_dir.root / REPORT
        child.wait_until(report.exists, timeout_s=run.timeout_s)
        measured |= publisher.drain_metrics()
    except ChildFailed as error:
        raise EngineError(str(error)) from error
    finally:
        child.clear_away()  # This also ends vLLM's own processes.
        publisher.stop()
    return _figures(report, measured, num_bytes=weights.source.total_bytes)


def _figures(report: Path, measured: Mapping[str, float], *, num_bytes: int) -> EngineFigures:
    """Return the figures of the engine's report and of the publisher's metrics."""
    figures: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return EngineFigures(
        start_s=figures["start_s"],
        tokens_per_s=figures["tokens_per_s"],
        actor_ms_per_token=figures["actor_ms_per_token"],
        is_sound=figures["sound"] == 1.0,
        canary_delta=measured.get("weights/canary_abs_logprob", math.nan),
        publish_s=measured.get("publish/total_s", math.nan),
        transfer_s=measured.get("publish/transfer_s", math.nan),
        pause_s=measured.get("publish/pause_s", math.nan),
        num_bytes=num_bytes,
    )


def _save(path: Path, model: PreTrainedModel, tokenizer_path: str, *, has_weights: bool) -> None:
    """Write the checkpoint for the engine. Without weights this is fast for any model size."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
    if has_weights:
        save_policy(path, model, tokenizer)
        return
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _settings(run: EngineRun) -> PublishSettings:
    """Return the settings of the publisher."""
    return PublishSettings(host=HOST, timeout_s=run.timeout_s / 3, max_canary_delta=math.inf)


def _version(number: int, trainer: Trainer, canary: list[list[int]]) -> PublishedWeights:
    """Return the current weights as a version."""
    return PublishedWeights(
        version=number,
        source=trainer.live_weights(),
        canary_token_ids=canary,
        canary_logprobs=trainer.score(canary),
    )


@torch.no_grad()
def _randomize(model: PreTrainedModel) -> None:
    """Randomize the trained weights, so that the canary detects a version that did not arrive."""
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.requires_grad:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)


def _start(run: EngineRun, run_dir: RunDir, model_path: Path) -> ChildProcess:
    """Start the process of the engine."""
    settings = asdict(run) | {"model_path": str(model_path)}
    argv = [sys.executable, "-m", CHILD, str(run_dir.root), json.dumps(settings)]
    log = run_dir.root / "engine.log"
    return ChildProcess("engine", argv, log_path=log, cwd=ROOT)
