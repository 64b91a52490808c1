"""vLLM's scores of a small network: after its start, and after a published version."""

import asyncio
import os
import re
from dataclasses import replace
from pathlib import Path

import zmq.asyncio

from actor.engine.engine import Engine
from actor.engine.weights import WeightLink
from benchmarks.conformance.learner_side import SEQUENCES, Scores, gap_of
from benchmarks.conformance.part_results import PartResult, Verdict, compared, refused
from common.checks.model_kind import check_window
from common.config.compute import EnforceEager, WeightsTransport
from common.config.run_config import ActorSection, ModelSection
from common.errors import ConfigError, EngineError, WeightSyncError
from common.store.run_dir import RunDir
from common.wire.security import create_keys
from common.wire.sockets import Router
from common.wire.weight_messages import WeightsJoin
from learner.weights.publisher import Publisher
from learner.weights.routes import PublishSettings
from learner.weights.snapshot import PublishedWeights

HOST = "127.0.0.1"
START_S = 240.0
PUBLISH_S = 60.0
MAX_MODEL_LEN = 128
KV_CACHE_GIB = 1
CAUSE = re.compile(r"\b\w+Error: [^();]+")
MOST_WORDS = 300  # Characters of vLLM's message.


def examine_engine(
    path: Path, version: PublishedWeights, *, first: Scores, second: Scores, folder: Path
) -> dict[str, PartResult]:
    """Return the findings of `rollout` and `publish`.

    Args:
        path: checkpoint that the learner wrote.
        version: the second weights, by their published names.
        first, second: expected scores of both weights.
        folder: becomes the run directory of the publisher.
    """
    try:
        check_window(path, MAX_MODEL_LEN, shown="MODEL")
    except ConfigError as error:
        return {"rollout": refused(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return asyncio.run(_examine(path, version, first, second, folder))


async def _examine(
    path: Path, version: PublishedWeights, first: Scores, second: Scores, folder: Path
) -> dict[str, PartResult]:
    try:
        engine = await Engine.start(
            ModelSection(path=str(path), dtype="float32"),
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
    except (EngineError, ConfigError) as error:
        return {"rollout": _cannot(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
    found: dict[str, PartResult] = {}
    try:
        found["rollout"] = compared(gap_of(await _scored(engine, "first"), first))
        found["publish"] = await _published(engine, version, second, folder)
        return found
    except EngineError as error:
        if not found:
            return {"rollout": _cannot(error), "publish": PartResult(verdict=Verdict.NOT_RUN)}
        # The engine could score before the version, so the load of the version is at fault.
        return {**found, "publish": replace(_cannot(error), verdict=Verdict.WRONG)}
    finally:
        engine.shut_down()


def _cannot(error: Exception) -> PartResult:
    words = " ".join(str(error).split()).removeprefix("engine did not start: ")
    causes = CAUSE.findall(words)  # The quoted lines of a log end with the cause.
    message = causes[-1] if causes else words
    return PartResult(verdict=Verdict.ENGINE_CANNOT, message=message[:MOST_WORDS].strip())


async def _scored(engine: Engine, name: str) -> Scores:
    return await engine.score(SEQUENCES, request_id=name)


async def _published(
    engine: Engine, version: PublishedWeights, expected: Scores, folder: Path
) -> PartResult:
    """Send the second weights as a learner sends a version; compare the engine's new scores."""
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
        return compared(gap_of(await _scored(engine, "second"), expected))
    except WeightSyncError as error:
        words = " ".join(str(error).split())
        return PartResult(verdict=Verdict.WRONG, message=words[:MOST_WORDS])
    finally:
        task.cancel()
        await asyncio.wait([task])
        link.close()
        context.destroy(linger=0)
        publisher.stop()
