"""report.html: one self-contained page, drawn from the report and the metrics of the steps."""

from pathlib import Path

from common.config.run_config import RunConfig
from common.report import machine_cards, outcome_cards
from common.report.html import duration, esc
from common.report.model import Report
from common.store.metrics import MetricsLine

CSS = Path(__file__).with_name("style.css").read_text()


def render_page(report: Report, lines: list[MetricsLine], cfg: RunConfig) -> str:
    """Return the whole page. Cards whose numbers are absent are left out, except the headline."""
    cards = [
        outcome_cards.headline_card(report),
        outcome_cards.learning_card(report, lines),
        outcome_cards.eval_curve_card(report),
        outcome_cards.subsets_card(report),
        machine_cards.curriculum_card(lines),
        machine_cards.context_full_card(lines),
        machine_cards.lag_card(report),
        machine_cards.ledger_card(report),
        machine_cards.dropped_card(report.selection),
        machine_cards.waits_card(lines),
        *(machine_cards.steps_card(heading, lines, *of) for heading, *of in machine_cards.STEPS),
        outcome_cards.essentials_card(report, cfg),
    ]
    title = f"{esc(cfg.run.name)} · Longstride"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head><body><main>"
        f"<header><h1>{title}</h1><p>{esc(_subtitle(report, cfg))}</p></header>"
        f'<div class="cards">{"".join(cards)}</div></main></body></html>\n'
    )


def _subtitle(report: Report, cfg: RunConfig) -> str:
    wall = "" if report.wall_s is None else f" in {duration(report.wall_s)}"
    steps = f"{report.steps} of {cfg.train.num_steps} steps"
    return f"{steps}, {report.episodes:,} episodes{wall} · {report.mode} · seed {report.seed}"
