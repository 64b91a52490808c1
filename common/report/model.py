"""What a run's report holds: report.json is this tree, and the page is drawn from it."""

from dataclasses import dataclass

Interval = tuple[float, float]  # of 95%


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsetScore:
    """Held-out episodes of one subset."""

    success: float  # share of them that solved their item
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One evaluation, without the episodes that the infrastructure failed."""

    success: float
    n: int
    ci95: Interval
    by_subset: dict[str, SubsetScore]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baselines:
    """Evaluations of players that do not learn; None if not played."""

    random_valid: Score | None
    expert: Score | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Success after less before, over the items played in both."""

    success: float
    ci95: Interval | None  # None below two items
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One evaluation beside training."""

    step: int  # that opened it
    num: int  # episodes that say something about the policy
    num_failed: int
    success: float
    ci95: Interval
    score: float  # mean last reward
    first_version: int  # of the tokens sampled
    last_version: int
    own_version_frac: float  # share of the sampled tokens that version `step` sampled
    mixed_frac: float  # share of the episodes that more than one version played


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRates:
    """Mean over the steps, in tokens per second; None if not measured."""

    actor: float | None
    learner: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Largest memory ever seen, in bytes."""

    all_roles: int | None  # together, at one time; None if nobody watched
    by_role: dict[str, int]  # resident size, of the roles that report it


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Whether held-out items stayed out of training."""

    num_train_items_drawn: int
    num_test_items: int
    num_shared_item_ids: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRow:
    """Episodes of one subset, horizon and length, and how many were never trained on."""

    subset: str
    horizon: int  # most turns
    turns: str  # that they took, like "6-7"
    num: int
    stale: int
    failed: int
    dropped_frac: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthComparison:
    """Long episodes of one horizon against short ones."""

    env: str
    horizon: int
    num_short: int
    num_short_dropped: int
    num_long: int
    num_long_dropped: int
    z: float  # two-proportion statistic, positive if the long are dropped more
    is_biased: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Who was dropped, as the scheduler audits it in selection.json."""

    rows: list[SelectionRow]
    comparisons: list[LengthComparison]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A finished run in numbers."""

    before: Score | None
    after: Score | None
    baselines: Baselines
    gain: Gain | None
    absent: dict[str, str]  # evaluation -> why there is none
    failed_evals: dict[str, int]  # evaluation -> episodes that the infrastructure failed
    eval_curve: list[CurvePoint]
    mode: str
    seed: int
    steps: int
    episodes: int  # issued for training
    wall_s: float | None
    tokens_per_s: TokenRates
    peak_memory_bytes: PeakMemory
    lag_histogram: dict[str, int]  # lag in versions -> trained tokens; the last holds the rest
    ledger: dict[str, int] | None  # as the scheduler left it; None if it never wrote one
    heldout: HeldOut
    selection: Selection | None
    notes: dict[str, str]  # subset -> what keeps its numbers from being compared with others'

    @property
    def evaluations(self) -> dict[str, Score]:
        """The evaluations that there are, by their short names, in the order of tables."""
        named = {
            "before": self.before,
            "after": self.after,
            "random": self.baselines.random_valid,
            "expert": self.baselines.expert,
        }
        return {name: score for name, score in named.items() if score is not None}
