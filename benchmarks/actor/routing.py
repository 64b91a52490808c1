"""The suite `routing`: the sampler-trainer difference with and without routing replay.

A mixture of experts with random weights samples in a bf16 engine. An fp32 learner scores the
sampled tokens: once its routers choose the experts, once it uses those that the engine recorded.
"""

import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from actor.engine.engine import Engine
from actor.rollout.episode import Turn
from benchmarks.table import BenchTable
from common.checks.machine import gpus
from common.config.compute import Precision
from common.config.learning import LearnerSection
from common.config.run_config import ActorSection, ModelSection
from common.launch.roles import ONE_THREAD
from learner.batch.batching import collate_tokens
from learner.batch.experts import Recorded
from learner.offline.scratch import make_tokenizer
from learner.policy.forward import Networks, Passes
from learner.policy.model import load_policy
from learner.policy.saving import save_tokenizer

VOCAB = 512
NUM_PROMPTS = 32
PROMPT_TOKENS = 60
TURN_TOKENS = 128
MAX_RATIO = 0.5  # The largest difference with replay over that without.


def run_suite(table: BenchTable) -> None:
    """Measure the differences with a small policy, in about two minutes."""
    table.title(f"Qwen3-MoE, 4 layers, 16 experts, 4 chosen; {NUM_PROMPTS} turns, engine in bf16")
    with tempfile.TemporaryDirectory(prefix="longstride-routing-") as folder:
        table.attempt("routing", lambda: _add_differences(table, Path(folder)))


def _add_differences(table: BenchTable, folder: Path) -> None:
    if not gpus():
        os.environ.update(ONE_THREAD)
    _save_policy(folder)
    draw = random.Random(table.seed)
    prompts = [
        [draw.randrange(4, VOCAB - 4) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)
    ]
    turns = uvloop.run(_sample(str(folder), prompts))
    passes = _passes(str(folder))
    gaps = {
        replays: _differences(passes, prompts, turns, replays=replays) for replays in (False, True)
    }
    table.figure("sampled tokens", len(gaps[True]), "tokens")
    table.figure("mean |difference|, routers choose", float(gaps[False].mean()), "nats")
    table.figure("mean |difference|, replay", float(gaps[True].mean()), "nats")
    table.figure("99th percentile, routers choose", float(np.percentile(gaps[False], 99)), "nats")
    table.figure("99th percentile, replay", float(np.percentile(gaps[True], 99)), "nats")
    table.compare(
        "largest |difference|, replay",
        float(gaps[True].max()),
        float(gaps[False].max()),
        "nats",
        against="routers choose",
        at_most=MAX_RATIO,
    )


def _save_policy(folder: Path) -> None:
    """Write a policy whose choice of experts depends on the token."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    config = Qwen3MoeConfig(**sizes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.08)
    model.save_pretrained(folder)
    save_tokenizer(folder, make_tokenizer(["go to the red ball"], vocab_size=VOCAB))


async def _sample(path: str, prompts: Sequence[list[int]]) -> list[Turn]:
    engine = await Engine.start(
        ModelSection(path=path, dtype="bfloat16"),
        ActorSection(max_concurrent=NUM_PROMPTS, max_model_len=512),
        end_of_turn_ids=[],
        seed=0,
        is_repeatable=True,
        records_experts=True,
    )
    asked = {f"turn-{number}": prompt for number, prompt in enumerate(prompts)}
    seeds = {name: number for number, name in enumerate(asked)}
    try:
        found = await engine.generate_together(
            asked, max_tokens=TURN_TOKENS, salt="bench", seeds=seeds
        )
    finally:
        engine.shut_down()
    return list(found.values())


def _passes(path: str) -> Passes:
    model = load_policy(path, device="cpu", gradient_checkpointing=False)
    passes = Passes(
        LearnerSection(device="cpu", precision=Precision.FP32),
        Networks(policy=model),
        temperature=1.0,
        engine_dtype="bfloat16",
        replays_routing=True,
    )
    passes.scoring = replace(passes.scoring, head_dtype=torch.float32)
    passes.check_start(may_pad=True)
    return passes


@torch.no_grad()
def _differences(
    passes: Passes, prompts: Sequence[list[int]], turns: Sequence[Turn], *, replays: bool
) -> np.ndarray:
    """Return |log-probability of the learner - that of the engine| of all sampled tokens."""
    found: list[np.ndarray] = []
    for prompt, turn in zip(prompts, turns, strict=True):
        ids = np.array([*prompt, *turn.token_ids])
        scored = np.arange(len(ids)) >= len(prompt)
        recorded: list[Recorded | None] | None = None
        if replays:
            assert turn.experts is not None
            chosen = np.concatenate([turn.experts, turn.experts[:1]])  # The last row is not read.
            recorded = [(chosen, np.arange(len(ids)) < len(ids) - 1)]
        tokens = collate_tokens(
            [ids], [scored], device="cpu", is_packed=passes.is_packed, recorded=recorded
        )
        found.append(np.abs(passes.score(tokens).logprobs.numpy() - np.array(turn.logprobs)))
    return np.concatenate(found)
