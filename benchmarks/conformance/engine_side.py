"""vLLM's scores of a small network: after its start, and after a published version."""

import asyncio
import multiprocessing
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import zmq.asyncio
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.engine import utils as engine_utils

from actor.engine.engine import Engine
from actor.weights.receive import WeightLink
from benchmarks.conformance.learner_side import SEQUENCES, Scores, gap_of, mean_gap_of
from benchmarks.conformance.part_results import (
    NETWORK_ERRORS,
    PartResult,
    Verdict,
    compared,
    engine_failure,
    refused,
    rounded,
)
from common.config.actor import ActorSection, EnforceEager
from common.config.learner import WeightsTransport
from common.config.model import ModelSection
from common.errors import ConfigError, EngineError, WeightSyncError
from common.store.run_dir import RunDir
from common.weights.messages import WeightsJoin
from common.wire.security import create_keys
from common.wire.sockets import Router
from learner.policy.model_kind import check_engine_equal
from learner.weights.publisher import Publisher
from learner.weights.source import PublishedWeights
from learner.weights.transfer import PublishSettings

HOST = "127.0.0.1"
START_S = 240.0
PUBLISH_S = 60.0
MAX_MODEL_LEN = 128
KV_CACHE_GIB = 1
CAUSE = re.compile(r"\b\w+Error: (?:(?!Loading safetensors)[^();])+")
PREFIX = re.compile(r"\(\w+ pid=\d+\) \w+ [\d-]+ [\d:]+ \[[\w.]+:\d+\] ?")  # Prefix of a log line.
MARKS = re.compile(r"[\^~]{3,}")  # Marks below a line of code.
NO_ENGINE = (Verdict.NO_KERNEL, Verdict.REJECTED)
MOST_WORDS = 300  # Characters of vLLM's message.


def examine_engine(
    path: Path,
    version_in: Callable[[torch.dtype], PublishedWeights],
    *,
    first: Scores,
    second: Scores,
    folder: Path,
) -> dict[str, PartResult]:
    """Return the findings of `rollout` and `publish`: in fp32, or in bf16 if vLLM has no fp32.

    Args:
        path: checkpoint with the first weights.
        version_in: returns the second weights, by their published names, in a dtype.
        first, second: expected scores of both weights.
        folder: gets the run directories of the publishers.
    """
    try:
        check_engine_equal(path, MAX_MODEL_LEN, shown="MODEL")
    except ConfigError as error:
        return {"rollout": refused(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    exact = _examine(path, "float32", version_in(torch.float32), first, second, folder / "fp32")
    results = asyncio.run(exact)
    if results["rollout"].verdict not in NO_ENGINE:
        return results
    why = results["rollout"].message
    version = version_in(torch.bfloat16)
    again = _examine(path, "bfloat16", version, first, second, folder / "bf16")
    in_bf16 = asyncio.run(again)
    rollout = in_bf16["rollout"]
    if rollout.verdict in NO_ENGINE:
        same = rollout.message == why
        message = why if same else f"fp32: {why}; bf16: {rollout.message}"
        return {**in_bf16, "rollout": engine_failure(message)}
    message = f"vLLM on the CPU computes this family in bf16 only ({why})"
    return {**in_bf16, "rollout": replace(rollout, message=message)}


def fork_engines(architecture: str) -> None:
    """Fork an engine's process from this one, with the network's class: it imports vLLM once.

    It needs a process in which torch has one thread.
    """
    forked = partial(multiprocessing.get_context, "fork")
    setattr(engine_utils, "get_mp_context", forked)  # noqa: B010 - a private name of vLLM
    entry = ModelRegistry.models.get(architecture)
    if entry is not None:
        with suppress(ImportError):  # The engine reports it.
            ModelRegistry.register_model(architecture, entry.load_model_cls())


async def _examine(
    path: Path, dtype: str, version: PublishedWeights, first: Scores, second: Scores, folder: Path
) -> dict[str, PartResult]:
    """Return the result of one engine: its scores compared with the learner's."""
    judged = compared if dtype == "float32" else rounded
    gap = gap_of if dtype == "float32" else mean_gap_of
    try:
        engine = await Engine.start(
            ModelSection(path=str(path), dtype=dtype),
            ActorSection(
                max_concurrent=4,
                max_model_len=MAX_MODEL_LEN,
                kv_cache_gib=KV_CACHE_GIB,
                start_timeout_s=START_S,
                enforce_eager=EnforceEager.TRUE,
            ),
            end_of_turn_ids=[],
            seed=0,
        )
    except NETWORK_ERRORS as error:
        return {"rollout": _cannot(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
    results: dict[str, PartResult] = {}
    try:
        results["rollout"] = judged(gap(await _scored(engine, "first"), first))
        problem = await _published(engine, version, folder)
        results["publish"] = problem or judged(gap(await _scored(engine, "second"), second))
        return results
    except EngineError as error:
        if not results:
            return {"rollout": _cannot(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
        # The engine could score before the version, so the load of the version is at fault.
        return {**results, "publish": replace(_cannot(error), verdict=Verdict.WRONG)}
    finally:
        engine.shut_down()


def _cannot(error: Exception) -> PartResult:
    """Return the result for an engine that does not start."""
    words = PREFIX.sub("", " ".join(str(error).split())).removeprefix("engine did not start: ")
    words = " ".join(MARKS.sub("", words).split())
    # The quoted lines of a log end with the cause, or with the line that raised it.
    message = CAUSE.findall(words)[-1] if CAUSE.search(words) else words[-MOST_WORDS:]
    return engine_failure(message[:MOST_WORDS].strip())


async def _scored(engine: Engine, name: str) -> Scores:
    """Return the engine's scores of the test sequences."""
    return await engine.score(SEQUENCES, request_id=name)


async def _published(engine: Engine, version: PublishedWeights, folder: Path) -> PartResult | None:
    """Send the second weights as a learner sends a version; return a problem, if there is one."""
    run_dir = RunDir(root=folder)
    keys = create_keys(run_dir.keys)
    settings = PublishSettings(
        host=HOST,
        timeout_s=PUBLISH_S,
        max_canary_delta=1.0,
        bucket_bytes=16 << 20,
        transport=WeightsTransport.AUTO,
    )
    publisher = Publisher(Router(keys, host=HOST, port=0), settings)
    run_dir.publish_address("weights", f"tcp://{HOST}:{publisher.port}")
    publisher.start()
    context = zmq.asyncio.Context()
    hello = WeightsJoin(actor="actor", incarnation="1", devices=[""], version=-1)
    exclusive = asyncio.Lock()
    link = WeightLink(run_dir, keys, engine, hello=hello, exclusive=exclusive, context=context)
    await link.connect(timeout_s=PUBLISH_S)
    task = asyncio.create_task(link.run())
    try:
        await asyncio.to_thread(publisher.publish, version)
        loaded = asyncio.create_task(link.version_loaded.wait())
        await asyncio.wait([loaded, task], timeout=PUBLISH_S, return_when=asyncio.FIRST_COMPLETED)
        loaded.cancel()
        if task.done():
            task.result()
        if engine.version != version.version:
            return PartResult(verdict=Verdict.WRONG, message="the version was not loaded in time")
        return None
    except WeightSyncError as error:
        words = " ".join(str(error).split())
        return PartResult(verdict=Verdict.WRONG, message=words[:MOST_WORDS])
    finally:
        task.cancel()
        await asyncio.wait([task])
        link.close()
        context.destroy(linger=0)
        publisher.stop()
