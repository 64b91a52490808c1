"""The command `recompute`: repeats the training of a run from its recorded data.

It rebuilds the run's trainer and replays its batches without engine, environment or scheduler. The
counterfactual trains a learner with other settings on the same data.
"""

import json
import logging
import math
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
import torch
import yaml
from transformers import AutoTokenizer

from common.config.keys import dotted
from common.config.load import load_received
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.repository import ROOT, git_revision
from common.segments import as_rows
from common.store.run_dir import RunDir, write_json
from common.text import counted
from common.user_code import changed_functions, digests_of
from common.wire.messages import EndReason, Trajectory
from learner.algorithms.user_functions import functions_of
from learner.ingest.buffer import Group
from learner.objective.advantages import samples_of
from learner.objective.description import summary_lines
from learner.objective.measures import ratio_statistics
from learner.policy.finite import TrainingDiverged
from learner.policy.model import pick_device
from learner.recovery.checksums import Start, differences, machine_facts
from learner.recovery.resume import groups_of, redo
from learner.recovery.reward_log import read_group_rewards
from learner.recovery.step_log import LoggedStep
from learner.training.build import load_start, make_trainer
from learner.training.checkpoint import Checkpoints
from learner.training.digests import StepDigests, first_difference
from learner.training.rank_workers import RankWorkers
from learner.training.trainer import TrainResult
from tools.cli.command_line import ParsedCommand
from tools.dequantise.models import plain_models
from tools.recompute.plan import EpisodesMissing, JournalEpisodes, Plan, episodes_of, make_plan

logger = logging.getLogger(__name__)

_OTHER_ROLES = ("horizon", "curriculum", "groups", "tasks", "mixture", "scheduler", "actor")
# Keys of `learner` that only concern the transport of data, weights and checkpoints.
_NO_LEARNING = {
    "host",
    "port",
    "advertise",
    "num_gpus",
    "rank_timeout_s",
    "max_lag_steps",
    "hold_back_steps",
    "batch_timeout_s",
    "publish_timeout_s",
    "publish_bucket_mb",
    "publish_parts",
    "publish",
    "weights_transport",
    "max_canary_delta",
    "max_canary_alarms",
    "checkpoint_every_steps",
    "checkpoint_every_s",
    "keep_checkpoints",
}
_HINT = "Only algorithm.* and the learner.* keys that affect training can be changed."
_COLUMNS = (("loss", "loss/policy"), ("grad_norm", "train/grad_norm"), ("lr", "train/lr"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFilter:
    """A filter of the episodes to train on. By default it keeps all."""

    horizons: tuple[int, int] | None = None  # Minimum and maximum horizon of an episode.
    dropped: frozenset[EndReason] = frozenset()  # End reasons of the episodes to leave out.

    def of(self, groups: Sequence[Group]) -> list[Group]:
        """Return the filtered groups. A group that is reduced to a single member is left out."""
        left: list[Group] = []
        for group in groups:
            members = [each for each in group.members if self._keeps(each)]
            if len(members) >= min(2, len(group.members)):
                left.append(Group(group_id=group.group_id, members=members))
        return left

    def _keeps(self, trajectory: Trajectory) -> bool:
        """Return whether an episode has a selected horizon and end."""
        low, high = self.horizons or (0, trajectory.horizon)
        return low <= trajectory.horizon <= high and trajectory.end_reason not in self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedBatch:
    """The result of one recomputed batch."""

    step: LoggedStep
    result: TrainResult | None  # None if the filter has left no episode.
    digests: StepDigests | None
    # [tokens] nats before training on the batch
    logprobs: np.ndarray | None = field(repr=False, default=None)


class Rebuilt:
    """The trainer of a configuration, with its other ranks."""

    def __init__(self, cfg: RunConfig, checkpoint: Path | None) -> None:
        """Load a checkpoint, or the weights that the configuration names."""
        # One node computes the steps of several.
        learner = replace(cfg.learner, num_nodes=1, ranks_per_node=0)
        self.cfg = cfg = replace(cfg, learner=learner)
        device = pick_device(cfg.learner.device)
        self._workers = RankWorkers(cfg, checkpoint)
        try:
            self._model, self._path = load_start(cfg, checkpoint, device)
            self._workers.wait_loaded()
            if device.type == "cpu":
                torch.set_num_threads(max(1, cfg.learner.num_threads))
            ranks = self._workers.join(cfg.learner)
            self.trainer, self.version = make_trainer(
                cfg, self._model, checkpoint, ranks=ranks, announce=self._workers.announce
            )
        except BaseException:
            self._workers.stop()
            raise

    def save(self, folder: Path, version: int) -> Path:
        """Write a checkpoint in the run's own format, and return it."""
        tokenizer = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
        checkpoints = Checkpoints(folder, self.cfg.learner)
        made = checkpoints.save(
            version, model=self._model, tokenizer=tokenizer, trainer=self.trainer
        )
        checkpoints.wait()
        return made

    def close(self) -> None:
        """Stop the other ranks."""
        self._workers.stop()


class Recomputation:
    """Recomputes the batches of a plan in order, each with the settings of the start that counts.

    Example: a learner computed steps 1 to 60 with rate 1e-3. It was stopped and resumed from the
    checkpoint of step 50 with rate 5e-4. After step 50 this class saves a checkpoint, and continues
    from it with rate 5e-4.
    """

    def __init__(self, plan: Plan, overrides: list[str], *, is_counterfactual: bool) -> None:
        """Prepare the recomputation.

        In a counterfactual the controller decides anew whether to skip a batch.

        Raises: ConfigError: an override is wrong.
        """
        self._plan = plan
        self._overrides = overrides
        self._is_counterfactual = is_counterfactual
        self._start = plan.start_of(plan.steps[0])
        self._rebuilt: Rebuilt | None = None
        # A wrong override raises here, before any computation.
        self.cfg = config_of(plan.run_dir, self._start, overrides)
        if self.cfg.algorithm.teacher.is_on:
            raise ConfigError(
                f"{plan.run_dir.root}: the run has a teacher (algorithm.teacher), and the teacher's"
                " scores of its batches are not kept. Only runs without a teacher can be recomputed"
            )
        self._folder = Path(tempfile.mkdtemp(prefix="longstride-recompute-"))

    def __enter__(self) -> "Recomputation":
        return self

    def __exit__(self, *_: object) -> None:
        if self._rebuilt is not None:
            self._rebuilt.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def begin(self) -> Rebuilt:
        """Load the starting weights of the plan."""
        self._rebuilt = Rebuilt(self.cfg, self._plan.checkpoint)
        return self._rebuilt

    def run(
        self, episodes: JournalEpisodes, only: EpisodeFilter, *, has_scores: bool
    ) -> Iterator[RecomputedBatch]:
        """Yield the result of each batch.

        Args:
            only: selects the episodes that a counterfactual trains on, and those that are scored.
            has_scores: return the log-probabilities of each batch before it is trained on.

        Raises: EpisodesMissing, and all errors of training.
        """
        rewards = read_group_rewards(self._plan.run_dir.group_rewards)
        for step in self._plan.steps:
            rebuilt = self._as_computed(step)
            groups = groups_of(step, episodes.take(step), rewards)
            selected = only.of(groups)
            logprobs = _score(rebuilt, selected) if has_scores else None
            result = None
            if not self._is_counterfactual:
                result = redo(rebuilt.trainer, step, groups, rebuilt.cfg.algorithm)
            elif selected:
                trainer = rebuilt.trainer
                version = step.version - (not step.is_skipped)
                samples = samples_of(selected, rebuilt.cfg.algorithm, trainer.baseline)
                result = trainer.train_on(samples, version=version)
            digests = rebuilt.trainer.digests if result is not None else None
            yield RecomputedBatch(step=step, result=result, digests=digests, logprobs=logprobs)

    def _as_computed(self, step: LoggedStep) -> Rebuilt:
        """Return a trainer with the settings that the run had for a batch."""
        rebuilt = self._rebuilt or self.begin()
        start = self._plan.start_of(step)
        if start.settings != self._start.settings:
            version = step.version - (not step.is_skipped)
            logger.info("changing to the settings of a later start step=%d", version + 1)
            cfg = config_of(self._plan.run_dir, start, self._overrides)
            saved = rebuilt.save(self._folder, version)
            rebuilt.close()
            rebuilt = self._rebuilt = Rebuilt(cfg, saved)
        self._start = start
        return rebuilt


def _score(rebuilt: Rebuilt, groups: Sequence[Group]) -> np.ndarray:
    """Return the log-probabilities [tokens] of the sampled tokens, at temperature 1."""
    members = [member for group in groups for member in group.members]
    members = [row for each in members for row in as_rows(each) if row.loss_mask.any()]
    logprobs = rebuilt.trainer.score([each.token_ids.tolist() for each in members])
    parts = [
        np.asarray(scores, dtype=np.float32)[member.loss_mask[1:]]
        for scores, member in zip(logprobs, members, strict=True)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)


def config_of(run_dir: RunDir, start: Start, overrides: list[str]) -> RunConfig:
    """Return the configuration of one start of a run, with overrides.

    Raises: ConfigError: the file cannot be read, or an override is wrong.
    """
    if not run_dir.config.is_file():
        raise ConfigError(
            f"{run_dir.config}: this file defines the run and is missing; restore it from a backup"
        )
    tree = yaml.safe_load(run_dir.config.read_text(encoding="utf-8"))
    for name, values in start.settings.items():
        tree[name] = tree.get(name, {}) | values
    return plain_models(load_received(yaml.safe_dump(tree, sort_keys=False), overrides))


def split_options(words: Sequence[str]) -> tuple[list[str], EpisodeFilter]:
    """Return the overrides among key=value words, and the selection of trained episodes.

    Raises: ConfigError: a key has no effect on the recomputed training.
    """
    overrides: list[str] = []
    only: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        name = dotted(key.strip())
        if not equals:
            raise ConfigError(f"{word}: expects key=value after the name of the run")
        if name == "horizon":
            only["horizons"] = _horizons(word, value)
        elif name == "drop":
            only["dropped"] = _ends(word, value)
        else:
            _check_key(name, word)
            overrides.append(word)
    return overrides, EpisodeFilter(**only)


def _check_key(name: str, word: str) -> None:
    """Raise ConfigError if a key changes more than the training on recorded data."""
    section, _, rest = name.partition(".")
    is_about_training = rest.partition(".")[0] not in _NO_LEARNING
    if name == "algorithm.filter_zero_variance":
        why = "this key decides which groups become batches, and the batches are recorded"
    elif section == "algorithm" or (name.startswith("learner.") and is_about_training):
        return
    elif section in _OTHER_ROLES:
        why = "this key affects playing and batching, and the batches are recorded"
        if section == "horizon":
            why += "; horizon=a:b selects the episodes with a horizon of a to b turns"
    else:
        why = "this key does not affect training on the recorded batches"
    raise ConfigError(f"{word}: {why}. {_HINT}")


def _horizons(word: str, value: str) -> tuple[int, int]:
    """Return the range of an option horizon=a:b. Raises: ConfigError."""
    low, colon, high = value.partition(":")
    if not (colon and low.isdigit() and high.isdigit() and int(low) <= int(high)):
        raise ConfigError(f"{word}: expects a:b, the smallest and the largest horizon in turns")
    return int(low), int(high)


def _ends(word: str, value: str) -> frozenset[EndReason]:
    """Return the end reasons of an option. Raises: ConfigError."""
    try:
        return frozenset(EndReason(each) for each in value.split(","))
    except ValueError as error:
        names = ", ".join(each.value for each in EndReason if not each.is_infrastructure_failure)
        raise ConfigError(
            f"{word}: expects end reasons, separated by commas, out of {names}"
        ) from error


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """One batch of both learners."""

    plain: dict[str, Any]  # Values for JSON.

    def text(self) -> str:
        """Return the batch as a row of the table."""
        p = self.plain
        numbers = [
            _number(p[side].get(name)) for _, name in _COLUMNS for side in ("metrics", "recorded")
        ]
        shown = [_number(p["ess_frac"]), _number(p["kl"]), *numbers]
        cells = "".join(f"{each:>10}" for each in shown)
        return f"{p['step']:>6} {p['policy']:<14}{cells}  {p['note']}".rstrip()


def header() -> str:
    """Return the head of the table."""
    names = ["ess", "kl", *(n for name, _ in _COLUMNS for n in (name, "recorded"))]
    return f"{'step':>6} {'policy':<14}" + "".join(f"{name:>10}" for name in names)


def _number(value: float | None) -> str:
    """Return a number for a table, "-" for an unknown one."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"


class RecordedResults:
    """The recorded learner's result of each batch. A temporary file holds the log-probabilities."""

    def __init__(self) -> None:
        self._rows: list[RecomputedBatch] = []
        self._file: IO[bytes] = TemporaryFile()  # noqa: SIM115 - `close` closes it.

    def add(self, redone: RecomputedBatch) -> None:
        """Add a batch with its log-probabilities."""
        assert redone.logprobs is not None
        np.save(self._file, redone.logprobs, allow_pickle=False)
        bare = RecomputedBatch(step=redone.step, result=redone.result, digests=redone.digests)
        self._rows.append(bare)

    def compare(
        self, others: Iterator[RecomputedBatch], *, first: int
    ) -> Iterator[BatchComparison]:
        """Yield a row for each batch from step `first` on, with the other learner's result."""
        self._file.seek(0)
        is_same = True  # Whether both learners have the same weights before the batch.
        for recorded in self._rows:
            logprobs = np.load(self._file, allow_pickle=False)
            try:
                other = next(others)
            except TrainingDiverged as error:
                yield BatchComparison(
                    _as_json_values(recorded, None, {}, is_same=is_same)
                    | {"note": f"ended: {error}"}
                )
                return
            distance = _distance(other.logprobs, logprobs)
            row = BatchComparison(_as_json_values(recorded, other, distance, is_same=is_same))
            if recorded.digests is not None and other.digests is not None:
                is_same = is_same and other.digests.weights == recorded.digests.weights
            elif other.digests is None:  # The filter has left no episode, so it has not trained.
                is_same = is_same and recorded.step.is_skipped
            if recorded.step.consumed_by >= first:
                yield row

    def close(self) -> None:
        """Close and delete the file."""
        self._file.close()


def _distance(ours: np.ndarray | None, theirs: np.ndarray) -> dict[str, float]:
    """Return the effective sample size of pi / recorded over a batch, and the k3 estimate of KL.

    The KL is KL(recorded | pi). Both are over the tokens that the recorded policies sampled some
    steps earlier.
    """
    if ours is None or not ours.size:
        return {}
    statistics = ratio_statistics(torch.from_numpy(ours), torch.from_numpy(theirs))
    return {"ess_frac": statistics["offpolicy/ess_frac"], "kl": statistics["policy/kl_sampler"]}


def _as_json_values(
    recorded: RecomputedBatch,
    other: RecomputedBatch | None,
    distance: dict[str, float],
    *,
    is_same: bool,
) -> dict[str, Any]:
    """Return the comparison of a batch as values for JSON."""
    result = None if other is None else other.result
    was = recorded.step.is_skipped
    now = result is not None and result.decision.is_skipped
    note = "skipped by both" if was and now else "skipped by the run" if was else "skipped" * now
    return {
        "step": recorded.step.version,
        "batch": recorded.step.number,
        "policy": "recorded" if is_same else "counterfactual",
        "ess_frac": distance.get("ess_frac"),
        "kl": distance.get("kl"),
        "metrics": {} if result is None else result.metrics,
        "recorded": {} if recorded.result is None else recorded.result.metrics,
        "note": note if result is not None else "no episode left",
    }


USAGE = "recompute RUN [--steps a:b] [--json FILE] [key=value ...]"
LOG_EVERY_S = 30.0


def recompute(request: ParsedCommand) -> int:
    """Recompute a run; return the exit code: 1 if a step differs or cannot be read.

    Raises: ConfigError: no such run or steps, pruned data, or an override without effect.
    """
    words = [word for word in request.overrides if not word.startswith("run.dir=")]
    if not words or "=" in words[0] or request.config is not None:
        raise ConfigError(f"usage: run.py {USAGE}")
    setting = next((w for w in request.overrides if w.startswith("run.dir=")), "run.dir=runs")
    folder = ROOT / setting.removeprefix("run.dir=") / words[0]
    run_dir = RunDir(root=folder if folder.exists() else Path(words[0]))
    if not run_dir.root.is_dir():
        raise ConfigError(f"{words[0]}: there is no such run directory ({folder})")
    overrides, only = split_options(words[1:])
    plan = make_plan(run_dir, request.steps)
    num_skipped = sum(step.is_skipped for step in plan.steps)
    num_starts = len({id(plan.start_of(step)) for step in plan.steps})
    print(
        f"{run_dir.root.name}: steps {plan.first} to {plan.last}, recomputed from {plan.origin}"
        f" (step {plan.version}): {counted(len(plan.steps), 'batch', 'batches')}, {num_skipped} of"
        f" them skipped. The run computed them in {counted(num_starts, 'start')} of the learner."
    )
    path = Path(request.json or run_dir.root / "recompute.json")
    if overrides or only != EpisodeFilter():
        return _Counterfactual(plan, overrides, only).run(path, is_dry=request.is_dry)
    with Recomputation(plan, [], is_counterfactual=False) as again:
        return 0 if request.is_dry else _Check(plan).run(again, path)


class _Check:
    """Compares the recomputed batches with the run's checksums, batch by batch."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._num_equal = self._num_unknown = 0
        self.problem = ""
        self.step: int | None = None  # The first step that differs.
        self._logged_at = time.monotonic()

    def run(self, again: Recomputation, path: Path) -> int:
        """Recompute the plan up to the first step that differs; return the exit code."""
        episodes = episodes_of(self._plan)
        try:
            self.begin(again.begin())
            if not self.problem:
                for redone in again.run(episodes, EpisodeFilter(), has_scores=False):
                    if not self.take(redone):
                        break
        except EpisodesMissing as error:
            self.step = error.step.version
            self.problem = f"batch: {error}"
        self.finish(episodes.damage)
        result: dict[str, Any] = {
            "first": self._plan.first,
            "last": self._plan.last,
            "equal_checksums": self._num_equal,
            "without_checksum": self._num_unknown,
            "first_difference": {"step": self.step, "what": self.problem} if self.problem else None,
            "cpu_s": _cpu_s(),
            "learner_cpu_s": self._plan.record.learner_cpu_s(),
        }
        write_json(path, result)
        return 1 if self.problem else 0

    def begin(self, rebuilt: Rebuilt) -> None:
        """Report differences of machine and code, and check the initial weights."""
        plan = self._plan
        start = plan.start_of(plan.steps[0])
        now = machine_facts(pick_device(rebuilt.cfg.learner.device))
        for line in differences(start.machine, now):
            print(f"this machine differs from the run's, so rounding may differ: {line}")
        functions = digests_of(functions_of(rebuilt.cfg.algorithm))
        for line in changed_functions(start.functions, functions):
            print(f"{line}, so the numbers may differ")
        code = git_revision()
        if start.code != code:
            was = start.code or "unknown"
            print(f"the code differs from the run's: was {was}, is {code or 'unknown'}")
        weights, frozen = rebuilt.trainer.checksums()
        recorded = {each.version: each for each in plan.record.starts}.get(plan.version)
        lines = plan.record.lines.items()
        noted = [line for (version, _), line in lines if version == plan.version]
        expected = recorded.weights if recorded else noted[-1].digests.weights if noted else weights
        is_alike = recorded is not None or self._is_comparable(noted[-1:], rebuilt)
        if is_alike and weights != expected:
            self.step = plan.version
            where = rebuilt.cfg.model.path if plan.checkpoint is None else plan.checkpoint
            self.problem = f"weights: {where} does not have the weights of the run"
        elif recorded is not None and frozen != recorded.frozen:
            self.step = plan.version
            where = rebuilt.cfg.model.path
            self.problem = f"weights: the frozen weights ({where}, or the reference) differ"
        self._num_equal += is_alike and not self.problem

    def _is_comparable(self, noted: list[Any], rebuilt: Rebuilt) -> bool:
        """Return whether the run had as many ranks as this learner: each has its own digests."""
        num_ranks = rebuilt.cfg.learner.num_ranks
        starts = self._plan.record.starts
        return any(
            starts[line.start].settings["learner"]["num_ranks"] == num_ranks for line in noted
        )

    def take(self, redone: RecomputedBatch) -> bool:
        """Compare one batch; return whether to continue."""
        step = redone.step
        line = self._plan.record.lines.get((step.version, step.number))
        if line is None or redone.digests is None:
            self._num_unknown += 1
            return True
        names = [name for ids in step.groups for name in ids]
        self.problem = first_difference(line.digests, redone.digests, names)
        if self.problem:
            self.step = step.version
            return False
        self._num_equal += not step.is_skipped
        if time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            print(f"step {step.version}: all steps are equal so far")
        return True

    def finish(self, damage: list[str]) -> None:
        """Report the result."""
        if self.problem:
            print(f"step {self.step} differs: {self.problem}")
            return
        for text in damage[:3]:
            print(f"the journal is damaged, but not in episodes of these steps: {text}")
        if self._num_unknown:
            print(
                f"{counted(self._num_unknown, 'batch was', 'batches were')} not compared, because"
                " the run has no checksum of them"
            )
        learner_s = self._plan.record.learner_cpu_s()
        print(
            f"equal: {'all ' * (self._num_equal > 1)}{counted(self._num_equal, 'checksum')} of"
            f" weights, versions {self._plan.version} to {self._plan.last}. Recomputing took"
            f" {_cpu_s():.1f} CPU-seconds, the whole learner {learner_s:.1f}."
        )


class _Counterfactual:
    """Recomputes the run's own learner, and then a learner with other settings on the same data."""

    def __init__(self, plan: Plan, overrides: list[str], only: EpisodeFilter) -> None:
        self._plan = plan
        self._overrides = overrides
        self._only = only

    def run(self, path: Path, *, is_dry: bool) -> int:
        """Print the table and write it as JSON; return the exit code."""
        plan = self._plan
        with Recomputation(plan, self._overrides, is_counterfactual=True) as other:
            for line in summary_lines(other.cfg.algorithm, other.cfg.learner):
                print(line)
            if is_dry:
                return 0
            recorded = RecordedResults()
            try:
                if problem := self._compute_recorded(recorded):
                    print(f"the recorded steps are not reproduced bit for bit: {problem}")
                print(header())
                rows: list[dict[str, Any]] = []
                batches = other.run(episodes_of(plan), self._only, has_scores=True)
                for row in recorded.compare(batches, first=plan.first):
                    print(row.text())
                    rows.append(row.plain)
            except EpisodesMissing as error:
                print(f"step {error.step.version} cannot be recomputed: {error}")
                return 1
            finally:
                recorded.close()
        if rows and all(row["policy"] == "recorded" for row in rows) and len(rows) > 1:
            print("the overrides change nothing on this data")
        only = asdict(self._only) | {"dropped": sorted(self._only.dropped)}
        result = {"overrides": self._overrides, "only": only, "origin": plan.origin, "rows": rows}
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")
        return 0

    def _compute_recorded(self, recorded: RecordedResults) -> str:
        """Recompute the batches with the run's own settings; return the first difference."""
        check = _Check(self._plan)
        problem = ""
        with Recomputation(self._plan, [], is_counterfactual=False) as again:
            check.begin(again.begin())
            for redone in again.run(episodes_of(self._plan), self._only, has_scores=True):
                recorded.add(redone)
                if not check.problem and not check.take(redone):
                    problem = f"step {check.step}: {check.problem}"
        return problem or check.problem


def _cpu_s() -> float:
    """Return the CPU-seconds of this process and of the ranks that have ended."""
    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
