"""report.html: one self-contained page. Everything that comes from a run is escaped."""

import html
from typing import Any

from common.config.curriculum import HorizonKind
from common.config.run_config import RunConfig
from common.report.charts import (
    Marker,
    Reference,
    Series,
    bar_chart,
    line_chart,
    short_number,
    stacked_bar,
)
from common.report.curriculum import changes_shown, curriculum_charts, points_of, smooth
from common.report.dropped import dropped_table
from common.report.results import MAX_LAG_SHOWN, has, mean, total
from common.report.style import CSS
from common.store.metrics import MetricsLine

SMOOTH_STEPS = 10
_EVAL_NAMES = ("before", "after", "random", "expert")
_BOOKS = (
    ("trained", "c1"),
    ("filtered", "c2"),
    ("stale", "c3"),
    ("failed", "c5"),
    ("in_flight", "c4"),
)


def render_page(report: dict[str, Any], lines: list[MetricsLine], cfg: RunConfig) -> str:
    """Return the whole page. Cards whose numbers are absent are left out, except the headline."""
    cards = [
        _headline(report, cfg),
        _learning(report, lines),
        _eval_curve(report),
        _subsets(report),
        _curriculum(lines),
        _context_full(lines),
        _lag(report),
        _books(report),
        _dropped(report),
        _waits(lines),
        _steps_card("Actors", lines, "actor/tokens_per_s", "sampled tokens per second"),
        _steps_card("Learner", lines, "train/tokens_per_s", "trained tokens per second"),
        _steps_card("Episodes", lines, "actor/episodes_per_s", "finished episodes per second"),
        _steps_card("Turns", lines, "episodes/turns_mean", "mean turns per episode"),
        _steps_card("Entropy", lines, "policy/entropy", "nats per sampled token"),
        _steps_card("Effective sample size", lines, "offpolicy/ess_frac", "share of the batch"),
        _essentials(report, cfg),
    ]
    title = f"{esc(cfg.run.name)} · Longstride"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>"
        f"<header><h1>{title}</h1><p>{esc(_subtitle(report, cfg))}</p></header>"
        f'<div class="cards">{"".join(cards)}</div></main></body></html>\n'
    )


def esc(value: object) -> str:
    """Return text for HTML content and quoted attributes."""
    return html.escape(str(value), quote=True)


def _subtitle(report: dict[str, Any], cfg: RunConfig) -> str:
    wall = "" if report["wall_s"] is None else f" in {_duration(report['wall_s'])}"
    episodes = f"{report['episodes']:,} episodes"
    steps = f"{report['steps']} of {cfg.train.num_steps} steps"
    return f"{steps}, {episodes}{wall} · {report['mode']} · seed {report['seed']}"


def _headline(report: dict[str, Any], cfg: RunConfig) -> str:
    before, after = report["before"], report["after"]
    hero = (
        f'<p class="hero"><span class="from">{_percent(before)}</span>'
        f' <span class="arrow">→</span> {_percent(after)}</p>'
    )
    known = after or before
    played = f"Success on {known['n']:,} held-out episodes" if known else "No held-out evaluation"
    facts: list[tuple[str, object]] = [
        (name, f"{_percent(result)} {_interval(result['ci95'])}")
        for name, result in _evals(report).items()
        if result is not None
    ]
    absent = "; ".join(f"{name}: {reason}" for name, reason in report["absent"].items())
    failed = {name: n for name, n in report["failed_evals"].items() if n}
    notes = [f"Not shown: {absent}."] if absent else []
    if failed:
        listed = ", ".join(f"{n} of {name}" for name, n in failed.items())
        notes.append(f"Left out as infrastructure failures: {listed}.")
    text = f"{played}, before and after training. 95% intervals in brackets."
    body = f'{hero}{_gain(report["gain"])}<p class="note">{esc(text)}</p>{_facts(facts)}'
    return _card("", body + "".join(f'<p class="note">{esc(n)}</p>' for n in notes), css="wide")


def _gain(gain: dict[str, Any] | None) -> str:
    if gain is None:
        return ""
    points, interval = 100 * gain["success"], gain["ci95"]
    if interval is None:
        return f'<p class="gain">{points:+.1f} points</p>'
    low, high = (100 * bound for bound in interval)
    verdict, css = ("", "good") if low > 0 else (" - not distinguishable from no change", "")
    if high < 0:
        verdict, css = " - worse than before", "bad"
    text = f"{points:+.1f} points on the same items [{low:+.1f}, {high:+.1f}]{verdict}"
    return f'<p class="gain {css}">{esc(text)}</p>'


def _learning(report: dict[str, Any], lines: list[MetricsLine]) -> str:
    points = points_of(lines, "reward/success")
    evals = _evals(report)
    markers = _before_and_after(report)
    references = [
        Reference(label=f"{name} {result['success']:.0%}", y=result["success"], css=css)
        for name, css in (("random", "c2"), ("expert", "c3"))
        if (result := evals[name]) is not None
    ]
    if not (points or markers):
        return ""
    series = [
        Series(label="train, each step", points=points, css="c1 faint"),
        Series(
            label=f"train, mean of {SMOOTH_STEPS}", points=smooth(points, SMOOTH_STEPS), css="c1"
        ),
    ]
    chart = line_chart(
        "Success over steps",
        series,
        references=references,
        markers=markers,
        y_max=1.0,
        height=300,
        is_percent=True,
    )
    legend = _legend([(f"training, mean of {SMOOTH_STEPS} steps", "c1"), ("held-out", "c4")])
    note = "Training episodes end at the horizon of their stage; held-out ones at the full one."
    return _card("Success", f'{chart}{legend}<p class="note">{note}</p>')


def _before_and_after(report: dict[str, Any]) -> list[Marker]:
    """Return what was measured at either end of training, where it was."""
    evals = _evals(report)
    return [
        _marker(f"{name} training", x, result)
        for name, x in (("before", 0.0), ("after", float(report["steps"])))
        if (result := evals[name]) is not None
    ]


def _marker(label: str, x: float, result: dict[str, Any]) -> Marker:
    low, high = result["ci95"]
    return Marker(label=label, x=x, y=result["success"], low=low, high=high, css="c4")


def _subsets(report: dict[str, Any]) -> str:
    evals = {name: result for name, result in _evals(report).items() if result is not None}
    subsets = sorted({subset for result in evals.values() for subset in result["by_subset"]})
    if not subsets:
        return ""
    head = "".join(f"<th>{name}</th>" for name in evals)
    rows: list[str] = []
    for subset in subsets:
        cells = [result["by_subset"].get(subset) for result in evals.values()]
        num = max(cell["n"] for cell in cells if cell)
        shown = "".join(f"<td>{_percent(cell)}</td>" for cell in cells)
        rows.append(f"<tr><td>{esc(subset)}</td>{shown}<td>{num}</td></tr>")
    table = f"<table><tr><th>subset</th>{head}<th>n</th></tr>{''.join(rows)}</table>"
    return _card("Held-out success by subset", f'<div class="table">{table}</div>')


def _curriculum(lines: list[MetricsLine]) -> str:
    charts = curriculum_charts(lines, smooth_steps=SMOOTH_STEPS)
    if not charts:
        return ""
    note = (
        "Share of the training episodes, and below it the most turns that an episode of the batch"
        " was allowed."
    )
    if changes_shown(lines):
        note += " Upright lines: it changed."
    body = "".join(chart + _legend(legend) for chart, legend in charts)
    return _card("Horizon curriculum", f'{body}<p class="note">{esc(note)}</p>')


def _context_full(lines: list[MetricsLine]) -> str:
    """Only where it happened: it says that `actor.max_model_len` is too small."""
    name = "episodes/context_full_frac"
    if not total(lines, name):
        return ""
    return _steps_card("Episodes cut by the context", lines, name, "share")


def _steps_card(heading: str, lines: list[MetricsLine], name: str, unit: str) -> str:
    if not has(lines, name):
        return ""
    points = points_of(lines, name)
    series = [Series(label=unit, points=points, css="c1")]
    if len(points) > 2 * SMOOTH_STEPS:
        series = [
            Series(label=unit, points=points, css="c1 faint"),
            Series(
                label=f"{unit}, mean of {SMOOTH_STEPS} steps",
                points=smooth(points, SMOOTH_STEPS),
                css="c1",
            ),
        ]
    is_share = name.endswith("_frac")
    average = mean(lines, name) or 0.0
    shown = f"{average:.0%}" if is_share else short_number(average)
    note = f"{unit}; mean over the run {shown}"
    chart = line_chart(heading, series, is_percent=is_share)
    return _card(heading, f'{chart}<p class="note">{esc(note)}</p>')


def _lag(report: dict[str, Any]) -> str:
    histogram = report["lag_histogram"]
    if not sum(histogram.values()):
        return ""
    bars = [(f"{k}+" if k == str(MAX_LAG_SHOWN) else k, float(num)) for k, num in histogram.items()]
    note = "Trained tokens by how many versions older than the learner the sampling weights were."
    return _card("Lag", f'{bar_chart("Tokens by lag", bars)}<p class="note">{note}</p>')


def _books(report: dict[str, Any]) -> str:
    ledger: dict[str, Any] = report["ledger"] or {}
    parts = [
        (key.replace("_", " "), float(ledger[key]), css)
        for key, css in _BOOKS
        if isinstance(ledger.get(key), int)
    ]
    if not sum(value for _, value, _ in parts):
        return ""
    legend = _legend([(f"{name} {value:,.0f}", css) for name, value, css in parts])
    issued = sum(value for _, value, _ in parts)
    note = f"Every issued episode, {issued:,.0f} in all, by what became of it."
    if ledger.get("issued") not in (None, issued):
        note = f"The books do not balance: {ledger['issued']} issued, {issued:,.0f} accounted for."
    body = stacked_bar("Ledger", parts) + legend + f'<p class="note">{esc(note)}</p>'
    return _card("Ledger", body)


def _dropped(report: dict[str, Any]) -> str:
    body = dropped_table(report.get("selection") or {})
    return _card("Who was dropped", body) if body else ""


def _eval_curve(report: dict[str, Any]) -> str:
    """Only where evaluations were played beside training."""
    points: list[dict[str, Any]] = report.get("eval_curve") or []
    if not points:
        return ""
    markers = [_marker(f"step {p['step']}", float(p["step"]), p) for p in points]
    markers = sorted([*markers, *_before_and_after(report)], key=lambda marker: marker.x)
    line = [(marker.x, marker.y) for marker in markers]
    chart = line_chart(
        "Held-out success while training",
        [Series(label="held-out", points=line, css="c4")],
        markers=markers,
        y_max=1.0,
        is_percent=True,
    )
    own = sum(point["own_version_frac"] for point in points) / len(points)
    note = (
        "Each belongs to the step that opened it. Weights go on changing while it is played: "
        f"{own:.0%} of its tokens were sampled by that very version. At the ends, the evaluations"
        " before and after training."
    )
    return _card("Held-out success while training", f'{chart}<p class="note">{note}</p>')


def _waits(lines: list[MetricsLine]) -> str:
    parts = [
        ("learner trains", total(lines, "train/step_s"), "c1"),
        ("learner waits for actors", total(lines, "wait/batch_s"), "c3"),
        ("weights are published", total(lines, "publish/total_s"), "c5"),
    ]
    whole = sum(value for _, value, _ in parts)
    if not whole:
        return ""
    legend = _legend([(f"{name} {value / whole:.0%}", css) for name, value, css in parts])
    pause = f"Actors paused {_duration(total(lines, 'publish/pause_s'))} for new weights."
    body = stacked_bar("Who waited for whom", parts) + legend
    return _card("Who waited for whom", f'{body}<p class="note">{pause}</p>')


def _essentials(report: dict[str, Any], cfg: RunConfig) -> str:
    memory: dict[str, float] = report["peak_memory_bytes"] or {}
    heldout = report["heldout"]
    facts: list[tuple[str, object]] = [
        ("model", cfg.model.path),
        ("mode", cfg.train.mode.value),
        ("seed", cfg.run.seed),
        ("steps", cfg.train.num_steps),
        *(("horizon, turns" + of, text) for of, text in _horizon_facts(cfg)),
        ("groups", f"{cfg.groups.per_step} of {cfg.groups.size}"),
        ("optimizer", f"{cfg.learner.optimizer.value}, lr {cfg.learner.lr:g}"),
        ("actors", cfg.actor.num_actors),
        (
            "tasks",
            ", ".join(f"{task.weight:g} x {task.subset}" for task in cfg.tasks) or "none",
        ),
        ("train items drawn", f"{heldout['num_train_items_drawn']:,}"),
        ("held-out items", f"{heldout['num_test_items']:,}"),
        ("in both", f"{heldout['num_shared_item_ids']:,}"),
    ]
    if "total" in memory:
        facts.append(("peak memory", f"{memory['total'] / 2**30:.2f} GiB"))
    return _card("This run", _facts(facts), css="wide")


def _horizon_facts(cfg: RunConfig) -> list[tuple[str, str]]:
    """Return (" of <env>", stages); one entry without environment if all have the same."""
    own = sorted(cfg.horizon.per_env)
    facts: list[tuple[str, str]] = []
    for env in ("", *own):
        policy = cfg.horizon.policy(env)
        is_fixed = policy.kind is HorizonKind.FIXED
        stages = policy.stages[-1:] if is_fixed else policy.stages
        text = f"{policy.kind.value} {' → '.join(map(str, stages))}"
        facts.append((f" of {env}" if env else "", text))
    return facts


def _evals(report: dict[str, Any]) -> dict[str, Any]:
    baselines = report["baselines"]
    results = (
        report["before"],
        report["after"],
        baselines["random_valid"],
        baselines["expert"],
    )
    return dict(zip(_EVAL_NAMES, results, strict=True))


def _card(heading: str, body: str, *, css: str = "") -> str:
    title = f"<h2>{esc(heading)}</h2>" if heading else ""
    return f'<section class="card {css}">{title}{body}</section>'


def _facts(facts: list[tuple[str, object]]) -> str:
    rows = "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(v)}</dd></div>" for name, v in facts)
    return f'<dl class="facts">{rows}</dl>'


def _legend(entries: list[tuple[str, str]]) -> str:
    rows = "".join(f'<li><i class="{css}"></i>{esc(name)}</li>' for name, css in entries)
    return f'<ul class="legend">{rows}</ul>'


def _percent(result: dict[str, Any] | None) -> str:
    return "?" if result is None else f"{100 * result['success']:.1f}%"


def _interval(bounds: list[float]) -> str:
    return f"[{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
