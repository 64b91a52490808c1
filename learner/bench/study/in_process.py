"""A training run in one process, for studies of hundreds of short ones: nothing starts or waits.

What is measured is the learner's own: credit, objective, controller, optimizer. Episodes are the
actor's and the environments'; only the engine is plain torch. The lag is exact: step v + 1 learns
from episodes of version v - lag (the first steps from fresher ones). Where the controller closes
its gate the lag shrinks with it, and after a skipped batch the next one is fresh.
"""

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.config.run_config import RunConfig
from common.report.results import wilson_interval
from common.wire.ids import episode_id_of
from common.wire.messages import EpisodeKind, Lease, PolicyKind, Trajectory
from learner.batch.credit import group_has_signal, samples_of
from learner.bench.study.outcome import LAST_STEPS, Outcome
from learner.ingest.group_assembly import Group
from learner.scheduler.curriculum.catalogue import Catalogue, parse_catalogue, validate_tasks
from learner.scheduler.curriculum.horizon import horizon_at
from learner.scheduler.curriculum.sampling import Item, Sampler, member_seed
from learner.scheduler.evaluation.heldout import plan_heldout
from learner.training.build import load_start, make_trainer
from learner.training.controller import Decision

MAX_ROUNDS = 4  # of groups, until a batch has as many with signal as it wants
EPISODE_S = 3600.0  # nothing here hangs
NAN = float("nan")


class Player(Protocol):
    """Plays with the weights it was given last; `actor.bench.in_process.InProcessPlayer`."""

    def load(self, weights: Mapping[str, Tensor], *, version: int) -> None: ...
    def play(self, leases: Sequence[Lease]) -> list[Trajectory]: ...


MakePlayer = Callable[[RunConfig], tuple[Player, dict[str, Any]]]  # and what its hub would offer


@dataclass(slots=True)
class _Seen:
    """What the steps of a run came to."""

    lags: list[tuple[float, float]] = field(default_factory=list)  # (steps, tokens)
    ess: list[float] = field(default_factory=list)
    arrived: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=LAST_STEPS))
    has_acted: bool = False  # the controller changed something
    num_skipped: int = 0

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

        Raises: ConfigError: the tasks are not there.
        """
        self._cfg = cfg
        model, _ = load_start(cfg, None, torch.device("cpu"))
        self.model = model
        self.trainer, _ = make_trainer(cfg, model, None)
        self._player, offered = make_player(cfg)
        self._catalogue: Catalogue = parse_catalogue(offered)
        validate_tasks(cfg.tasks, self._catalogue, cfg.curriculum)
        self._sampler = Sampler(cfg.tasks, self._catalogue, seed=cfg.run.seed)
        self._num_opened = 0
        keep = cfg.learner.hold_back_steps + 1
        self._kept: deque[dict[str, Tensor]] = deque(maxlen=keep)  # the newest version last
        self._seen = _Seen()

    def run(self, *, arm: str) -> tuple[Outcome, bool]:
        """Train and evaluate; return the outcome and whether the controller ever acted."""
        started, cpu = time.monotonic(), time.process_time()
        is_asked = self._cfg.eval.before
        before = _success(self.evaluate(self.weights())) if is_asked else NAN
        for version in range(self._cfg.train.num_steps):
            self._keep()
            self._step(version)
        self._keep()
        played = self.evaluate(self._kept[-1], version=self._cfg.train.num_steps)
        after, seen = _success(played), self._seen
        arrived = sum(num for num, _ in seen.arrived)
        return Outcome(
            arm=arm,
            seed=self._cfg.run.seed,
            before=before,
            after=after,
            after_ci95=wilson_interval(round(after * len(played)), len(played)),
            num_after=len(played),
            gain=after - before,
            gain_ci95=(NAN, NAN),
            trained=sum(good for _, good in seen.arrived) / max(arrived, 1),
            num_trained=arrived,
            lag_mean=seen.lag_mean(),
            ess_min=min(seen.ess),
            num_skipped=seen.num_skipped,
            wall_s=time.monotonic() - started,
            cpu_s=time.process_time() - cpu,
        ), seen.has_acted

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the policy as it is now."""
        return copy.deepcopy(dict(self.model.state_dict()))

    def _keep(self) -> None:
        self._kept.append(self.weights())

    def _step(self, version: int) -> None:
        """Make one step: again with fresh data while the controller skips."""
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
                return
            is_after_skip = True

    def _groups(self, version: int, weights: Mapping[str, Tensor]) -> list[Group]:
        """Return as many groups with signal as a batch has, or what some rounds of them give."""
        cfg, found, num, solved = self._cfg, [], 0, 0
        played: list[Group] = []
        for _ in range(MAX_ROUNDS):
            played = self.play(cfg.groups.per_step - len(found), version=version, weights=weights)
            members = [each for group in played for each in group.members]
            num, solved = num + len(members), solved + sum(each.is_success for each in members)
            found += [
                each
                for each in played
                if not cfg.algorithm.filter_zero_variance
                or group_has_signal(each.members, cfg.algorithm)
            ]
            if len(found) == cfg.groups.per_step:
                break
        self._seen.arrived.append((num, solved))
        return found or played

    def play(self, num_groups: int, *, version: int, weights: Mapping[str, Tensor]) -> list[Group]:
        """Return the next groups of training items, played with `weights`."""
        self._player.load(weights, version=version)
        size, cfg = self._cfg.groups.size, self._cfg
        leases: list[Lease] = []
        for number in range(self._num_opened, self._num_opened + num_groups):
            item = self._sampler.item(number)
            horizon = self._horizon(item, version)
            for member in range(size):
                seed = member_seed(cfg.run.seed, number, member)
                leases.append(lease_of(item, f"g{number:07d}", member, seed, horizon, version))
        self._num_opened += num_groups
        played = self._player.play(leases)
        return [
            Group(group_id=played[i].group_id, members=played[i : i + size])
            for i in range(0, len(played), size)
        ]

    def _horizon(self, item: Item, version: int) -> int:
        name = self._cfg.horizon.name_of(item.env, item.subset)
        stamp = horizon_at(self._cfg.horizon.policy(name), version)
        return min(stamp.horizon, self._catalogue.entry(item.env, item.subset).max_turns)

    def evaluate(self, weights: Mapping[str, Tensor], *, version: int = 0) -> list[Trajectory]:
        """Return the held-out episodes at the full horizon, played with `weights`."""
        cfg = self._cfg
        self._player.load(weights, version=version)
        leases = [
            Lease(
                **_identity("eval-after-model", plan.env, plan.item_id, number),
                episode_id=episode_id_of("eval-after-model", number),
                kind=EpisodeKind.EVAL,
                seed=plan.seed,
                horizon=plan.horizon,
                opened_at_version=version,
                deadline_s=EPISODE_S,
            )
            for number, plan in enumerate(plan_heldout(cfg.eval, cfg.tasks, self._catalogue, {}))
        ]
        return self._player.play(leases)


def _success(played: Sequence[Trajectory]) -> float:
    return sum(each.is_success for each in played) / len(played)


def _identity(group_id: str, env: str, item_id: str, member: int) -> dict[str, Any]:
    named = {"group_id": group_id, "env": env, "item_id": item_id, "member": member}
    return {**named, "attempt": 0, "policy": PolicyKind.MODEL, "horizon_stage": 0}


def lease_of(
    item: Item, group_id: str, member: int, seed: int, horizon: int, version: int
) -> Lease:
    """Return the lease of a member of a training group, as a scheduler would grant it."""
    return Lease(
        **_identity(group_id, item.env, item.item_id, member),
        episode_id=episode_id_of(group_id, member),
        kind=EpisodeKind.TRAIN,
        seed=seed,
        horizon=horizon,
        opened_at_version=version,
        deadline_s=EPISODE_S,
    )
