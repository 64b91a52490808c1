"""The suite `prefix-trees`: steps on rows that branch, against separate rows and the tree's share.

Three shapes of episodes branch as agents' episodes do. A step computes each token of a tree once.
"""

import copy
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.learner.batch import MODELS, make_random_model
from benchmarks.learner.step import STILL, BareStep, clock_of
from benchmarks.real_run import await_success, child
from benchmarks.suite import Suite
from common.config.learner import Layout, LearnerSection, Precision
from common.host.process_settings import ONE_THREAD
from learner.batch.batching import Sample
from learner.batch.packing import forest_of
from learner.policy.model import vocabulary_size
from learner.training.throughput import step_flops
from tools.simulator.workload import synthetic_trajectory

MAX_RATIO = 1.1  # Time of a tree over its share of the time of separate rows.
NUM_ROUNDS = 3
MODEL = {**MODELS["larger"], "num_hidden_layers": 2}
MAX_TOKENS = 16_384
ENGINE_S = 600.0  # Limit of the engine's start and of its prompts.
LEGEND = (
    "Forward, backward and optimizer of one step on branching rows, as trees and apart, in turn\n"
    "in one process, in its own CPU time. The share is that of the operations: weights for each\n"
    "token of the tree, attention for its pairs with ancestors, the head for sampled tokens."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchingRow:
    """A row as it is: what the policy read, and what it sampled last."""

    context: list[int]
    sampled: list[int]


def keep_last(rng: np.random.Generator, vocab_size: int, *, scale: int = 1) -> list[BranchingRow]:
    """Return an episode of 20 turns whose prompts keep no thoughts of earlier answers."""
    draw = _drawing(rng, vocab_size, scale)
    context = draw(200)
    rows: list[BranchingRow] = []
    for _ in range(20):
        thoughts, answer, observation = draw(80), draw(20), draw(60)
        rows.append(BranchingRow(context=context, sampled=[*thoughts, *answer]))
        context = [*context, *answer, *observation]
    return rows


def folded(rng: np.random.Generator, vocab_size: int, *, scale: int = 1) -> list[BranchingRow]:
    """Return an episode with eight branches, of which only the returns stay in its context."""
    draw = _drawing(rng, vocab_size, scale)
    context = draw(200)
    rows: list[BranchingRow] = []
    for _ in range(8):
        call, work, returned, observation = draw(20), draw(240), draw(20), draw(60)
        rows.append(BranchingRow(context=[*context, *call], sampled=[*work, *returned]))
        context = [*context, *call, *returned, *observation]
    return [*rows, BranchingRow(context=context, sampled=draw(60))]


def branched(rng: np.random.Generator, vocab_size: int, *, scale: int = 1) -> list[BranchingRow]:
    """Return eight continuations of one context."""
    draw = _drawing(rng, vocab_size, scale)
    context = draw(800)
    return [BranchingRow(context=context, sampled=draw(120)) for _ in range(8)]


def _drawing(rng: np.random.Generator, vocab_size: int, scale: int) -> Callable[[int], list[int]]:
    return lambda num: rng.integers(3, vocab_size, num * scale).tolist()


SHAPES = {
    "keep_thinking=last, 20 turns": keep_last,
    "8 folded branches": folded,
    "8 branches of one context": branched,
}


def samples_of(rows: Sequence[BranchingRow]) -> list[Sample]:
    """Return the rows of one episode as samples that train what was sampled."""
    return [
        Sample(
            trajectory=synthetic_trajectory(
                np.array([*row.context, *row.sampled]),
                np.repeat([False, True], [len(row.context), len(row.sampled)]),
                group_id="g0",
                member=0,
            ),
            advantage=1.0,
            row=number,
        )
        for number, row in enumerate(rows)
    ]


def run_suite(suite: Suite) -> None:
    """Measure all shapes, then the prefix cache of an engine, in three minutes."""
    torch.set_num_threads(1)
    suite.title(LEGEND)
    model = make_random_model(MODEL, device=torch.device("cpu"))
    rng = np.random.default_rng(suite.seed)
    for name, shape in SHAPES.items():
        samples = samples_of(shape(rng, vocabulary_size(model)))
        cfg = LearnerSection(
            device="cpu",
            precision=Precision.FP32,
            layout=Layout.PACKED,
            max_tokens_per_microbatch=MAX_TOKENS,
        )
        add_shape(suite, name, cfg, model, samples)
    with suite.check("prefix cache of the engine") as folder:
        add_hits(suite, folder)


def add_shape(
    suite: Suite,
    name: str,
    cfg: LearnerSection,
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    num_rounds: int = NUM_ROUNDS,
    engine_dtype: str = "float32",
) -> None:
    """Add tokens, operations and time of a tree over those of separate rows."""
    rows = [sample.trajectory for sample in samples]
    lengths = [len(row.token_ids) for row in rows]
    forest = forest_of(rows)
    num_sampled = sum(sample.num_sampled_tokens for sample in samples)
    apart = step_flops(model, lengths, num_sampled)
    together = step_flops(model, lengths, forest.num_scored(rows), forest.shared)
    share = together / apart
    num_tokens = sum(lengths) - sum(forest.shared)
    suite.figure(f"{name}: tokens", num_tokens, "", f"{sum(lengths)} in separate rows")
    suite.figure(f"{name}: share of the operations", share, "")
    still = replace(cfg, lr=STILL, muon_lr=STILL)
    contenders: dict[str, Callable[[], object]] = {}
    for kind, is_shared in (("tree", True), ("rows", False)):
        contenders[kind] = BareStep(
            still, copy.deepcopy(model), samples, engine_dtype=engine_dtype, shares_prefix=is_shared
        )
    clock = clock_of(next(model.parameters()).device)

    def seconds_of(run: Callable[[], object]) -> float:
        started_s = clock()
        run()
        return clock() - started_s

    timed = {kind: partial(seconds_of, run) for kind, run in contenders.items()}
    seconds = suite.in_turn(timed, num_rounds=num_rounds, num_warm_ups=1)
    pairs = zip(seconds["tree"], seconds["rows"], strict=True)
    ratio = statistics.median(tree / row for tree, row in pairs)
    note = f"time {ratio:.3f} of separate rows, {1 / ratio:.2f} times as fast"
    suite.at_most(f"{name}: time over the share", ratio / share, "", MAX_RATIO, note)


def add_hits(suite: Suite, folder: Path) -> None:
    """Add the share of prompt tokens that the engine reuses when it plays the same episodes.

    The tiny policy reads the prompt of each row in order. The engine then has the whole row.
    """
    rng = np.random.default_rng(suite.seed)
    shapes = {name: shape(rng, 200) for name, shape in SHAPES.items()}
    rows = {
        name: [[row.context, row.sampled] for row in episode] for name, episode in shapes.items()
    }
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    argv = ["-m", "benchmarks.actor.prefix_cache", str(folder)]
    with child("prefix cache", argv, log=folder / "prefixes.log", env=ONE_THREAD) as engine:
        await_success(engine, timeout_s=ENGINE_S)
    cached = json.loads((folder / "prefixes.json").read_text(encoding="utf-8"))
    for name, episode in shapes.items():
        num_prompt = sum(len(row.context) for row in episode)
        most = num_known(episode) / num_prompt
        note = f"{most:.3f} of the tokens begin an earlier row, too"
        suite.figure(f"{name}: prompt tokens from the cache", cached[name] / num_prompt, "", note)


def num_known(episode: Sequence[BranchingRow]) -> int:
    """Return the number of prompt tokens that begin an earlier row, too."""
    wholes = [np.array([*row.context, *row.sampled]) for row in episode]
    num = 0
    for index, row in enumerate(episode):
        context = np.array(row.context)
        common = [0]
        for earlier in wholes[:index]:
            size = min(len(context), len(earlier))
            unlike = np.flatnonzero(context[:size] != earlier[:size])
            common.append(int(unlike[0]) if unlike.size else size)
        num += max(common)
    return num
