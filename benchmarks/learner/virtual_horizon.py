"""The suite `virtual-horizon`: horizons of up to 1,000 turns at equal numbers of sampled tokens.

A policy plays the rule of `rooms` with the lengths of its subset `Trek`. Each turn shows a symbol,
and the right answer leads to the next room. An episode ends unsolved after two turns for each room.
The context of a turn is its symbol, and an answer is one token. No engine runs: the answers are
drawn from the policy's probabilities of each symbol. Advantages and trainer are those of a run, in
lockstep. Groups without signal are filtered, and their tokens count.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.learner.batch import make_random_model
from benchmarks.learner.partial_episodes import MODEL
from benchmarks.study.intervals import over_runs
from benchmarks.suite import Suite
from common.config.algorithm import AlgorithmSection
from common.config.horizon import HorizonKind, HorizonPolicy, StageGate
from common.config.learner import LearnerSection, Precision
from common.wire.messages import EndReason, Trajectory
from envhub.envs.rooms import PATHS, TRIES_PER_ROOM, num_rooms
from learner.ingest.buffer import Group
from learner.objective.advantages import group_has_signal, samples_of
from learner.policy.forward import Networks
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from scheduler.curriculum.curriculum import horizon_at
from tools.simulator.workload import synthetic_trajectory

NUM_SYMBOLS = 6
FIRST_ANSWER = 16  # Token of the answer to symbol 0.
START_RIGHT = 0.46  # Share of right answers of the initial policy.
NUM_START_STEPS = 400
SIZE = 8  # Members of a group.
PER_STEP = 2  # Groups with signal of a step.
EVERY_STEPS = 16  # Steps of a stage.
NUM_TOKENS = 20_000  # Sampled tokens of a run.
NUM_EVALUATED = 400  # Held-out items.
SEEDS = (1, 2, 3, 4, 5)
MAX_ROOMS = PATHS["Trek"].max_rooms
MAX_TURNS = TRIES_PER_ROOM * MAX_ROOMS


GATE = StageGate(window_steps=1, min_steps=1)  # Unused: no arm is gated.


def schedule(kind: HorizonKind, *stages: int) -> HorizonPolicy:
    """Return a schedule of horizons or distances."""
    return HorizonPolicy(
        kind=kind, stages=stages, every_steps=EVERY_STEPS, over_steps=1, gated=GATE
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonArm:
    """The schedules of a run."""

    horizon: HorizonPolicy  # In turns.
    distance: HorizonPolicy  # In rooms.


WHOLE = schedule(HorizonKind.FIXED, MAX_TURNS)
ALL_ROOMS = schedule(HorizonKind.FIXED, MAX_ROOMS)
ARMS = {
    "fixed": HorizonArm(horizon=WHOLE, distance=ALL_ROOMS),
    "stepwise": HorizonArm(
        horizon=schedule(HorizonKind.STEPWISE, 50, 200, MAX_TURNS), distance=ALL_ROOMS
    ),
    "distance": HorizonArm(
        horizon=WHOLE, distance=schedule(HorizonKind.STEPWISE, 8, 64, MAX_ROOMS)
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One episode."""

    symbols: np.ndarray  # [turns] that each turn showed
    answers: np.ndarray  # [turns]
    is_solved: bool


@torch.no_grad()
def answer_probs(model: PreTrainedModel) -> np.ndarray:
    """Return the policy's distribution over the tokens after each symbol, [symbol, vocab]."""
    ids = torch.arange(1, 1 + NUM_SYMBOLS)[:, None]
    return model(input_ids=ids).logits[:, -1].double().softmax(-1).numpy()


def play(probs: np.ndarray, keys: np.ndarray, *, horizon: int, rng: np.random.Generator) -> Play:
    """Play an item.

    Args:
        keys: [rooms] symbol of each room.
        horizon: most turns.
    """
    num_turns = min(horizon, TRIES_PER_ROOM * len(keys))
    draws = rng.random(num_turns)
    cumulated = probs.cumsum(-1)
    symbols: list[int] = []
    answers: list[int] = []
    room = 0
    while room < len(keys) and len(symbols) < num_turns:
        symbol = int(keys[room])
        answer = int(
            np.searchsorted(cumulated[symbol], draws[len(symbols)] * cumulated[symbol, -1])
        )
        symbols.append(symbol)
        answers.append(answer)
        room += answer == FIRST_ANSWER + symbol
    return Play(symbols=np.array(symbols), answers=np.array(answers), is_solved=room == len(keys))


def trajectory_of(
    played: Play, probs: np.ndarray, *, group: int, member: int, horizon: int, version: int
) -> Trajectory:
    """Return an episode, with a segment for each turn."""
    num = len(played.answers)
    ids = np.stack([1 + played.symbols, played.answers], axis=1).ravel()
    mask = np.tile([False, True], num)
    logprobs = np.zeros(2 * num, np.float32)
    logprobs[1::2] = np.log(probs[played.symbols, played.answers])
    is_cut = not played.is_solved and num == horizon
    return synthetic_trajectory(
        ids,
        mask,
        group_id=f"g{group:07d}",
        member=member,
        logprobs=logprobs,
        versions=np.where(mask, version, -1).astype(np.int32),
        turn_ids=np.repeat(np.arange(num, dtype=np.int32), 2),
        num_turns=num,
        invalid_turns=np.zeros(num, dtype=np.bool_),
        turn_scores=np.full(num, float(played.is_solved), np.float32),
        segment_starts=np.arange(0, 2 * num, 2, dtype=np.int32),
        reward=float(played.is_solved),
        is_success=played.is_solved,
        horizon=horizon,
        end_reason=EndReason.HORIZON if is_cut else EndReason.DONE,
    )


def make_start() -> PreTrainedModel:
    """Return a policy that answers right in `START_RIGHT` of its turns."""
    model = make_random_model(MODEL, device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.arange(1, 1 + NUM_SYMBOLS)[:, None]
    answers = torch.arange(FIRST_ANSWER, FIRST_ANSWER + NUM_SYMBOLS)
    target = torch.zeros(NUM_SYMBOLS, MODEL["vocab_size"])
    target[:, answers] = (1 - START_RIGHT) / (NUM_SYMBOLS - 1)
    target[torch.arange(NUM_SYMBOLS), answers] = START_RIGHT
    for _ in range(NUM_START_STEPS):
        logits = model(input_ids=ids).logits[:, -1]
        torch.nn.functional.cross_entropy(logits, target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class HorizonResult:
    """The result of a run."""

    num_steps: int
    num_tokens: int
    before: float  # Success of held-out items.
    after: float
    right_before: float  # Share of right answers.
    right_after: float


class HorizonRun:
    """A run of one arm in lockstep."""

    def __init__(self, arm: HorizonArm, *, seed: int, num_tokens: int = NUM_TOKENS) -> None:
        """Make the initial policy."""
        self._arm = arm
        self._budget = num_tokens
        self._rng = np.random.default_rng(seed)
        self._model = make_start()
        self._sampler = copy.deepcopy(self._model)  # The trainer changes the attention of its own.
        self._algorithm = AlgorithmSection()
        learner = LearnerSection(
            device="cpu",
            lr=2e-4,
            warmup_steps=0,
            decay_start_frac=1,
            precision=Precision.FP32,
            max_tokens_per_microbatch=4_096,
        )
        settings = TrainerSettings(
            learner=learner, algorithm=self._algorithm, num_steps=10_000, engine_dtype="float32"
        )
        self._trainer = Trainer(settings, Networks(policy=self._model))
        self._version = 0
        self._num_groups = 0
        self._num_tokens = 0

    def run(self) -> HorizonResult:
        """Train until the tokens are sampled, then evaluate."""
        before = self._evaluate()
        while self._num_tokens < self._budget:
            groups = self._sample_batch()
            if len(groups) < PER_STEP:
                break
            samples = samples_of(groups, self._algorithm, self._trainer.baseline)
            self._trainer.train_on(samples, version=self._version, must_train=True)
            self._version += 1
            self._sampler.load_state_dict(self._model.state_dict())
        after = self._evaluate()
        return HorizonResult(
            num_steps=self._version,
            num_tokens=self._num_tokens,
            before=before[0],
            after=after[0],
            right_before=before[1],
            right_after=after[1],
        )

    def _sample_batch(self) -> list[Group]:
        """Return the groups with signal of a step; fewer if the tokens are used up."""
        probs = answer_probs(self._sampler)
        horizon = horizon_at(self._arm.horizon, self._version).horizon
        most_rooms = horizon_at(self._arm.distance, self._version).horizon
        groups: list[Group] = []
        while len(groups) < PER_STEP and self._num_tokens < self._budget:
            keys = draw_item(self._rng, most_rooms=most_rooms)
            members: list[Trajectory] = []
            for member in range(SIZE):
                played = play(probs, keys, horizon=horizon, rng=self._rng)
                self._num_tokens += len(played.answers)
                members.append(
                    trajectory_of(
                        played,
                        probs,
                        group=self._num_groups,
                        member=member,
                        horizon=horizon,
                        version=self._version,
                    )
                )
            if group_has_signal(members, self._algorithm):
                groups.append(Group(group_id=members[0].group_id, members=members))
            self._num_groups += 1
        return groups

    def _evaluate(self) -> tuple[float, float]:
        """Return the success of held-out items of all lengths, and the share of right answers."""
        rng = np.random.default_rng(10**6)
        probs = answer_probs(self._sampler)
        items = [draw_item(rng, most_rooms=MAX_ROOMS) for _ in range(NUM_EVALUATED)]
        solved = [play(probs, keys, horizon=MAX_TURNS, rng=rng).is_solved for keys in items]
        symbols = np.arange(NUM_SYMBOLS)
        return float(np.mean(solved)), float(probs[symbols, FIRST_ANSWER + symbols].mean())


def draw_item(rng: np.random.Generator, *, most_rooms: int) -> np.ndarray:
    """Return the symbols of an item of `Trek` with at most `most_rooms` rooms, [rooms]."""
    while True:
        num = num_rooms(int(rng.integers(100_000)), max_rooms=MAX_ROOMS)
        if num <= most_rooms:
            return rng.integers(NUM_SYMBOLS, size=num)


def run_suite(suite: Suite) -> None:
    """Run all arms with all seeds, and add their figures."""
    torch.set_num_threads(1)
    suite.title(
        f"{NUM_TOKENS:,} sampled tokens, {len(SEEDS)} seeds; success is that of"
        f" {NUM_EVALUATED} held-out items of 1 to {MAX_ROOMS} rooms"
    )
    for name, arm in ARMS.items():
        with suite.check(name):
            add_arm(suite, name, [HorizonRun(arm, seed=suite.seed + seed).run() for seed in SEEDS])


def add_arm(suite: Suite, name: str, results: Sequence[HorizonResult]) -> None:
    """Add the figures of an arm, with the interval of its success over the seeds."""
    for figure, values in (
        ("success before", [each.before for each in results]),
        ("success after", [each.after for each in results]),
        ("right answers before", [each.right_before for each in results]),
        ("right answers after", [each.right_after for each in results]),
        ("steps", [float(each.num_steps) for each in results]),
        ("sampled tokens", [float(each.num_tokens) for each in results]),
    ):
        mean, (low, high) = over_runs(values)
        note = f"95 %: {low:.3g} to {high:.3g}; {', '.join(f'{value:.3g}' for value in values)}"
        suite.figure(f"{name}: {figure}", mean, "", note)
