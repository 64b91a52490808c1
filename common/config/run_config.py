"""The configuration schema with all defaults. YAML files and overrides only change these.

It has no I/O, no environment variables and no device code. `common/config/load.py` loads it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from common.config.actor import ActorSection, GpuPlacement
from common.config.algorithm import Advantage, AlgorithmSection, RowCredit
from common.config.curriculum import CurriculumSection
from common.config.env import RemoteOptions
from common.config.envhub import EnvhubSection
from common.config.envs import EnvsSection
from common.config.eval import EvalSection
from common.config.groups import GroupsSection
from common.config.horizon import HorizonKind, HorizonSection, HorizonUnit
from common.config.journal import JournalSection
from common.config.knobs import Contradiction, check, knob
from common.config.learner import LearnerSection, Offload, PartialEpisodes, Precision, PublishMode
from common.config.log import LogSection
from common.config.machine import MachineSection
from common.config.mixture import MixtureSection
from common.config.model import BaseFormat, ModelSection
from common.config.ray import RaySection
from common.config.run import RunSection
from common.config.scheduler import SchedulerSection
from common.config.tasks import TaskSection, are_apart
from common.config.train import TrainMode, TrainSection
from common.errors import ConfigError
from common.formats.action_size import MOST_ACTION_MIB, needed_mib


class Launcher(StrEnum):
    """Launcher of the roles.

    local: subprocesses on this machine. ray: Ray places the roles on the nodes of a cluster.
    """

    LOCAL = "local"
    RAY = "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run. Commands with keys of their own have subclasses, beside their code."""

    launcher: Launcher = knob(Launcher.LOCAL, "Selects the launcher of the command `train`.")
    dashboard: bool = knob(False, "Serves the dashboard during `train` on this machine.")
    run: RunSection = field(default_factory=RunSection)
    train: TrainSection = field(default_factory=TrainSection)
    model: ModelSection = field(default_factory=ModelSection)
    machine: MachineSection = field(default_factory=MachineSection)
    tasks: list[TaskSection] = knob([], "Lists the tasks of the training mixture.")
    mixture: MixtureSection = field(default_factory=MixtureSection)
    horizon: HorizonSection = field(default_factory=HorizonSection)
    curriculum: CurriculumSection = field(default_factory=CurriculumSection)
    groups: GroupsSection = field(default_factory=GroupsSection)
    algorithm: AlgorithmSection = field(default_factory=AlgorithmSection)
    scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    learner: LearnerSection = field(default_factory=LearnerSection)
    actor: ActorSection = field(default_factory=ActorSection)
    envhub: EnvhubSection = field(default_factory=EnvhubSection)
    env: RemoteOptions = field(default_factory=RemoteOptions)
    envs: EnvsSection = field(default_factory=EnvsSection)
    eval: EvalSection = field(default_factory=EvalSection)
    log: LogSection = field(default_factory=LogSection)
    journal: JournalSection = field(default_factory=JournalSection)
    ray: RaySection = field(default_factory=RaySection)

    def __post_init__(self) -> None:
        check(self)

    def contradictions(self) -> Iterator[Contradiction]:
        yield from self._contradictions_of_tasks()
        yield from self._contradictions_of_unit()
        yield from self.actor.contradictions_of_rows(self.algorithm, self.envhub)
        yield from self._contradictions_of_actions()
        yield from self._contradictions_of_sleep()
        yield from self._contradictions_of_forks()
        yield from self._contradictions_of_base()
        yield from self._contradictions_of_parts()
        if self.groups.min_size == 1 and self.algorithm.is_group_relative:
            law = f"must be at least 2 with algorithm.advantage={self.algorithm.advantage},"
            yield "groups.min_size", 1, f"{law} which compares the members of a group"

    def _contradictions_of_tasks(self) -> Iterator[Contradiction]:
        """Yield the reasons why the tasks cannot be mixed, and overrides that match no task."""
        yield from self.curriculum.contradictions_of(self.tasks)
        if not self.tasks:
            return
        total = sum(task.weight for task in self.tasks)
        if total == 0:
            yield "tasks", total, "the weights must not sum to zero"
        names = [f"{task.env}/{task.subset}" for task in self.tasks]
        for (name, one), (other, two) in itertools.combinations(
            zip(names, self.tasks, strict=True), 2
        ):
            if name == other and not are_apart(one, two):
                yield "tasks", name, "is listed twice; use one entry with the sum of the weights"
        envs = sorted({task.env for task in self.tasks})
        for name in self.horizon.per_env:
            what, choices = ("subset", sorted(names)) if "/" in name else ("environment", envs)
            if name not in choices:
                law = f"no task has this {what}; the tasks have {choices}"
                yield f"horizon.per_env.{name}", name, law

    def _contradictions_of_unit(self) -> Iterator[Contradiction]:
        """Yield the stages in tokens or seconds that allow no turn, or that never take effect.

        A stage must end before the actor's timeout, with room for one turn. Otherwise the episode
        fails at the timeout instead of ending at its horizon.
        """
        turn_tokens = self.actor.max_turn_tokens
        max_tokens = self.actor.max_model_len
        max_s = self.actor.episode_timeout_s - self.actor.turn_timeout_s
        for name in ("", *self.horizon.per_env):
            key = f"horizon.{f'per_env.{name}.' if name else ''}stages"
            stages = self.horizon.policy(name).stages
            first = stages[0]
            last = stages[-1]
            if (
                self.horizon.unit is HorizonUnit.TOKENS
                and not turn_tokens <= first <= last <= max_tokens
            ):
                law = (
                    f"with horizon.unit=tokens, each must be at least"
                    f" actor.max_turn_tokens={turn_tokens} and at most"
                    f" actor.max_model_len={max_tokens}"
                )
                yield key, list(stages), law
            if self.horizon.unit is HorizonUnit.SECONDS and last > max_s:
                law = f"actor.episode_timeout_s - actor.turn_timeout_s = {max_s:g}"
                yield key, list(stages), f"with horizon.unit=seconds, each must be at most {law}"

    def _contradictions_of_forks(self) -> Iterator[Contradiction]:
        """Yield settings under which no member can continue the episode of another one."""
        forks = self.groups.forks
        if not forks:
            return
        key = "groups.forks"
        if not self.actor.continue_episodes:
            yield key, forks, "needs actor.continue_episodes=true: a fork replays a record"
        if self.actor.endpoint:
            yield key, forks, "needs actor.endpoint=false: episodes of programs are not recorded"
        if self.train.mode is TrainMode.SYNC:
            yield key, forks, "needs train.mode=async: in sync mode all members take turns together"
        if not self.algorithm.is_group_relative:
            law = "needs algorithm.advantage=grpo, rloo or reinforce_pp_baseline: it compares"
            yield key, forks, f"{law} the members of a tree"
        policies = [self.horizon.policy(name) for name in ("", *self.horizon.per_env)]
        shortest = min(p.stages[-1 if p.kind is HorizonKind.FIXED else 0] for p in policies)
        late = [turn for turn in self.groups.fork_turns if turn >= shortest]
        if late and self.horizon.unit is HorizonUnit.TURNS:
            law = f"must be below the first stage of the horizon, {shortest} turns"
            yield "groups.fork_turns", late, law

    def _contradictions_of_parts(self) -> Iterator[Contradiction]:
        """Yield settings under which an episode cannot be trained in parts."""
        if self.learner.partial_episodes is PartialEpisodes.OFF:
            return
        key = "learner.partial_episodes"
        if self.train.mode is TrainMode.SYNC:
            law = "needs train.mode=async: in sync mode no episode lasts longer than a step"
            yield key, "turns", law
        if self.groups.forks:
            law = "needs groups.forks=0: a fork compares the shared turns of a whole trunk"
            yield key, "turns", law
        if self.algorithm.teacher.is_on:
            yield key, "turns", "needs no algorithm.teacher: it scores whole episodes"
        if self.algorithm.row_credit is not RowCredit.ALL:
            law = f"must be all with {key}=turns: the rows of stale turns are left out"
            yield "algorithm.row_credit", str(self.algorithm.row_credit), law
        for name, value in self.algorithm.episode_ratios:
            law = "computes a ratio over a whole episode, which is trained in parts with"
            yield name, value, f"{law} {key}=turns"
        if self.algorithm.advantage != Advantage.PPO:
            return
        law = "with algorithm.advantage=ppo: parts are trained before their group"
        if self.groups.filter:
            yield "groups.filter", self.groups.filter, f"must be empty {law}"
        if self.groups.reward:
            yield "groups.reward", self.groups.reward, f"must be empty {law}"

    def _contradictions_of_sleep(self) -> Iterator[Contradiction]:
        """Yield settings under which an engine cannot give its memory to the learner's step."""
        level = self.actor.sleep
        if not level:
            return
        if self.train.mode is not TrainMode.SYNC:
            yield "actor.sleep", level, "needs train.mode=sync: other engines sample during a step"
        if self.actor.placement is not GpuPlacement.COLOCATED:
            yield "actor.sleep", level, "needs actor.placement=colocated: it frees a shared GPU"
        if self.learner.hold_back_steps:
            law = "needs learner.hold_back_steps=0: the engine wakes up with the step's version"
            yield "actor.sleep", level, law
        if self.learner.publish is PublishMode.DELTA:
            yield "learner.publish", "delta", "needs actor.sleep=0: sleep frees the engines' copies"
        if level > 1 and self.learner.lora.rank:
            law = "drops the base weights, which are never sent. Use 1 with learner.lora.rank > 0"
            yield "actor.sleep", level, law

    def _contradictions_of_base(self) -> Iterator[Contradiction]:
        """Yield settings with which the learner cannot quantise the frozen weights."""
        base = self.model.base
        learner = self.learner
        if base is BaseFormat.FULL:
            return
        if not learner.lora.rank:
            yield "model.base", base.value, "needs learner.lora.rank > 0: it is for frozen weights"
        if learner.precision is Precision.FP16:
            law = "must be full with learner.precision=fp16, which lacks numbers of bf16"
            yield "model.base", base.value, law
        if learner.lora.is_merged:
            law = "must not name experts with model.base=int8 or nf4"
            yield "learner.lora.targets", ",".join(learner.lora.targets), law
        if learner.num_ranks > 1 or learner.offload is Offload.OPTIMIZER:
            law = (
                "must be full with learner.num_ranks > 1 or learner.offload=optimizer, which shard"
            )
            yield "model.base", base.value, f"{law} weights of floating-point numbers"

    def _contradictions_of_actions(self) -> Iterator[Contradiction]:
        """Yield a limit on actions that is smaller than the text of one turn."""
        turn_tokens = self.actor.max_turn_tokens
        needed = needed_mib(self.actor.max_turn_tokens)
        if self.envhub.url or needed <= self.envhub.max_action_mib:
            return
        law = f"actor.max_turn_tokens={turn_tokens} can sample {needed} MiB"
        if needed <= MOST_ACTION_MIB:
            text = f"must be at least {needed}: {law}"
            yield "envhub.max_action_mib", self.envhub.max_action_mib, text
        else:
            text = f"can sample {needed} MiB, but an action has at most {MOST_ACTION_MIB} MiB"
            yield "actor.max_turn_tokens", turn_tokens, text


Config = TypeVar("Config", bound=RunConfig)  # The configuration of a command.


def published_version(cfg: RunConfig, version: int) -> int:
    """Return the version for the engines after `version` steps of the learner.

    Example (learner.hold_back_steps=4, 100 steps): 0 until step 4, 1 after step 5, 100 at the end.
    """
    if version >= cfg.train.num_steps:
        return version
    return max(0, version - cfg.learner.hold_back_steps)


def trains_early(cfg: RunConfig) -> bool:
    """Return whether turns of unfinished episodes are trained: a critic values what follows."""
    is_by_turn = cfg.learner.partial_episodes is PartialEpisodes.TURNS
    return is_by_turn and cfg.algorithm.advantage == Advantage.PPO


def bound_of_parts(cfg: RunConfig) -> int:
    """Return the most versions by which turns may be older than the engine; 0: no part is sent.

    The learner is `hold_back_steps` versions ahead of the engine.
    """
    bound = cfg.learner.max_lag_steps - cfg.learner.hold_back_steps
    return max(1, bound) if trains_early(cfg) else 0


def check_training(cfg: RunConfig) -> None:
    """Check that an episode fits in a microbatch, and that sessions outlast turns.

    Raises: ConfigError: the message has the key and the value.
    """
    budget = cfg.learner.max_tokens_per_microbatch
    longest = cfg.actor.max_model_len
    if cfg.learner.row_tokens < longest:
        ranks = cfg.learner.sequence_ranks
        over = f" / learner.sequence_ranks={ranks}" * (ranks > 1)
        law = f"must be >= actor.max_model_len={longest}{over}, the tokens of the longest episode"
        raise ConfigError(f"learner.max_tokens_per_microbatch={budget}: {law}")
    idle_s = cfg.envhub.session_idle_s
    turn_s = cfg.actor.turn_timeout_s
    if not cfg.envhub.url and idle_s < turn_s:
        law = f"must be >= actor.turn_timeout_s={turn_s:g}: a session is silent during a turn"
        raise ConfigError(f"envhub.session_idle_s={idle_s:g}: {law}")
