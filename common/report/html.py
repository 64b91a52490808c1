"""Pieces of report.html. Everything that comes from a run is escaped."""

from collections.abc import Iterable, Sequence

from common.report.charts import stacked_bar
from common.report.model import Interval, Score, SubsetScore
from common.text import html_text as esc

Part = tuple[str, float, str]  # name, value, css class


def card(heading: str, body: str, *notes: str, css: str = "") -> str:
    """Return a section; the body is HTML, heading and notes are text."""
    title = f"<h2>{esc(heading)}</h2>" if heading else ""
    below = "".join(note_line(note) for note in notes)
    return f'<section class="card {css}">{title}{body}{below}</section>'


def note_line(text: str, *, css: str = "") -> str:
    """Return a paragraph in small print."""
    return f'<p class="{f"note {css}".strip()}">{esc(text)}</p>'


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table that scrolls sideways where the page is narrow."""
    top = "".join(f"<th>{esc(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{esc(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="table"><table><tr>{top}</tr>{body}</table></div>'


def facts(entries: Iterable[tuple[str, object]]) -> str:
    """Return names with their values."""
    rows = "".join(f"<div><dt>{esc(name)}</dt><dd>{esc(v)}</dd></div>" for name, v in entries)
    return f'<dl class="facts">{rows}</dl>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return names beside their colours."""
    rows = "".join(f'<li><i class="{css}"></i>{esc(name)}</li>' for name, css in entries)
    return f'<ul class="legend">{rows}</ul>'


def shares_card(heading: str, parts: Sequence[Part], shown: Iterable[str], note: str) -> str:
    """Return a card with one bar of parts; `shown` is what the legend says of each."""
    names = zip(shown, (css for *_, css in parts), strict=True)
    return card(heading, stacked_bar(heading, parts) + legend(names), note)


def percent(result: Score | SubsetScore | None) -> str:
    """Return a success like "45.0%"."""
    return "?" if result is None else f"{100 * result.success:.1f}%"


def interval(bounds: Interval) -> str:
    """Return like "[40.1, 50.2]", in percent."""
    return f"[{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def duration(seconds: float) -> str:
    """Return like "12.3 s", "14 min" or "2 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
