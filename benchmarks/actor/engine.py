"""An engine under measurement: it starts, loads two versions from a learner, samples and reports.

The learner's measurements run it as `python -m benchmarks.actor.engine RUN_DIR SETTINGS`. The
settings are a JSON object. The report is `bench_engine.json` in the run directory.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import zmq.asyncio

from actor.engine.engine import Engine
from actor.weights.receive import WeightLink
from common.config.actor import ActorSection
from common.config.learner import LoraSection
from common.config.load import load_config
from common.config.model import ModelSection
from common.errors import EngineError
from common.store.run_dir import RunDir, write_atomically
from common.weights.messages import WeightsJoin
from common.wire.security import load_keys

REPORT = "bench_engine.json"
NUM_VERSIONS = 2


async def measure(run_dir: RunDir, settings: dict[str, Any]) -> dict[str, float]:
    """Return the durations of start, loading and sampling.

    Args:
        run_dir: the learner publishes its address and keys there.
        settings: model_path, and the fields of the learner's `EngineRun`.

    Raises: EngineError: the versions did not arrive in time.
    """
    started = time.monotonic()
    cfg = actor_section(settings)
    model = ModelSection(path=settings["model_path"], dtype=settings["dtype"])
    engine = await Engine.start(
        model,
        cfg,
        end_of_turn_ids=[],
        seed=0,
        has_weights=settings["has_weights"],
        lora=LoraSection(rank=settings["lora_rank"]),
    )
    report = {"start_s": time.monotonic() - started}
    try:
        await _follow_learner(engine, run_dir, settings)
        report |= await _sample(engine, settings)
    finally:
        engine.shut_down()
    return report


def actor_section(settings: dict[str, Any]) -> ActorSection:
    """Return the configuration of an actor with these settings."""
    values = {
        "max_concurrent": settings["num_prompts"],
        "max_model_len": 2 * settings["max_tokens"] + 16,
        "gpu_memory_frac": settings["gpu_memory_frac"],
        "start_timeout_s": settings["timeout_s"],
    }
    if settings["enforce_eager"]:
        values["enforce_eager"] = settings["enforce_eager"]
    overrides = [f"actor.{key}={value}" for key, value in values.items()]
    return load_config(None, ["model.path=unset", *overrides]).actor


async def _follow_learner(engine: Engine, run_dir: RunDir, settings: dict[str, Any]) -> None:
    """Load versions until the last one is in the engine and its canary has been sent."""
    context = zmq.asyncio.Context()
    link = WeightLink(
        run_dir,
        load_keys(run_dir.keys),
        engine,
        hello=WeightsJoin(
            actor="bench", incarnation="bench", devices=await engine.device_ids(), version=-1
        ),
        exclusive=asyncio.Lock(),
        context=context,
    )
    await link.connect(timeout_s=settings["timeout_s"])
    try:
        async with asyncio.timeout(settings["timeout_s"]), asyncio.TaskGroup() as group:
            task = group.create_task(link.run())
            while engine.version < NUM_VERSIONS - 1:
                await link.version_loaded.wait()
                link.version_loaded.clear()
            task.cancel()
    except TimeoutError as error:
        raise EngineError(f"the engine holds version {engine.version} and no newer came") from error
    finally:
        link.close()
        context.destroy(linger=500)


async def _sample(engine: Engine, settings: dict[str, Any]) -> dict[str, float]:
    """Sample all prompts at once; return the speed and whether the samples are well formed."""
    prompts = range(settings["num_prompts"])
    started = time.monotonic()
    began_cpu_s = time.process_time()
    completions = await asyncio.gather(
        *(
            engine.generate(
                [1 + index % 7, 2, 3],
                request_id=f"bench-{index}",
                max_tokens=settings["max_tokens"],
                salt=lambda: "bench",
            )
            for index in prompts
        )
    )
    took_s = time.monotonic() - started
    cpu_s = time.process_time() - began_cpu_s
    tokens = [token for completion in completions for token in completion.token_ids]
    logprobs = [logprob for completion in completions for logprob in completion.logprobs]
    versions = [version for completion in completions for version in completion.versions]
    is_sound = len(tokens) == len(logprobs) == len(versions)
    is_sound = is_sound and all(logprob <= 0 for logprob in logprobs)
    is_sound = is_sound and set(versions) == {NUM_VERSIONS - 1}
    return {
        "num_sampled_tokens": float(len(tokens)),
        "tokens_per_s": len(tokens) / took_s,
        "actor_ms_per_token": 1e3 * cpu_s / len(tokens),
        "sound": float(is_sound),
    }


def main(argv: list[str]) -> None:
    """Measure an engine, and write the report into the run directory."""
    run_dir = RunDir(root=Path(argv[0]))
    report = asyncio.run(measure(run_dir, json.loads(argv[1])))
    write_atomically(run_dir.root / REPORT, json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
