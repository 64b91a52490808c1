"""Charts as inline SVG. Colours are CSS classes of the page, so that they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from common.text import html_text

Point = tuple[float, float | None]
Reference = tuple[str, float, str]  # of a dashed horizontal line: label, y, css

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480, 50, 14, 14, 36
HEIGHT, BAR_HEIGHT = 190, 34
NUM_TICKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line. A y of None breaks it."""

    label: str
    points: Sequence[Point]
    css: str  # class of the stroke: "c1".."c5", with " faint" for a background line
    is_step: bool = False  # holds its value until the next point


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A point with an interval."""

    label: str
    x: float
    y: float
    low: float
    high: float
    css: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where values lie on the canvas."""

    x_max: float
    y_min: float
    y_max: float
    height: int

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / max(self.x_max, 1e-9)

    def y(self, value: float) -> float:
        share = (value - self.y_min) / max(self.y_max - self.y_min, 1e-12)
        return self.height - BOTTOM - (self.height - TOP - BOTTOM) * min(1.0, max(0.0, share))


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    references: Sequence[Reference] = (),
    markers: Sequence[Marker] = (),
    y_max: float | None = None,
    height: int = HEIGHT,
    is_percent: bool = False,
    rules: Sequence[float] = (),
    x_max: float | None = None,
) -> str:
    """Return an SVG of lines over optimizer steps; `title` is its accessible name.

    Args:
        y_max: top of the axis; None: what the values need. The axis begins at zero, or below it
            where values are negative.
        is_percent: values are shares and the axis says percent.
        rules: steps at which an upright dashed line stands.
        x_max: last step of the axis, so that charts below each other agree; None: what there is.
    """
    values = [y for line in series for _, y in line.points if y is not None]
    values += [y for _, y, _ in references] + [m.high for m in markers]
    xs = [x for line in series for x, _ in line.points] + [m.x for m in markers]
    ticks = nice_ticks(min([0.0, *values]), y_max if y_max is not None else max([1e-9, *values]))
    last = x_max if x_max is not None else max([1.0, *xs])
    frame = _Frame(x_max=last, y_min=ticks[0], y_max=ticks[-1], height=height)
    parts = _axes(frame, ticks, is_percent=is_percent)
    parts += [_rule(frame, at) for at in rules]
    parts += _references(frame, references)
    parts += [_path(frame, line) for line in series]
    parts += [_marker(frame, marker) for marker in markers]
    return _svg(title, height, parts)


def bar_chart(title: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return an SVG of upright bars, labelled below with names and above with shares of the sum."""
    total = sum(value for _, value in bars) or 1.0
    top = max((value for _, value in bars), default=1.0) or 1.0
    slot = (WIDTH - 2 * RIGHT) / max(1, len(bars))
    room = HEIGHT - TOP - BOTTOM - 14
    parts: list[str] = []
    for i, (name, value) in enumerate(bars):
        bar, x = room * value / top, RIGHT + slot * i
        y, middle = HEIGHT - BOTTOM - bar, x + slot / 2
        share = value / total
        above = "" if not value else "<1%" if share < 0.01 else f"{share:.0%}"
        parts += [
            (
                f'<rect class="fill c1" x="{x + slot * 0.14:.1f}" y="{y:.1f}" rx="3"'
                f' width="{slot * 0.72:.1f}" height="{bar:.1f}">'
                f"<title>{html_text(name)}: {value:,.0f}</title></rect>"
            ),
            _text(middle, y - 6, above, "middle"),
            _text(middle, HEIGHT - BOTTOM + 18, name, "middle", css="dim"),
        ]
    return _svg(title, HEIGHT, parts)


def stacked_bar(title: str, parts: Sequence[tuple[str, float, str]]) -> str:
    """Return one horizontal bar; parts are (name, value, css). The page writes the legend."""
    total = sum(value for _, value, _ in parts) or 1.0
    x = 0.0
    rects: list[str] = []
    for name, value, css in parts:
        width = WIDTH * value / total
        rects.append(
            f'<rect class="fill {css}" x="{x:.2f}" y="0" width="{max(0.0, width - 1.5):.2f}"'
            f' height="{BAR_HEIGHT}" rx="3"><title>{html_text(name)}: {value:,.0f}'
            f" ({value / total:.1%})</title></rect>"
        )
        x += width
    return _svg(title, BAR_HEIGHT, rects)


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about NUM_TICKS round axis values that enclose low and high."""
    span = max(high - low, 1e-9)
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if power * k * NUM_TICKS >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def short_number(value: float) -> str:
    """Return a number as people write it on an axis: 0.25, 12, 3.4k, 1.2M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _axes(frame: _Frame, ticks: list[float], *, is_percent: bool) -> list[str]:
    parts: list[str] = []
    for tick in ticks:
        y = frame.y(tick)
        label = f"{tick:.0%}" if is_percent else short_number(tick)
        parts += [_across("grid", y), _text(LEFT - 8, y + 4.5, label, "end", css="dim")]
    for tick in nice_ticks(0, frame.x_max):
        if tick <= frame.x_max and tick == int(tick):
            at = frame.x(tick)
            parts.append(_text(at, frame.height - BOTTOM + 18, f"{tick:.0f}", "middle", css="dim"))
    parts.append(_text(WIDTH - RIGHT, frame.height - 3, "step", "end", css="dim"))
    return parts


def _rule(frame: _Frame, at: float) -> str:
    x = f"{frame.x(at):.1f}"
    return f'<line class="rule" x1="{x}" x2="{x}" y1="{TOP}" y2="{frame.height - BOTTOM}"/>'


def _references(frame: _Frame, references: Sequence[Reference]) -> list[str]:
    parts: list[str] = []
    lowest = float("inf")
    for label, value, css in sorted(references, key=itemgetter(1)):
        y = frame.y(value)
        label_y = min(y - 5, lowest - 15)  # labels of close lines are stacked upwards
        lowest = label_y if label_y > 11 else y + 15
        parts.append(_across(f"ref {css}", y))
        parts.append(_text(WIDTH - RIGHT - 2, lowest, label, "end", css=f"ink {css}"))
    return parts


def _across(css: str, y: float) -> str:
    return f'<line class="{css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _path(frame: _Frame, line: Series) -> str:
    moves: list[str] = []
    is_drawing, last_y = False, 0.0
    for x, y in line.points:
        if y is None:
            is_drawing = False
            continue
        at_x, at_y = frame.x(x), frame.y(y)
        if is_drawing and line.is_step:
            moves.append(f"L{at_x:.1f} {last_y:.1f}")
        moves.append(f"{'L' if is_drawing else 'M'}{at_x:.1f} {at_y:.1f}")
        is_drawing, last_y = True, at_y
    if len(moves) == 1:  # a single point has no line
        return f'<path class="line dot {line.css}" d="{moves[0]}h0.01"/>'
    return (
        f'<path class="line {line.css}" d="{"".join(moves)}">'
        f"<title>{html_text(line.label)}</title></path>"
    )


def _marker(frame: _Frame, marker: Marker) -> str:
    x, y = frame.x(marker.x), frame.y(marker.y)
    label = f"{marker.label}: {marker.y:.1%} (95% {marker.low:.1%} to {marker.high:.1%})"
    return (
        f'<g class="mark {marker.css}"><title>{html_text(label)}</title>'
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.y(marker.low):.1f}"'
        f' y2="{frame.y(marker.high):.1f}"/><circle cx="{x:.1f}" cy="{y:.1f}" r="5.5"/></g>'
    )


def _text(x: float, y: float, text: str, anchor: str, *, css: str = "") -> str:
    if not text:
        return ""
    return (
        f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
        f"{html_text(text)}</text>"
    )


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    label = html_text(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )
