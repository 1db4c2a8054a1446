"""How measures grow with the size of their input or with the workers: slopes, and small pictures of curves.

A row brings a curve in `detail["curve"]`: {"x": "comments", "y": "seconds", "points": [[1e6, 48], …]}.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PICTURE = "growth.svg"
_WIDTH, _HEIGHT, _COLUMNS = 280, 180, 3
# Margins of a panel: half a number, half a number, the name, two lines of text.
_LEFT, _RIGHT, _TOP, _BOTTOM = 34, 34, 42, 54


@dataclass(frozen=True)
class Curve:
    """Points of a measure, by rising x; all above 0."""

    row: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]

    @property
    def slope(self) -> float:
        """Slope of the least-squares line through the logarithms."""
        xs, ys = zip(*((math.log(x), math.log(y)) for x, y in self.points), strict=True)
        mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
        covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
        return float(covariance / sum((x - mean_x) ** 2 for x in xs))


def curves(rows: Iterable[Mapping[str, Any]]) -> list[Curve]:
    """The curves of the rows that have one with two points or more."""
    drawable = []
    for row in rows:
        if curve := row["detail"].get("curve"):
            points = sorted((float(x), float(y)) for x, y in curve["points"] if x > 0 and y > 0)
            if len(points) > 1:
                drawable.append(Curve(row["row"], curve["x"], curve["y"], tuple(points)))
    return drawable


def picture(curves: Sequence[Curve]) -> str:
    """SVG: a panel for each curve, on logarithmic axes."""
    rows = math.ceil(len(curves) / _COLUMNS)
    width, height = _WIDTH * _COLUMNS, _HEIGHT * max(1, rows)
    panels = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="9">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for place, curve in enumerate(curves):
        x, y = (place % _COLUMNS) * _WIDTH, (place // _COLUMNS) * _HEIGHT
        panels += [f'<g transform="translate({x} {y})">', *_panel(curve), "</g>"]
    return "\n".join([*panels, "</svg>"]) + "\n"


def _panel(curve: Curve) -> list[str]:
    xs, ys = zip(*curve.points, strict=True)
    x_scale = _scale(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_scale = _scale(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP)
    places = [(_position(x, x_scale), _position(y, y_scale)) for x, y in curve.points]
    goes_up = places[1][1] < places[0][1]
    # Above a point; below the first one where the line goes up from it.
    labels = [
        (x, y + 13 if goes_up and place == 0 else y - 5) for place, (x, y) in enumerate(places)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    name = html.escape(f"{curve.row}, slope {curve.slope:.2f}")
    axes = html.escape(f"{curve.y} by {curve.x}")
    return [
        f'<text x="6" y="12">{name}</text>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{axes}</text>',
        f'<polyline points="{line}" fill="none" stroke="#2a6f97" stroke-width="1.5"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#2a6f97"/>' for x, y in places),
        *(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{value:,.4g}</text>'
            for (x, y), value in zip(labels, ys, strict=True)
        ),
        *(
            f'<text x="{x:.1f}" y="{_HEIGHT - 24}" text-anchor="middle" fill="#666">'
            f"{_shortened(value)}</text>"
            for (x, _), value in zip(places, xs, strict=True)
        ),
    ]


def _shortened(value: float) -> str:
    """3,000,000 → "3M"."""
    for letter, unit in (("M", 1e6), ("k", 1e3)):
        if value >= unit:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.3g}"


def _scale(
    minimum: float, maximum: float, start: float, end: float
) -> tuple[float, float, float, float]:
    return math.log(minimum), math.log(maximum) - math.log(minimum) or 1.0, start, end


def _position(value: float, scale: tuple[float, float, float, float]) -> float:
    minimum, span, start, end = scale
    return start + (math.log(value) - minimum) / span * (end - start)
