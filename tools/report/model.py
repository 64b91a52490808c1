"""The data of a run's report: report.json has this structure, and the page is drawn from it."""

from dataclasses import dataclass

Interval = tuple[float, float]  # A 95 % confidence interval.


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
