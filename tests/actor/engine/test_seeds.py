"""Laws of the random numbers of a real engine: those of a request are its own."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actor.rollout.episode import Turn
from actor.seeds import SamplingSeeds, engine_seed
from common.config.actor import ActorSection
from common.config.model import ModelSection
from tests.actor.engine.engine_rig import save_tiny_policy
from tests.actor.rollout.playing import LEASE

PROMPT = [5, 9, 30, 7]
LONG_PROMPT = [4 + n % 200 for n in range(400)]
NUM_TOKENS = 24


def with_engine(policy: Path, seed: int, law: Any) -> Any:
    """Return what a law returns with an engine of such a seed."""
    from actor.engine.engine import Engine

    async def run() -> Any:
        actor = ActorSection(max_concurrent=16, max_model_len=512)
        model = ModelSection(path=str(policy), dtype="float32")
        engine = await Engine.start(model, actor, end_of_turn_ids=[], seed=seed, is_repeatable=True)
        try:
            return await law(engine)
        finally:
            engine.shut_down()

    return asyncio.run(run())


def ask(engine: Any, name: str, *, seed: int | None, prompt: list[int] = PROMPT) -> Any:
    asked: Coroutine[Any, Any, Turn] = engine.generate(
        prompt, request_id=name, max_tokens=NUM_TOKENS, salt=lambda: name, seed=seed
    )
    return asked


async def sampled(engine: Any) -> dict[str, list[int]]:
    """Return the tokens of members of a group, and of requests without a seed, all at once."""
    members = [replace(LEASE, episode_id=f"g/{n}", member=n, seed=n) for n in range(4)]
    seeds = {f"member {n}": SamplingSeeds(each).next() for n, each in enumerate(members)}
    asked = {name: ask(engine, name, seed=seed) for name, seed in seeds.items()}
    asked |= {f"unseeded {n}": ask(engine, f"unseeded {n}", seed=None) for n in range(4)}
    asked["long"] = ask(engine, "long", seed=7, prompt=LONG_PROMPT)
    results = await asyncio.gather(*asked.values())
    again = await ask(engine, "again", seed=seeds["member 2"])
    tokens = {name: turn.token_ids for name, turn in zip(asked, results, strict=True)}
    return tokens | {"again": again.token_ids}


@pytest.mark.slow
@pytest.mark.long
def test_seeded_requests_agree_between_engines_unseeded_differ(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny_policy(tmp_path, is_tied=False)  # Random weights can sample any token.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    first, second = (
        with_engine(tmp_path, engine_seed(0, name="two", incarnation=life), sampled)
        for life in "ab"
    )
    seeded = [name for name in first if not name.startswith("unseeded")]
    assert {name: first[name] for name in seeded} == {name: second[name] for name in seeded}
    assert first["again"] == first["member 2"], "what else is sampled changes nothing"
    own = [tuple(found[f"unseeded {n}"]) for found in (first, second) for n in range(4)]
    members = [tuple(first[f"member {n}"]) for n in range(4)]
    assert len({*own, *members}) == 12
