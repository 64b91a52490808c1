"""Plays the rows of episodes with vLLM, and counts the prompt tokens from its prefix cache.

Run as `python -m benchmarks.actor.prefix_cache FOLDER`. It reads `rows.json`, the context and the
sampled tokens of each row by name, and writes `prefixes.json`, the cached prompt tokens by name.
"""

import asyncio
import json
import sys
from pathlib import Path

from actor.engine.start import shut_down_llm, start_llm
from benchmarks.actor.bare import BareEngine
from common.config.load import load_config
from common.store.run_dir import write_atomically

Rows = list[tuple[list[int], list[int]]]  # Context and sampled tokens of each row, in order.


async def measure(episodes: dict[str, Rows]) -> dict[str, int]:
    """Return the number of cached prompt tokens of each episode."""
    cfg = load_config("quickstart", ["actor.max_model_len=2048"])
    llm, _ = start_llm(cfg.model, cfg.actor, seed=cfg.run.seed, meter=None)
    engine = BareEngine(llm)
    cached: dict[str, int] = {}
    try:
        for name, rows in episodes.items():
            cached[name] = 0
            for context, sampled in rows:
                before = engine.tokens["cached"]
                await engine.sample(context, 1)
                cached[name] += engine.tokens["cached"] - before
                # The sampled tokens are given, so a second prompt puts them into the cache.
                await engine.sample([*context, *sampled], 1)
        return cached
    finally:
        shut_down_llm(llm, timeout_s=1.0)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
    write_atomically(folder / "prefixes.json", json.dumps(asyncio.run(measure(rows))))
