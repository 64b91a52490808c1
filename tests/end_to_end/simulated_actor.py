"""An actor with a simulated engine, or with one that many actors share.

Leases, heartbeats, hub sessions, trajectories and their delivery are those of a real actor. A
simulated turn takes the time that an engine takes for it, and its tokens are random. A shared
engine is the command `serve`: real turns at version 0.
"""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from transformers import AutoTokenizer

from actor.formats.renderer import Renderer
from actor.rollout.episode import Turn
from benchmarks.actor import other_engine
from common.config.load import load_config
from common.config.run_config import RunConfig
from common.errors import EngineError
from common.store.run_dir import RunDir

# Rates of an engine that samples 50 tokens a second for each episode, 75 per turn on average. The
# range is wide, so that the actors' episodes do not end at the same time.
TOKEN_S = 0.02
MIN_TOKENS = 10
MAX_TOKENS = 140
START_S = 60.0


class TokenClock:
    """A replacement of the engine. Concurrent requests take no longer than a single one."""

    def __init__(self, *, vocab_size: int, token_s: float, lengths: tuple[int, int]) -> None:
        self._token_s = token_s
        self._lengths = lengths
        self._vocab_size = vocab_size
        self.version = 0
        self.frozen_s = 0.0  # Always 0, because no weights are loaded.

    async def generate(
        self, prompt_ids: list[int], *, max_tokens: int, seed: int, **_: Any
    ) -> Turn:
        """Return random tokens after a simulated sampling time. Arguments are as of the engine."""
        chance = random.Random(seed)
        num_timed = chance.randint(*self._lengths)
        await asyncio.sleep(num_timed * self._token_s)
        num = min(max_tokens, num_timed)
        return Turn(
            token_ids=[chance.randrange(self._vocab_size) for _ in range(num)],
            logprobs=[-1.0] * num,
            versions=[self.version] * num,
            num_prompt=len(prompt_ids),
        )


class SharedEngine:
    """A client of the command `serve`, in place of an engine of this process."""

    version = 0
    frozen_s = 0.0

    def __init__(self, url: str, *, end_of_turn_ids: list[int]) -> None:
        self._url = f"{url}/completions"
        self._end_of_turn_ids = end_of_turn_ids
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))

    async def generate(
        self,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        salt: Callable[[], str],
        seed: int,
        **_: Any,
    ) -> Turn:
        """Sample a turn. Arguments are as of the engine."""
        request = {
            "model": "policy",
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "cache_salt": salt(),
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": self._end_of_turn_ids,
            "ignore_eos": True,
        }
        async with self._http.post(self._url, json=request) as response:
            answer = await response.json()
        if response.status != 200:
            raise EngineError(f"the shared engine answered {response.status}: {answer!r:.500}")
        (choice,) = answer["choices"]
        return Turn(
            token_ids=choice["token_ids"],
            logprobs=choice["logprobs"]["token_logprobs"],
            versions=[self.version] * len(choice["token_ids"]),
            is_stopped=choice["finish_reason"] == "stop",
            num_prompt=len(prompt_ids),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


async def play(
    cfg: RunConfig,
    run_dir: RunDir,
    *,
    number: int,
    token_s: float,
    lengths: tuple[int, int],
    url: str,
) -> None:
    """Play until SIGTERM, with the engine at `url` if it is not empty."""
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    renderer = Renderer(tokenizer)
    clock = TokenClock(vocab_size=len(tokenizer), token_s=token_s, lengths=lengths)
    shared = SharedEngine(url, end_of_turn_ids=renderer.end_of_turn_ids) if url else None
    try:
        await other_engine.play(
            cfg,
            run_dir,
            name=f"actor-{number}",
            life=f"life-{number}",
            engine=shared or clock,
            renderer=renderer,
            start_s=START_S,
        )
    finally:
        if shared is not None:
            await shared.close()


def main(
    folder: str,
    number: str,
    num_slots: str,
    token_s: str = str(TOKEN_S),
    least: str = str(MIN_TOKENS),
    most: str = str(MAX_TOKENS),
    url: str = "",
) -> None:
    """Run as one actor of a run, with `num_slots` concurrent episodes.

    Args:
        least, most: tokens of a simulated turn.
        url: the address of a shared engine; "": a simulated one.
    """
    slots = (f"actor.max_concurrent={num_slots}", f"actor.min_concurrent={num_slots}")
    run_dir = RunDir(root=Path(folder))
    cfg = load_config(str(run_dir.config), slots)
    lengths = (int(least), int(most))
    uvloop.run(
        play(cfg, run_dir, number=int(number), token_s=float(token_s), lengths=lengths, url=url)
    )
