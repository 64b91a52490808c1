"""A training run in one process, for studies of hundreds of short runs, without startup or waits.

Credit, objective, controller and optimizer are those of the learner. Episodes are those of the
actor and the environments; only the engine is plain torch. The lag is exact: step v + 1 trains on
episodes of version v - lag (the first steps on newer ones). If the controller tightens its gate,
the lag shrinks with it. After a skipped batch the next one is on-policy.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from benchmarks.study.outcome import LAST_STEPS, NAN, NO_INTERVAL, Point, SeedResult, by_distance
from common.config.run_config import RunConfig
from common.evaluation.intervals import wilson_interval
from common.ids import episode_id_of
from common.segments import segments_of
from common.wire.messages import EpisodeKind, Lease, PolicyKind, Trajectory
from learner.batch.credit import group_has_signal, samples_of
from learner.ingest.buffer import seen_of
from learner.ingest.group_assembly import Group
from learner.offline.heldout import plan_heldout
from learner.scheduler.curriculum.catalogue import HubCatalogue, parse_catalogue, validate_tasks
from learner.scheduler.curriculum.curriculum import Curriculum
from learner.scheduler.curriculum.mixture import Mixture
from learner.scheduler.dispatch.grants import lease
from learner.scheduler.episodes.table import GroupRecord
from learner.training.build import load_start, make_trainer
from learner.training.controller import Decision

MAX_ROUNDS = 4  # Maximum number of attempts to fill a batch with groups that have signal.
EPISODE_S = 3600.0  # A limit that no episode reaches.
# Metrics for the curriculum.
SIGNALS = {"policy/entropy": "entropy", "offpolicy/ess_frac": "ess_frac"}


class PolicyPlayer(Protocol):
    """Plays with the newest loaded weights, as `benchmarks.actor.in_process.InProcessPlayer`."""

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None: ...
    def play(self, leases: Sequence[Lease]) -> list[Trajectory]: ...


# The dict is the catalogue of a hub.
MakePlayer = Callable[[RunConfig], tuple[PolicyPlayer, dict[str, Any]]]


@dataclass(slots=True)
class _Seen:
    """The accumulated results of a run's steps."""

    # Tuples of lag in steps and number of tokens.
    lags: list[tuple[float, float]] = field(default_factory=list)
    ess: list[float] = field(default_factory=list)
    arrived: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    has_acted: bool = False  # The controller has changed something.
    num_skipped: int = 0
    points: list[Point] = field(default_factory=list[Point])
    num_episodes: int = 0  # Training episodes, with those without signal.
    num_tokens: int = 0  # Sampled tokens of these episodes.
    spent_s: float = 0.0  # Processor seconds without evaluations.

    def lag_mean(self) -> float:
        lags, num_tokens = zip(*self.lags, strict=True)
        return float(np.average(lags, weights=num_tokens))

    def note(self, metrics: Mapping[str, float], decision: Decision, *, most_ahead: int) -> None:
        self.ess.append(metrics["offpolicy/ess_frac"])
        self.lags.append((metrics["offpolicy/lag_mean"], metrics["train/num_sampled_tokens"]))
        is_closed = decision.max_ahead_steps < most_ahead
        self.has_acted |= decision.is_skipped or decision.lr_scale < 1 or is_closed
        self.num_skipped += decision.is_skipped


class InProcessRun:
    """One run from its configuration to its outcome."""

    def __init__(self, cfg: RunConfig, make_player: MakePlayer) -> None:
        """Load policy, trainer and player.

        Raises: ConfigError: a task does not exist.
        """
        self._cfg = cfg
        model, _ = load_start(cfg, None, torch.device("cpu"))
        self.model = model
        self.trainer, _ = make_trainer(cfg, model, None)
        self._player, offered = make_player(cfg)
        self._catalogue: HubCatalogue = parse_catalogue(offered)
        validate_tasks(cfg.tasks, self._catalogue, cfg.curriculum)
        seed = cfg.run.seed
        size = cfg.groups.size
        mixture = Mixture(cfg.mixture, cfg.tasks, self._catalogue, seed=seed, group_size=size)
        self.curriculum = Curriculum(
            cfg.horizon, mixture, cfg.tasks, self._catalogue, cfg.curriculum
        )
        self._num_opened = 0
        keep = cfg.learner.hold_back_steps + 1
        self._kept: deque[dict[str, Tensor]] = deque(maxlen=keep)  # The newest version is the last.
        self._seen = _Seen()

    def run(self, *, arm: str) -> tuple[SeedResult, bool]:
        """Train and evaluate; return the outcome and whether the controller ever acted."""
        started = time.monotonic()
        cpu = time.process_time()
        cfg = self._cfg
        seen = self._seen
        played: list[Trajectory] = []
        for version in range(cfg.train.num_steps + 1):
            self._kept.append(self.weights())
            if self._is_evaluated(version):
                played = self.evaluate(self._kept[-1], version=version)
                seen.points.append(self._point(version, played))
            if version < cfg.train.num_steps:
                begun = time.process_time()
                self._step(version)
                seen.spent_s += time.process_time() - begun
        num_solved = sum(each.is_success for each in played)
        before = seen.points[0].success if cfg.eval.before else NAN
        arrived = sum(num for num, _ in seen.arrived)
        outcome = SeedResult(
            arm=arm,
            seed=cfg.run.seed,
            before=before,
            after=num_solved / len(played),
            after_ci95=wilson_interval(num_solved, len(played)),
            num_after=len(played),
            gain=num_solved / len(played) - before,
            gain_ci95=NO_INTERVAL,
            trained=sum(good for _, good in seen.arrived) / max(arrived, 1),
            num_trained=arrived,
            lag_mean=seen.lag_mean(),
            ess_min=min(seen.ess),
            points=tuple(seen.points),
            num_skipped=seen.num_skipped,
            wall_s=time.monotonic() - started,
            cpu_s=time.process_time() - cpu,
            num_segments=float(np.mean([len(segments_of(each)) for each in played])),
            num_row_tokens=float(np.mean([len(each.token_ids) for each in played])),
        )
        return outcome, seen.has_acted

    def _is_evaluated(self, version: int) -> bool:
        options = self._cfg.eval
        if version == self._cfg.train.num_steps:
            return True
        if version == 0:
            return options.before
        return options.every_steps > 0 and version % options.every_steps == 0

    def _point(self, version: int, played: Sequence[Trajectory]) -> Point:
        seen = self._seen
        return Point(
            step=version,
            success=sum(each.is_success for each in played) / len(played),
            num_episodes=seen.num_episodes,
            num_tokens=seen.num_tokens,
            spent_s=seen.spent_s,
            by_distance=by_distance(played),
        )

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the current policy."""
        return copy.deepcopy(dict(self.model.state_dict()))

    def _step(self, version: int) -> None:
        """Make one step. As long as the controller skips batches, repeat it with fresh data."""
        is_after_skip = False
        while True:
            allowed = 0 if is_after_skip else self.trainer.max_ahead_steps
            lag = min(self._cfg.learner.hold_back_steps, allowed, len(self._kept) - 1)
            groups = self._groups(version - lag, self._kept[-1 - lag])
            samples = samples_of(groups, self._cfg.algorithm, self.trainer.baseline)
            result = self.trainer.train_on(samples, version=version)
            ahead = self._cfg.scheduler.max_ahead_steps
            self._seen.note(result.metrics, result.decision, most_ahead=ahead)
            if not result.decision.is_skipped:
                signals = {key: result.metrics[name] for name, key in SIGNALS.items()}
                self.curriculum.step(version + 1, signals)
                return
            is_after_skip = True

    def _groups(self, version: int, weights: Mapping[str, Tensor]) -> list[Group]:
        """Return a batch of groups with signal, or fewer after `MAX_ROUNDS` rounds.

        Without any such group the result is the last round's groups.
        """
        cfg = self._cfg
        seen = self._seen
        found: list[Group] = []
        played: list[Group] = []
        num = 0
        num_solved = 0
        for _ in range(MAX_ROUNDS):
            played = self.play(cfg.groups.per_step - len(found), version=version, weights=weights)
            members = [each for group in played for each in group.members]
            num += len(members)
            num_solved += sum(each.is_success for each in members)
            seen.num_tokens += sum(int(each.loss_mask.sum()) for each in members)
            found += [
                each
                for each in played
                if not cfg.algorithm.filter_zero_variance
                or group_has_signal(each.members, cfg.algorithm)
            ]
            if len(found) == cfg.groups.per_step:
                break
        seen.num_episodes += num
        seen.arrived.append((num, num_solved))
        return found or played

    def play(self, num_groups: int, *, version: int, weights: Mapping[str, Tensor]) -> list[Group]:
        """Return the next groups of training items, played with `weights`."""
        self._player.load(weights, version=version)
        numbers = range(self._num_opened, self._num_opened + num_groups)
        self._num_opened += num_groups
        groups = [self.curriculum.make_group(n, version=version, now=0.0) for n in numbers]
        played = self._player.play([each for group in groups for each in _leases_of(group)])
        size = self._cfg.groups.size
        found = list[Group]()
        for number, group in enumerate(groups):
            members = played[number * size : (number + 1) * size]
            for trajectory, episode in zip(members, group.episodes, strict=True):
                self.curriculum.see(seen_of(trajectory), group, episode)
            found.append(Group(group_id=group.group_id, members=members))
        return found

    def evaluate(self, weights: Mapping[str, Tensor], *, version: int = 0) -> list[Trajectory]:
        """Return the held-out episodes at the full horizon, played with `weights`."""
        cfg = self._cfg
        self._player.load(weights, version=version)
        group_id = "eval-after-model"
        plans = plan_heldout(cfg.eval, cfg.tasks, self._catalogue, {})
        leases = [
            Lease(
                episode_id=episode_id_of(group_id, number),
                group_id=group_id,
                member=number,
                attempt=0,
                kind=EpisodeKind.EVAL,
                policy=PolicyKind.MODEL,
                env=plan.env,
                item_id=plan.item_id,
                seed=plan.seed,
                horizon=plan.horizon,
                horizon_stage=0,
                opened_at_version=version,
                deadline_s=EPISODE_S,
            )
            for number, plan in enumerate(plans)
        ]
        return self._player.play(leases)


def _leases_of(group: GroupRecord) -> list[Lease]:
    """Return the leases of a group's members, as a scheduler would grant them."""
    return [replace(lease(group, each, deadline_s=EPISODE_S), attempt=0) for each in group.episodes]
