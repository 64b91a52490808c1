"""vLLM without this project: the baseline of the suite `actor`, which samples the same turns.

Run as `python -m benchmarks.actor.bare RUN_DIR WINDOW_S`. It samples the turns in `turns.json`
repeatedly with the run's configuration and writes `alone.json`.
"""

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from actor.engine.start import shut_down_llm, start_llm
from common.config.load import load_config
from common.store.run_dir import RunDir, write_atomically

NUM_WARM_UP = 64  # Number of episodes before the measurement starts.


class BareEngine:
    """`AsyncLLM` with an actor's arguments, and counters of its work."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._num_requests = 0
        self.tokens = {"prompt": 0, "cached": 0, "sampled": 0}

    async def sample(self, prompt_ids: list[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` sampled tokens."""
        params = SamplingParams(
            max_tokens=num_tokens,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        self._num_requests += 1
        prompt = tokens_input(prompt_ids, cache_salt="v0")
        token_ids: list[int] = []
        async for output in self._llm.generate(prompt, params, str(self._num_requests)):
            token_ids = list(output.outputs[0].token_ids)
            self.tokens["cached"] += output.num_cached_tokens or 0
        self.tokens["prompt"] += len(prompt_ids)
        self.tokens["sampled"] += num_tokens
        return token_ids

    def done(self) -> dict[str, float]:
        """Return tokens, processor seconds of this process and of the engine's, and the time."""
        own = psutil.Process()
        engine = sum(sum(child.cpu_times()[:2]) for child in own.children(recursive=True))
        cpu = {"actor": sum(own.cpu_times()[:2]), "engine": engine}
        return {**self.tokens, **cpu, "time_s": time.monotonic()}


async def measure(run_dir: RunDir, window_s: float) -> dict[str, float]:
    """Return the counters of the run's turns."""
    cfg = load_config(str(run_dir.config), [])
    llm, _ = start_llm(cfg.model, cfg.actor, seed=cfg.run.seed, meter=None)
    engine = BareEngine(llm)
    try:
        turns = json.loads((run_dir.root / "turns.json").read_text(encoding="utf-8"))
        return await _replay(engine, turns, cfg.actor.max_concurrent, window_s)
    finally:
        shut_down_llm(llm, timeout_s=1.0)


async def _replay(
    engine: BareEngine, episodes: list[list[Any]], num_concurrent: int, window_s: float
) -> dict[str, float]:
    """Play `num_concurrent` episodes at once. The environment's answers take no time."""
    numbered = enumerate(itertools.cycle(episodes))

    async def play() -> None:
        """Play one episode after another until cancelled."""
        for _, episode in numbered:
            ids: list[int] = []
            for observed, num_sampled in episode:
                ids += observed
                ids += await engine.sample(ids[:], num_sampled)

    tasks = [asyncio.create_task(play()) for _ in range(num_concurrent)]
    while engine.tokens["sampled"] < NUM_WARM_UP * sum(n for _, n in episodes[0]):
        await asyncio.wait(tasks, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
    before = engine.done()
    ended, _ = await asyncio.wait(tasks, timeout=window_s, return_when=asyncio.FIRST_EXCEPTION)
    after = engine.done()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in ended:
        task.result()
    return {name: value - before[name] for name, value in after.items()}


if __name__ == "__main__":
    target = RunDir(root=Path(sys.argv[1]))
    result = asyncio.run(measure(target, float(sys.argv[2])))
    write_atomically(target.root / "alone.json", json.dumps(result))
