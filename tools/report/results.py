"""The results of a run: report.json, and report.html beside it, from the files of its directory."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from common.config.envs import own_tasks
from common.config.run_config import RunConfig
from common.errors import ConfigError
from common.ids import last_after, split_episode_id, subset_of
from common.store.run_dir import RunDir, write_atomically, write_json
from common.text import counted
from common.wire.messages import EpisodeKind, Trajectory
from learner.intervals import gain_interval, wilson_interval
from learner.journal.journal import load_pruned, read_journal
from learner.journal.metrics import MetricsLine, read_metrics
from learner.policy.precision_choice import recorded_precision
from learner.views import subset_names
from tools.dashboard.reading.run_source import RunSource
from tools.dequantise.models import weight_lines
from tools.report.command import render, title_of

logger = logging.getLogger(__name__)

Interval = tuple[float, float]  # A 95 % confidence interval.
DURING = re.compile(r"eval-step-(\d+)-model")  # Group of an evaluation during training.
BEFORE = ("eval-before-model", "eval-before-random_valid", "eval-before-expert")
MAX_LAG_SHOWN = 8
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetScore:
    """Held-out episodes of one subset."""

    success: float  # Share of episodes that solved their item.
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One evaluation, without the episodes that failed in the infrastructure."""

    success: float
    n: int
    ci95: Interval
    by_subset: dict[str, SubsetScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Evaluations of policies that do not learn; None if not played."""

    random_valid: Score | None
    expert: Score | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Success after training minus success before, over the items played in both."""

    success: float
    ci95: Interval | None  # None for fewer than two items.
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One evaluation during training."""

    step: int  # Step at which the evaluation began.
    num: int  # Episodes without an infrastructure failure.
    num_failed: int
    success: float
    ci95: Interval
    score: float  # Mean reward of the episodes.
    first_version: int  # Lowest version of the sampled tokens.
    last_version: int
    own_version_frac: float  # Share of the sampled tokens that version `step` sampled.
    mixed_frac: float  # Share of the episodes that several versions sampled.


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """Means over the steps, in tokens per second; None if not measured."""

    actor: float | None
    learner: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak memory, in bytes."""

    all_roles: int | None  # Peak of the sum over all roles; None if not measured.
    by_role: dict[str, int]  # Resident memory of the roles that report it.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Counts that show whether held-out items stayed out of training."""

    num_train_items_drawn: int
    num_test_items: int
    num_shared_item_ids: int
    num_pruned_files: int  # Oldest files of the journal, whose episodes the counts leave out.


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRow:
    """Episodes of one subset, horizon and length, and how many were never trained on."""

    subset: str
    horizon: int  # Maximum number of turns.
    turns: str  # Range of turns played, such as "6-7".
    num: int
    stale: int
    failed: int
    dropped_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Episodes of one length in sampled tokens, and how many tokens were never trained on."""

    tokens: str  # Range of sampled tokens, such as "129-256".
    num: int
    stale: int
    failed: int
    dropped_frac: float
    sampled_tokens: int
    trained_tokens: int
    stale_tokens: int
    dropped_tokens_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthComparison:
    """Long episodes of one horizon compared with short ones."""

    env: str
    horizon: int
    num_short: int
    num_short_dropped: int
    num_long: int
    num_long_dropped: int
    z: float  # Two-proportion statistic; positive if more long episodes are dropped.
    is_biased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The dropped episodes, from the scheduler's audit in selection.json."""

    rows: list[SelectionRow]
    comparisons: list[LengthComparison]
    lengths: list[LengthRow] = field(default_factory=list[LengthRow])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of a finished run."""

    before: Score | None
    after: Score | None
    baselines: Baselines
    gain: Gain | None
    absent: dict[str, str]  # Evaluation -> the reason for its absence.
    failed_evals: dict[str, int]  # Evaluation -> episodes that failed in the infrastructure.
    eval_curve: list[CurvePoint]
    mode: str
    seed: int
    precision: str  # Precision of the learner's passes and its reason; "" if it never started.
    weights: list[str]  # Each model whose quantised weights were dequantised, as in the log.
    steps: int
    episodes: int  # Episodes issued for training.
    cut_observations: float | None  # Mean per episode; None if unknown.
    wall_s: float | None
    tokens_per_s: TokenRates
    peak_memory_bytes: PeakMemory
    # Lag in versions -> trained tokens; the last bin holds all larger lags.
    lag_histogram: dict[str, int]
    ledger: dict[str, int] | None  # The scheduler's last ledger; None if it never wrote one.
    heldout: HeldOut
    selection: Selection | None
    notes: dict[str, str]  # Subset -> why its numbers are not comparable with published ones.

    @property
    def evaluations(self) -> dict[str, Score]:
        """The existing evaluations by their short names, in the order of tables."""
        named = {
            "before": self.before,
            "after": self.after,
            "random": self.baselines.random_valid,
            "expert": self.baselines.expert,
        }
        return {name: score for name, score in named.items() if score is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEpisode:
    """One held-out episode without an infrastructure failure."""

    item: tuple[str, str]  # Environment and item id.
    subset: str
    is_success: bool


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """The episodes of one evaluation."""

    plays: dict[str, HeldOutEpisode] = field(
        default_factory=dict[str, HeldOutEpisode]
    )  # Episodes by id.
    # Episodes with an infrastructure failure; they are not in `plays`.
    failed: set[str] = field(default_factory=set[str])


@dataclass(slots=True, kw_only=True)
class JournalTotals:
    """The data that a report takes from the journal."""

    evaluations: dict[str, Evaluation] = field(default_factory=lambda: defaultdict(Evaluation))
    train_episodes: set[str] = field(default_factory=set[str])
    train_items: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    test_items: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    # Step of an evaluation during training -> its episodes by id.
    during: dict[int, dict[str, Trajectory]] = field(default_factory=lambda: defaultdict(dict))


def read_totals(folder: Path) -> JournalTotals:
    """Return the totals of a journal; a repeated episode counts once.

    Of several evaluations after training, "after-model" is the last one.
    """
    totals = JournalTotals()
    groups: defaultdict[str, Evaluation] = defaultdict(Evaluation)
    for _, trajectory in read_journal(folder):
        item = (trajectory.env, trajectory.item_id)
        episode_id = trajectory.episode_id
        if trajectory.kind is EpisodeKind.TRAIN:
            totals.train_episodes.add(episode_id)
            totals.train_items.add(item)
            continue
        totals.test_items.add(item)
        group_id, _ = split_episode_id(episode_id)
        if match := DURING.fullmatch(group_id):
            plays = totals.during[int(match[1])]
            earlier = plays.get(episode_id)
            if earlier is None or earlier.end_reason.is_infrastructure_failure:
                plays[episode_id] = trajectory
            continue
        if group_id not in BEFORE and last_after([group_id]) is None:
            continue
        evaluation = groups[group_id]
        if trajectory.end_reason.is_infrastructure_failure:
            evaluation.failed |= {episode_id} - evaluation.plays.keys()
            continue
        evaluation.failed.discard(episode_id)
        subset = subset_of(trajectory.item_id)
        is_success = trajectory.is_success
        play = HeldOutEpisode(item=item, subset=subset, is_success=is_success)
        evaluation.plays.setdefault(episode_id, play)
    for group_id in BEFORE:
        if group_id in groups:
            totals.evaluations[group_id.removeprefix("eval-")] = groups[group_id]
    if (after := last_after(groups)) is not None:
        totals.evaluations["after-model"] = groups[after]
    return totals


def eval_curve(totals: JournalTotals) -> list[CurvePoint]:
    """Return the evaluations during training, in the order of steps.

    An evaluation without any completed episode has no point.
    """
    points = [_point(step, [*plays.values()]) for step, plays in sorted(totals.during.items())]
    return [point for point in points if point is not None]


def _point(step: int, plays: Sequence[Trajectory]) -> CurvePoint | None:
    """Return the point of an evaluation during training; None if no token was sampled."""
    good = [play for play in plays if not play.end_reason.is_infrastructure_failure]
    sampled = [play.versions[play.loss_mask] for play in good]
    tokens = np.concatenate(sampled) if sampled else np.array([], dtype=np.int32)
    if not len(tokens):
        return None
    num_solved = sum(play.is_success for play in good)
    return CurvePoint(
        step=step,
        num=len(good),
        num_failed=len(plays) - len(good),
        success=num_solved / len(good),
        ci95=wilson_interval(num_solved, len(good)),
        score=sum(play.reward for play in good) / len(good),
        first_version=int(tokens.min()),
        last_version=int(tokens.max()),
        own_version_frac=float((tokens == step).mean()),
        mixed_frac=sum(len(np.unique(versions)) > 1 for versions in sampled) / len(good),
    )


def score(plays: Sequence[HeldOutEpisode]) -> Score:
    """Return success with its interval, overall and by subset. Needs at least one play."""
    names = subset_names((play.item[0], play.subset) for play in plays)
    by_subset: dict[str, list[bool]] = defaultdict(list)
    for play in plays:
        by_subset[names[play.item[0], play.subset]].append(play.is_success)
    num_solved = sum(play.is_success for play in plays)
    num = len(plays)
    return Score(
        success=num_solved / num,
        n=num,
        ci95=wilson_interval(num_solved, num),
        by_subset={
            subset: SubsetScore(success=sum(some) / len(some), n=len(some))
            for subset, some in sorted(by_subset.items())
        },
    )


def paired_gain(before: Iterable[HeldOutEpisode], after: Iterable[HeldOutEpisode]) -> Gain | None:
    """Return the mean gain over items played in both; None if there is no such item.

    The interval is that of the mean of the items' differences.
    """
    old = _success_by_item(before)
    new = _success_by_item(after)
    gains = [new[item] - old[item] for item in sorted(old.keys() & new.keys())]
    if not gains:
        return None
    interval = gain_interval(gains) if len(gains) > 1 else None
    return Gain(success=fmean(gains), ci95=interval, num_pairs=len(gains))


def lag_histogram(lines: list[MetricsLine]) -> dict[str, int]:
    """Return trained tokens by lag in versions; the last bin holds all larger lags."""
    names = {str(k): f"offpolicy/lag_{k}_tokens" for k in range(MAX_LAG_SHOWN + 1)}
    return {k: int(sum(v)) for k, name in names.items() if (v := _values(lines, name))}


def mean(lines: list[MetricsLine], name: str) -> float | None:
    """Return the mean over the steps that have a value; None if none has."""
    values = _values(lines, name)
    return sum(values) / len(values) if values else None


def peak(lines: list[MetricsLine], name: str) -> float | None:
    """Return the largest value of any step; None if no step has one."""
    return max(_values(lines, name), default=None)


def _values(lines: list[MetricsLine], name: str) -> list[float]:
    """Return the values of a metric in all steps that have it."""
    return [value for line in lines if (value := line.get(name)) is not None]


def _success_by_item(plays: Iterable[HeldOutEpisode]) -> dict[tuple[str, str], float]:
    """Return the mean success of each item."""
    by_item: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for play in plays:
        by_item[play.item].append(play.is_success)
    return {item: fmean(some) for item, some in by_item.items()}


def write_report(
    run_dir: RunDir,
    cfg: RunConfig,
    *,
    wall_s: float | None = None,
    peak_memory_bytes: int | None = None,
) -> Report:
    """Write both files and return the content of report.json.

    Args:
        wall_s: seconds of the whole run; None: the time of the last step in metrics.jsonl.
        peak_memory_bytes: peak of the sum over all roles; None: not measured.

    Raises: WireError, ValueError: the journal or metrics.jsonl is damaged before its end.
    """
    lines = read_metrics(run_dir.metrics)
    peak_bytes = peak_memory_bytes or None
    report = build_report(run_dir, lines, cfg, wall_s=wall_s, peak_memory_bytes=peak_bytes)
    write_json(run_dir.report, asdict(report))
    source = RunSource(run_dir.root.resolve(), name=cfg.run.name)
    while source.refresh(budget_s=1.0):
        pass
    page = render([source], title=title_of([cfg.run.name]))
    write_atomically(run_dir.root / "report.html", page)
    logger.info("wrote report folder=%s", run_dir.root)
    return report


def summary(report: Report) -> str:
    """Return the outcome of a run in one line."""
    parts: list[str] = []
    for name, scored_evaluation in report.evaluations.items():
        low, high = scored_evaluation.ci95
        interval = f" [{low:.3f}, {high:.3f}]" if name in ("before", "after") else ""
        parts.append(f"{name} {scored_evaluation.success:.3f}{interval}")
    if not parts:
        return "no held-out evaluation was configured"
    scored = report.after or report.before
    return f"held-out success ({counted(scored.n if scored else 0, 'item')}): " + ", ".join(parts)


def build_report(
    run_dir: RunDir,
    lines: list[MetricsLine],
    cfg: RunConfig,
    *,
    wall_s: float | None,
    peak_memory_bytes: int | None,
) -> Report:
    """Return the report. An absent evaluation is None; `absent` has the reason."""
    totals = read_totals(run_dir.journal)
    evals = totals.evaluations
    absent: dict[str, str] = {}
    ledger = _read(run_dir.ledger, dict[str, Any])
    has_baselines = cfg.eval.baselines
    num_pruned = load_pruned(run_dir.journal).before
    score_of = partial(_score, evals, absent, num_pruned)
    return Report(
        before=score_of("before-model", is_wanted=cfg.eval.before),
        after=score_of("after-model", is_wanted=cfg.eval.after),
        baselines=Baselines(
            random_valid=score_of("before-random_valid", is_wanted=has_baselines),
            expert=score_of("before-expert", is_wanted=has_baselines),
        ),
        gain=paired_gain(_plays(evals, "before-model"), _plays(evals, "after-model")),
        absent=absent,
        failed_evals={name: len(evaluation.failed) for name, evaluation in evals.items()},
        eval_curve=eval_curve(totals),
        mode=cfg.train.mode.value,
        seed=cfg.run.seed,
        precision=recorded_precision(run_dir.precision),
        weights=weight_lines(cfg),
        steps=int(peak(lines, "step") or 0),
        episodes=(ledger or {}).get("issued", len(totals.train_episodes)),
        cut_observations=mean(lines, "episodes/cut_observations_mean"),
        wall_s=wall_s if wall_s is not None else peak(lines, "time_s"),
        tokens_per_s=TokenRates(
            actor=mean(lines, "actor/tokens_per_s"), learner=mean(lines, "train/tokens_per_s")
        ),
        peak_memory_bytes=PeakMemory(all_roles=peak_memory_bytes, by_role=_peak_by_role(lines)),
        lag_histogram=lag_histogram(lines),
        ledger=ledger,
        heldout=HeldOut(
            num_train_items_drawn=len(totals.train_items),
            num_test_items=len(totals.test_items),
            num_shared_item_ids=len(totals.train_items & totals.test_items),
            num_pruned_files=num_pruned,
        ),
        selection=_read(run_dir.selection, Selection),
        notes=_notes(cfg),
    )


def _notes(cfg: RunConfig) -> dict[str, str]:
    """Return the notes on subsets, by the names that tables have for these."""
    names = subset_names((task.env, task.subset) for task in cfg.tasks)
    return {name: note for (env, _), name in names.items() if (note := own_tasks(env, cfg.envs))}


def _score(
    evals: dict[str, Evaluation],
    absent: dict[str, str],
    num_pruned: int,
    name: str,
    *,
    is_wanted: bool,
) -> Score | None:
    """Return the score of an evaluation; None without plays, with the reason in `absent`."""
    if plays := _plays(evals, name):
        return score(plays)
    num_failed = len(evals[name].failed) if name in evals else 0
    if num_failed:
        absent[name] = f"all played episodes ({num_failed}) ended with an infrastructure failure"
    elif is_wanted and num_pruned:
        files = counted(num_pruned, "file")
        absent[name] = f"no episode is in the journal, of which {files} were pruned"
    else:
        absent[name] = "no episode was played" if is_wanted else "not configured"
    return None


def _plays(evals: dict[str, Evaluation], name: str) -> list[HeldOutEpisode]:
    return list(evals[name].plays.values()) if name in evals else []


def _peak_by_role(lines: list[MetricsLine]) -> dict[str, int]:
    """Return the peak memory of each role in bytes."""
    names = sorted({name for line in lines for name in line if name.startswith("memory/")})
    return {
        name.removeprefix("memory/").removesuffix("_rss_bytes"): int(value)
        for name in names
        if (value := peak(lines, name)) is not None
    }


def _read(path: Path, kind: type[T]) -> T | None:
    """Return the parsed content of a scheduler's file; None if there is no file.

    Raises: ConfigError: it is damaged; names the file.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes()) if path.exists() else None
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        remedy = "Remove it: the report is then written without it."
        raise ConfigError(f"{path} is damaged ({problem}). {remedy}") from error
