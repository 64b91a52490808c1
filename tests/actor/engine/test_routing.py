"""Laws of the experts that a real vLLM engine records while it samples."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from actor.rollout.episode import Turn
from common.config.algorithm import AlgorithmSection
from learner.batch.batching import collate_tokens
from tests.actor.engine.engine_rig import Rig
from tests.actor.engine.test_engine import make_prompts
from tests.actor.engine.test_experts import save_policy_of

pytestmark = pytest.mark.slow

LAYERS = 2
CHOSEN = 2


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        rig = Rig(
            tmp_path_factory.mktemp("rig"),
            dtype="bfloat16",
            is_tied=False,
            save=lambda path: save_policy_of(path, "qwen3_moe"),
            algorithm=AlgorithmSection(routing_replay=True),
        )
        yield rig
        rig.close()


@torch.no_grad()
def scores_of(rig: Rig, prompt: list[int], turn: Turn, *, replays: bool) -> Any:
    """Return the trainer's fp32 nats of a turn, with the engine's experts or its own."""
    ids = np.array([*prompt, *turn.token_ids])
    scored = np.arange(len(ids)) >= len(prompt)
    assert turn.experts is not None
    chosen = np.zeros((len(ids), LAYERS, CHOSEN), dtype=turn.experts.dtype)
    chosen[:-1] = turn.experts
    recorded = [(chosen, np.arange(len(ids)) < len(ids) - 1)] if replays else None
    passes = rig.trainer._gradients.passes
    tokens = collate_tokens(
        [ids], [scored], device="cpu", is_packed=passes.is_packed, recorded=recorded
    )
    return passes.score(tokens).logprobs.numpy()


@pytest.mark.long
def test_engine_records_experts_of_prompts_samples_and_cached_prefixes(rig: Rig) -> None:
    async def law() -> None:
        (prompt,) = make_prompts(1, num_tokens=70)
        rig.engine.version = 0
        turn = await rig.generate("first", prompt, max_tokens=20)
        assert turn.experts is not None
        assert turn.experts.dtype == np.uint8
        assert turn.experts.shape == (70 + len(turn.token_ids) - 1, LAYERS, CHOSEN)
        again = await rig.generate("second", [*prompt, *turn.token_ids, 5, 6], max_tokens=3)
        assert again.num_cached >= 64
        assert again.experts is not None
        known = turn.experts
        assert np.array_equal(np.sort(again.experts[: len(known)]), np.sort(known))
        asked = {f"round:{n}": each for n, each in enumerate(make_prompts(3, num_tokens=40))}
        seeds = dict.fromkeys(asked, 1)
        turns = await rig.engine.generate_together(
            asked, max_tokens=4, salt=lambda: "x", seeds=seeds
        )
        assert [each.experts.shape[0] for each in turns.values()] == [  # pyright: ignore
            40 + len(each.token_ids) - 1 for each in turns.values()
        ]

    rig.run(law())


@pytest.mark.long
def test_replay_brings_the_trainer_closer_to_the_engine(rig: Rig) -> None:
    """A bf16 engine and an fp32 trainer: routers near a tie choose differently without replay."""

    async def law() -> None:
        prompts = make_prompts(12, num_tokens=60)
        turns = await asyncio.gather(
            *(rig.generate(f"gain-{n}", each, max_tokens=64) for n, each in enumerate(prompts))
        )
        gaps: dict[bool, list[float]] = {True: [], False: []}
        rig.trainer._gradients.passes.scoring = _exact(rig)
        for prompt, turn in zip(prompts, turns, strict=True):
            for replays, found in gaps.items():
                scores = scores_of(rig, prompt, turn, replays=replays)
                found += np.abs(scores - np.array(turn.logprobs)).tolist()
        mean = {replays: float(np.mean(found)) for replays, found in gaps.items()}
        most = {replays: max(found) for replays, found in gaps.items()}
        assert mean[True] < 0.8 * mean[False]
        assert most[True] < most[False] / 4

    rig.run(law())


def _exact(rig: Rig) -> Any:
    scoring = rig.trainer._gradients.passes.scoring
    return replace(scoring, dtype=torch.float32, head_dtype=torch.float32)
