"""Pictures of studies: lines with intervals, as self-contained SVG."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
WIDTH = 640
HEIGHT = 360
MARGIN = 44
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class SuccessCurve:
    """Success with its interval, [points] each."""

    name: str
    at: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    low: np.ndarray = field(repr=False)
    high: np.ndarray = field(repr=False)


def lines_svg(
    lines: Sequence[SuccessCurve], *, x_title: str, title: str = "", ticks: Sequence[float] = ()
) -> str:
    """Return the lines with their intervals as bands, and names in their colours.

    Args:
        ticks: values with a mark on the axis; (): its two ends.
    """
    most = max(float(line.at[-1]) for line in lines) or 1.0
    marks = [*ticks] or [0.0, most]
    parts = [_text(WIDTH / 2, 16, title, anchor="middle")] if title else []
    for i, line in enumerate(lines):
        css = COLOURS[i % len(COLOURS)]
        x = _x(line.at, most)
        y, low, high = map(_y, (line.mean, line.low, line.high))
        band = [*zip(x, low, strict=True), *zip(x[::-1], high[::-1], strict=True)]
        curve = _points([*zip(x, y, strict=True)])
        parts += [
            f'<polygon points="{_points(band)}" fill="{css}" opacity="0.15"/>',
            f'<polyline points="{curve}" fill="none" stroke="{css}" stroke-width="2"/>',
            _text(WIDTH - MARGIN + 4, 30 + 14 * i, line.name, fill=css),
        ]
    for share in SHARES:
        parts.append(_text(4, float(_y(np.array(share))), f"{share:.0%}"))
    for mark in marks:
        at = float(_x(np.array(mark), most))
        parts.append(_text(at, HEIGHT - MARGIN + 14, f"{mark:,.0f}", anchor="middle"))
    parts.append(_text(MARGIN, HEIGHT - 8, f"{x_title}; bands: 95 % over seeds"))
    room = 8 * max(len(line.name) for line in lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + room} {HEIGHT}"'
        f' font-family="sans-serif" font-size="12">{"".join(parts)}</svg>\n'
    )


def _x(at: np.ndarray, most: float) -> np.ndarray:
    return MARGIN + (WIDTH - 2 * MARGIN) * at / most


def _y(share: np.ndarray) -> np.ndarray:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share


def _text(x: float, y: float, text: str, *, fill: str = "#555", anchor: str = "start") -> str:
    at = f'x="{x:.0f}" y="{y:.0f}" fill="{fill}" text-anchor="{anchor}"'
    return f"<text {at}>{escape(text)}</text>"


def _points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)
