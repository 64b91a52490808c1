"""Cards of report.html about how the machine ran: lag, ledger, waits, rates, who was dropped."""

from common.report.charts import Series, bar_chart, line_chart, short_number
from common.report.curriculum import (
    SMOOTH_STEPS,
    changes_shown,
    curriculum_charts,
    points_of,
    smooth,
)
from common.report.html import card, duration, legend, note_line, shares_card, table
from common.report.model import LengthComparison, Report, Selection
from common.report.results import MAX_LAG_SHOWN, has, mean, total
from common.store.metrics import MetricsLine

MAX_ROWS = 12  # of the table of dropped episodes
STEPS = (
    ("Actors", "actor/tokens_per_s", "sampled tokens per second"),
    ("Learner", "train/tokens_per_s", "trained tokens per second"),
    ("Episodes", "actor/episodes_per_s", "finished episodes per second"),
    ("Prefix cache", "actor/prefix_hit_frac", "share of prompt tokens that it held"),
    ("Turns", "episodes/turns_mean", "mean turns per episode"),
    ("Entropy", "policy/entropy", "nats per sampled token"),
    ("Mutual information", "policy/mutual_information", "nats, of prompt and first answer"),
    ("Effective sample size", "offpolicy/ess_frac", "share of the batch"),
)
_LEDGER = {"trained": "c1", "filtered": "c2", "stale": "c3", "failed": "c5", "in_flight": "c4"}


def curriculum_card(lines: list[MetricsLine]) -> str:
    """Return the horizons over steps, below success and what they cut."""
    charts = curriculum_charts(lines)
    if not charts:
        return ""
    note = (
        "Share of the training episodes, and below it the most turns that an episode of the batch"
        " was allowed."
    )
    note += " Upright lines: it changed." if changes_shown(lines) else ""
    body = "".join(chart + legend(names) for chart, names in charts)
    return card("Horizon curriculum", body, note)


def context_full_card(lines: list[MetricsLine]) -> str:
    """Return a card only where it happened: it says that `actor.max_model_len` is too small."""
    name = "episodes/context_full_frac"
    if not total(lines, name):
        return ""
    return steps_card("Episodes cut by the context", lines, name, "share")


def steps_card(heading: str, lines: list[MetricsLine], name: str, unit: str) -> str:
    """Return one metric over the steps, "" if no step has it."""
    if not has(lines, name):
        return ""
    points = points_of(lines, name)
    is_long, is_share = len(points) > 2 * SMOOTH_STEPS, name.endswith("_frac")
    series = [Series(label=unit, points=points, css="c1 faint" if is_long else "c1")]
    if is_long:
        label = f"{unit}, mean of {SMOOTH_STEPS} steps"
        series.append(Series(label=label, points=smooth(points), css="c1"))
    average = mean(lines, name) or 0.0
    shown = f"{average:.0%}" if is_share else short_number(average)
    chart = line_chart(heading, series, is_percent=is_share)
    return card(heading, chart, f"{unit}; mean over the run {shown}")


def lag_card(report: Report) -> str:
    """Return the trained tokens by lag."""
    histogram = report.lag_histogram
    if not sum(histogram.values()):
        return ""
    bars = [(f"{k}+" if k == str(MAX_LAG_SHOWN) else k, float(num)) for k, num in histogram.items()]
    note = "Trained tokens by how many versions older than the learner the sampling weights were."
    return card("Lag", bar_chart("Tokens by lag", bars), note)


def ledger_card(report: Report) -> str:
    """Return every issued episode by what became of it."""
    ledger = report.ledger or {}
    found = {key: css for key, css in _LEDGER.items() if key in ledger}
    parts = [(key.replace("_", " "), float(ledger[key]), css) for key, css in found.items()]
    known = sum(value for _, value, _ in parts)
    if not known:
        return ""
    note = f"Every issued episode, {known:,.0f} in all, by what became of it."
    if ledger.get("issued", known) != known:
        note = f"It does not balance: {ledger['issued']} issued, {known:,.0f} accounted for."
    return shares_card("Ledger", parts, (f"{name} {value:,.0f}" for name, value, _ in parts), note)


def waits_card(lines: list[MetricsLine]) -> str:
    """Return how the learner's time was spent."""
    parts = [
        ("learner trains", total(lines, "train/step_s"), "c1"),
        ("learner waits for actors", total(lines, "wait/batch_s"), "c3"),
        ("weights are published", total(lines, "publish/total_s"), "c5"),
    ]
    whole = sum(value for _, value, _ in parts)
    if not whole:
        return ""
    pause = f"Actors paused {duration(total(lines, 'publish/pause_s'))} for new weights."
    shown = (f"{name} {value / whole:.0%}" for name, value, _ in parts)
    return shares_card("Who waited for whom", parts, shown, pause)


def dropped_card(selection: Selection | None) -> str:
    """Return who was dropped, the worst first, and whether long episodes were dropped more."""
    rows = [row for row in selection.rows if row.num > 0] if selection else []
    if selection is None or not rows:
        return ""
    heading = "Who was dropped"
    dropped = sorted((r for r in rows if r.dropped_frac > 0), key=lambda row: -row.dropped_frac)
    if not dropped:
        num = sum(row.num for row in rows)
        return card(heading, "", f"None of {num:,} episodes was dropped as stale or failed.")
    biased = [_warning(each) for each in selection.comparisons if each.is_biased]
    warnings = "".join(note_line(text, css="bad") for text in biased)
    cells = [
        (
            *(row.subset, row.horizon, row.turns, f"{row.num:,}", f"{row.stale:,}"),
            *(f"{row.failed:,}", f"{row.dropped_frac:.1%}"),
        )
        for row in dropped[:MAX_ROWS]
    ]
    head = ("subset", "horizon", "turns", "n", "stale", "failed", "")
    more = len(dropped) - MAX_ROWS
    notes = [f"And {more} more rows in selection.json."] if more > 0 else []
    return card(heading, warnings + table(head, cells), *notes)


def _warning(comparison: LengthComparison) -> str:
    """Return a comparison of long with short episodes in one sentence."""
    long = comparison.num_long_dropped / max(comparison.num_long, 1)
    short = comparison.num_short_dropped / max(comparison.num_short, 1)
    return (
        f"Long episodes of {comparison.env} at horizon {comparison.horizon} were dropped "
        f"more often: {long:.1%} of {comparison.num_long:,}, short ones {short:.1%} of "
        f"{comparison.num_short:,} (z = {comparison.z:.1f})."
    )
