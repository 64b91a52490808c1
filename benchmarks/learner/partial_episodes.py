"""The suite `partial-episodes`: long episodes beside short ones under a bound on lag.

A small network plays a game of symbols. The actor's time is counted in ticks: in each tick every
slot samples one turn, with the newest weights. The learner makes a step as soon as a batch is ready
and `STEP_TICKS` have passed. An episode of 32 turns therefore lasts at most eight versions. The
assembly of groups, the advantages and the trainer are those of a run. All arms sample equally many
tokens.
"""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.learner.batch import make_random_model
from benchmarks.suite import Suite
from common.config.algorithm import Advantage, Aggregation, AlgorithmSection
from common.config.groups import GroupsSection
from common.config.learner import CriticSection, LearnerSection, Precision
from common.wire.messages import EndReason, EpisodeOutcome, Outcome, Trajectory
from learner.ingest.buffer import GroupAssembly
from learner.objective.advantages import group_has_signal, samples_of
from learner.policy.forward import Networks
from learner.policy.model import make_critic
from learner.training.step import TrainerSettings
from learner.training.trainer import Trainer
from tools.simulator.workload import synthetic_trajectory

MODEL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}
NUM_SYMBOLS = 6
NUM_GROUPS = 8  # Groups that are played at once.
SIZE = 4  # Members of a group.
PER_STEP = 2  # Groups of a step.
STEP_TICKS = 4  # Least number of ticks between two steps.
BOUND = 2  # learner.max_lag_steps.
NO_BOUND = 1_000
TURNS = {"short": 4, "long": 32}
NUM_TICKS = 1_200
NUM_EVALUATED = 128  # Episodes of each kind.
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Settings of a run."""

    advantage: Advantage
    bound: int = BOUND
    is_by_turn: bool = False

    @property
    def trains_early(self) -> bool:
        return self.is_by_turn and self.advantage is Advantage.PPO


ARMS = {
    "ppo, off": Arm(advantage=Advantage.PPO),
    "ppo, turns": Arm(advantage=Advantage.PPO, is_by_turn=True),
    "ppo, whole episodes": Arm(advantage=Advantage.PPO, bound=NO_BOUND),
    "grpo, off": Arm(advantage=Advantage.GRPO),
    "grpo, turns": Arm(advantage=Advantage.GRPO, is_by_turn=True),
    "grpo, whole episodes": Arm(advantage=Advantage.GRPO, bound=NO_BOUND),
}


@dataclass(slots=True, kw_only=True)
class SymbolGame:
    """One episode: each turn shows a symbol, and the kind of the game decides the right answer.

    The reward is the share of right answers, and is paid at the end.
    """

    kind: str
    group_id: str
    member: int
    symbols: list[int]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    num_right: int = 0
    num_unsent: int = 0  # Turns that were not sent as a part.

    def __post_init__(self) -> None:
        self._observe([1 + list(TURNS).index(self.kind), self._shown])

    @property
    def num_turns(self) -> int:
        return sum(version >= 0 for version in self.versions)

    @property
    def is_over(self) -> bool:
        return self.num_turns == len(self.symbols)

    @property
    def _shown(self) -> int:
        return 4 + self.symbols[self.num_turns]

    def _observe(self, ids: list[int]) -> None:
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def answer(self, token_id: int, logprob: float, version: int) -> None:
        """Take an answer, and show the next symbol."""
        symbol = self.symbols[self.num_turns]
        shift = 1 + 2 * list(TURNS).index(self.kind)
        self.num_right += token_id == 16 + (symbol + shift) % NUM_SYMBOLS
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.num_unsent += 1
        if not self.is_over:
            self._observe([self._shown])

    def trajectory(self) -> Trajectory:
        """Return the turns so far."""
        mask = np.array(self.versions) >= 0
        turns = np.maximum(np.cumsum(mask) - mask, 0)
        num = self.num_turns
        score = self.num_right / len(self.symbols)
        return synthetic_trajectory(
            self.token_ids,
            mask,
            group_id=self.group_id,
            member=self.member,
            logprobs=np.array(self.logprobs, np.float32),
            versions=np.array(self.versions, np.int32),
            turn_ids=np.minimum(turns, num - 1).astype(np.int32),
            num_turns=num,
            invalid_turns=np.zeros(num, dtype=np.bool_),
            turn_scores=np.full(num, score, np.float32),
            reward=score,
            horizon=len(self.symbols),
            end_reason=EndReason.DONE if self.is_over else EndReason.UNFINISHED,
        )


@torch.no_grad()
def play_turn(
    model: PreTrainedModel, games: Sequence[SymbolGame], version: int, generator: torch.Generator
) -> None:
    """Sample one answer in each game."""
    lengths = torch.tensor([len(game.token_ids) for game in games])
    ids = torch.zeros(len(games), int(lengths.max()), dtype=torch.int64)
    for row, game in zip(ids, games, strict=True):
        row[: len(game.token_ids)] = torch.tensor(game.token_ids)
    logits = model(input_ids=ids).logits[torch.arange(len(games)), lengths - 1]
    scores = logits.float().log_softmax(-1)
    chosen = torch.multinomial(scores.exp(), 1, generator=generator)[:, 0].tolist()
    for game, token_id, of_game in zip(games, chosen, scores.tolist(), strict=True):
        game.answer(token_id, of_game[token_id], version)


@dataclass(slots=True, kw_only=True)
class Result:
    """The result of a run."""

    num_sampled: int = 0  # Sampled tokens of the episodes with an outcome.
    num_trained: int = 0  # Tokens in the loss.
    num_stale: int = 0
    num_sampled_long: int = 0
    num_stale_long: int = 0
    num_steps: int = 0
    rewards: dict[str, float] = field(default_factory=dict[str, float])  # By kind, at the end.


class VirtualRun:
    """A run of actor and learner on virtual time."""

    def __init__(self, arm: Arm, *, seed: int, num_ticks: int = NUM_TICKS) -> None:
        """Start with an untrained policy."""
        self._num_ticks = num_ticks
        self._arm = arm
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._model = make_random_model(MODEL, device=torch.device("cpu"))
        self._sampler = copy.deepcopy(self._model)  # The trainer changes the attention of its own.
        algorithm = AlgorithmSection(advantage=arm.advantage, aggregation=Aggregation.TOKEN)
        learner = LearnerSection(
            device="cpu",
            lr=3e-3,
            warmup_steps=0,
            precision=Precision.FP32,
            critic=CriticSection(lr=3e-3),
        )
        is_critic = arm.advantage is Advantage.PPO
        critic = make_critic(learner.critic, self._model, policy_path="") if is_critic else None
        settings = TrainerSettings(
            learner=learner, algorithm=algorithm, num_steps=num_ticks, engine_dtype="float32"
        )
        self._algorithm = algorithm
        self._trainer = Trainer(settings, Networks(policy=self._model, critic=critic))
        self._groups = GroupAssembly(
            GroupsSection(size=SIZE, per_step=PER_STEP, min_size=2),
            algorithm,
            has_signal=lambda members: group_has_signal(members, algorithm),
            is_by_turn=arm.is_by_turn,
            trains_early=arm.trains_early,
        )
        self._version = 0
        self._num_opened = 0
        self._games: list[SymbolGame] = []
        self._lengths: dict[str, int] = {}
        self.result = Result()

    def run(self) -> Result:
        """Play all ticks, then evaluate the policy."""
        step_at = 0
        for tick in range(self._num_ticks):
            while len(self._games) <= SIZE * (NUM_GROUPS - 1):
                self._open()
            play_turn(self._sampler, self._games, self._version, self._generator)
            for game in self._games:
                self._deliver(game)
            self._games = [game for game in self._games if not game.is_over]
            if tick >= step_at and self._step():
                step_at = tick + STEP_TICKS
        self.result.num_steps = self._version
        self.result.rewards = {kind: self._evaluate(kind) for kind in TURNS}
        return self.result

    def _open(self) -> None:
        kind = self._rng.choice(list(TURNS))
        symbols = [self._rng.randrange(NUM_SYMBOLS) for _ in range(TURNS[kind])]
        group_id = f"g{self._num_opened:07d}"
        self._num_opened += 1
        for member in range(SIZE):
            game = SymbolGame(kind=kind, group_id=group_id, member=member, symbols=symbols)
            self._games.append(game)
            self._lengths[f"{group_id}/{member}"] = len(symbols)

    def _deliver(self, game: SymbolGame) -> None:
        """Send an ended episode, or a part as `actor.rollout.pool.PartSender` does."""
        if game.is_over:
            self._note(self._groups.add(game.trajectory())[0])
            return
        unsent = [version for version in game.versions if version >= 0][-game.num_unsent :]
        if self._version - min(unsent) >= self._arm.bound - 1:
            game.num_unsent = 0
            self._groups.add_part(game.trajectory())

    def _step(self) -> bool:
        """Make a step if a batch is ready; return whether there was one."""
        taken, outcomes = self._groups.take(
            self._version, max_lag_steps=self._arm.bound, in_order=False
        )
        self._note(outcomes)
        if not taken:
            return False
        samples = samples_of(taken, self._algorithm, self._trainer.baseline)
        self._trainer.train_on(samples, version=self._version, must_train=True)
        self._groups.note_trained(taken)
        self._version += 1
        self._sampler.load_state_dict(self._model.state_dict())
        self.result.num_trained += sum(sample.num_sampled_tokens for sample in samples)
        for group in taken:
            self._note(group.outcomes(Outcome.TRAINED))
        return True

    def _note(self, outcomes: Sequence[EpisodeOutcome]) -> None:
        for each in outcomes:
            num = self._lengths.pop(each.episode_id)
            is_long = num == TURNS["long"]
            num_stale = num if each.outcome is Outcome.STALE else each.num_stale_tokens
            self.result.num_sampled += num
            self.result.num_stale += num_stale
            self.result.num_sampled_long += is_long * num
            self.result.num_stale_long += is_long * num_stale

    def _evaluate(self, kind: str) -> float:
        """Return the mean reward of new episodes of a kind."""
        games = [
            SymbolGame(
                kind=kind,
                group_id="eval",
                member=member,
                symbols=[self._rng.randrange(NUM_SYMBOLS) for _ in range(TURNS[kind])],
            )
            for member in range(NUM_EVALUATED)
        ]
        for _ in range(TURNS[kind]):
            play_turn(self._sampler, games, self._version, self._generator)
        return sum(game.num_right for game in games) / sum(len(game.symbols) for game in games)


def run_suite(suite: Suite) -> None:
    """Run all arms with all seeds, and add their figures."""
    torch.set_num_threads(1)
    suite.title(
        f"{NUM_TICKS} ticks of {SIZE * NUM_GROUPS} slots, {len(SEEDS)} seeds, bound {BOUND}:"
        f" shares of the sampled tokens, and rewards of new episodes of {TURNS} turns"
    )
    for name, arm in ARMS.items():
        with suite.check(name):
            add_arm(suite, name, [VirtualRun(arm, seed=suite.seed + seed).run() for seed in SEEDS])


def add_arm(suite: Suite, name: str, results: Sequence[Result]) -> None:
    """Add the mean figures of an arm over its seeds, with those of each seed."""
    figures: dict[str, list[float]] = {
        "stale tokens": [each.num_stale / max(1, each.num_sampled) for each in results],
        "stale tokens of long episodes": [
            each.num_stale_long / max(1, each.num_sampled_long) for each in results
        ],
        "steps": [float(each.num_steps) for each in results],
    }
    for kind in TURNS:
        figures[f"reward, {kind} episodes"] = [each.rewards[kind] for each in results]
    for figure, values in figures.items():
        note = ", ".join(f"{value:.3g}" for value in values)
        suite.figure(f"{name}: {figure}", float(np.mean(values)), "", note)
