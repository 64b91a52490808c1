"""Cards of report.html about what was learned: evaluations, success over steps, subsets."""

from functools import partial

from common.config.curriculum import HorizonKind
from common.config.envs import own_tasks
from common.config.run_config import RunConfig
from common.report.charts import Marker, Series, line_chart
from common.report.curriculum import SMOOTH_STEPS, points_of, smooth
from common.report.html import card, esc, facts, interval, legend, note_line, percent, table
from common.report.model import CurvePoint, Gain, Report, Score
from common.store.metrics import MetricsLine


def headline_card(report: Report) -> str:
    """Return success before and after, with what is absent and what failed."""
    arrow = '<span class="arrow">→</span>'
    before, after = percent(report.before), percent(report.after)
    hero = f'<p class="hero"><span class="from">{before}</span> {arrow} {after}</p>'
    known = report.after or report.before
    played = f"Success on {known.n:,} held-out episodes" if known else "No held-out evaluation"
    text = f"{played}, before and after training. 95% intervals in brackets."
    shown = [(n, f"{percent(s)} {interval(s.ci95)}") for n, s in report.evaluations.items()]
    notes: list[str] = []
    if report.absent:
        absent = "; ".join(f"{name}: {reason}" for name, reason in report.absent.items())
        notes.append(f"Not shown: {absent}.")
    if failed := ", ".join(f"{n} of {name}" for name, n in report.failed_evals.items() if n):
        notes.append(f"Left out as infrastructure failures: {failed}.")
    return card("", hero + _gain(report.gain) + note_line(text) + facts(shown), *notes, css="wide")


def _gain(gain: Gain | None) -> str:
    if gain is None:
        return ""
    points = 100 * gain.success
    if gain.ci95 is None:
        return f'<p class="gain">{points:+.1f} points</p>'
    low, high = (100 * bound for bound in gain.ci95)
    verdict, css = ("", "good") if low > 0 else (" - not distinguishable from no change", "")
    if high < 0:
        verdict, css = " - worse than before", "bad"
    text = f"{points:+.1f} points on the same items [{low:+.1f}, {high:+.1f}]{verdict}"
    return f'<p class="gain {css}">{esc(text)}</p>'


def learning_card(report: Report, lines: list[MetricsLine]) -> str:
    """Return training success over steps between the evaluations at both ends."""
    points = points_of(lines, "reward/success")
    markers = _ends(report)
    if not (points or markers):
        return ""
    found = report.evaluations
    references = [
        (f"{name} {found[name].success:.0%}", found[name].success, css)
        for name, css in (("random", "c2"), ("expert", "c3"))
        if name in found
    ]
    smoothed = f"mean of {SMOOTH_STEPS}"
    series = [
        Series(label="train, each step", points=points, css="c1 faint"),
        Series(label=f"train, {smoothed}", points=smooth(points), css="c1"),
    ]
    draw = partial(line_chart, y_max=1, height=300, is_percent=True)
    chart = draw("Success over steps", series, references=references, markers=markers)
    names = legend([(f"training, {smoothed} steps", "c1"), ("held-out", "c4")])
    note = "Training episodes end at the horizon of their stage; held-out ones at the full one."
    return card("Success", chart + names, note)


def eval_curve_card(report: Report) -> str:
    """Return the evaluations that were played beside training, if any were."""
    points = report.eval_curve
    if not points:
        return ""
    markers = [_marker(f"step {point.step}", float(point.step), point) for point in points]
    markers = sorted([*markers, *_ends(report)], key=lambda marker: marker.x)
    line = [(marker.x, marker.y) for marker in markers]
    heading = "Held-out success while training"
    series = [Series(label="held-out", points=line, css="c4")]
    chart = line_chart(heading, series, markers=markers, y_max=1, is_percent=True)
    own = sum(point.own_version_frac for point in points) / len(points)
    note = (
        "Each belongs to the step that opened it. Weights go on changing while it is played: "
        f"{own:.0%} of its tokens were sampled by that very version. At the ends, the evaluations"
        " before and after training."
    )
    return card(heading, chart, note)


def _ends(report: Report) -> list[Marker]:
    """Return what was measured at either end of training, where it was."""
    ends = (("before", 0.0, report.before), ("after", float(report.steps), report.after))
    return [_marker(f"{name} training", x, found) for name, x, found in ends if found is not None]


def _marker(label: str, x: float, found: Score | CurvePoint) -> Marker:
    low, high = found.ci95
    return Marker(label=label, x=x, y=found.success, low=low, high=high, css="c4")


def subsets_card(report: Report, cfg: RunConfig) -> str:
    """Return a table of success by subset and evaluation; tasks of our own say so."""
    evals = report.evaluations
    notes = {task.subset: own_tasks(task.env, cfg.envs) for task in cfg.tasks}
    rows: list[list[object]] = []
    for subset in sorted({subset for found in evals.values() for subset in found.by_subset}):
        cells = [found.by_subset.get(subset) for found in evals.values()]
        note = notes.get(subset)
        rows.append(
            [
                f"{subset} ({note})" if note else subset,
                *map(percent, cells),
                max(cell.n for cell in cells if cell),
            ]
        )
    heading = "Held-out success by subset"
    return card(heading, table(["subset", *evals, "n"], rows)) if rows else ""


def essentials_card(report: Report, cfg: RunConfig) -> str:
    """Return the settings that decide what a run is, and what it took."""
    heldout, peak_bytes = report.heldout, report.peak_memory_bytes.all_roles
    tasks = ", ".join(f"{task.weight:g} x {task.subset}" for task in cfg.tasks) or "none"
    entries: list[tuple[str, object]] = [
        ("model", cfg.model.path),
        ("mode", cfg.train.mode.value),
        ("seed", cfg.run.seed),
        ("steps", cfg.train.num_steps),
        *(("horizon, turns" + of, text) for of, text in _horizons(cfg)),
        ("groups", f"{cfg.groups.per_step} of {cfg.groups.size}"),
        ("optimizer", f"{cfg.learner.optimizer.value}, lr {cfg.learner.lr:g}"),
        ("actors", cfg.actor.num_actors),
        ("tasks", tasks),
        ("train items drawn", f"{heldout.num_train_items_drawn:,}"),
        ("held-out items", f"{heldout.num_test_items:,}"),
        ("in both", f"{heldout.num_shared_item_ids:,}"),
    ]
    if peak_bytes is not None:
        entries.append(("peak memory", f"{peak_bytes / 2**30:.2f} GiB"))
    return card("This run", facts(entries), css="wide")


def _horizons(cfg: RunConfig) -> list[tuple[str, str]]:
    """Return (" of <env>", stages); one entry without environment if all have the same."""
    found: list[tuple[str, str]] = []
    for env in ("", *sorted(cfg.horizon.per_env)):
        policy = cfg.horizon.policy(env)
        stages = policy.stages[-1:] if policy.kind is HorizonKind.FIXED else policy.stages
        text = f"{policy.kind.value} {' → '.join(map(str, stages))}"
        found.append((f" of {env}" if env else "", text))
    return found
