"""A picture of where time goes: a bar for each row that brings `detail["shares"]`, {"part": share, …}."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

PICTURE = "profiles.svg"
_WIDTH, _LEFT, _BAR, _ROW = 760, 150, 22, 62
# Dark enough for white letters.
_COLOURS = ("#2a6f97", "#2a7f62", "#c1552f", "#7a4b94", "#8a6d1f", "#4a5560", "#9a3b5e")
_REST = "#9aa0a6"
_CHARACTER = 5.6  # pixels, at 10 pixels of height


def with_shares(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["detail"].get("shares")]


def picture(rows: Sequence[Mapping[str, Any]]) -> str:
    """SVG: the parts of each row side by side, their names below where a part is too narrow for them."""
    height = _ROW * max(1, len(rows))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for place, row in enumerate(rows):
        lines += [f'<g transform="translate(0 {_ROW * place})">', *_bar(row), "</g>"]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(row: Mapping[str, Any]) -> list[str]:
    shares: Mapping[str, float] = row["detail"]["shares"]
    total, x = sum(shares.values()), float(_LEFT)
    name, value = html.escape(row["row"]), f"{_number(row['ours'])} {html.escape(row['unit'])}"
    lines = [
        f'<text x="{_LEFT - 8}" y="18" text-anchor="end">{name}</text>',
        f'<text x="{_LEFT - 8}" y="31" text-anchor="end" fill="#666">{value}</text>',
    ]
    narrow_labels: list[str] = []
    for place, (part, share) in enumerate(shares.items()):
        colour = _REST if part == "the rest" else _COLOURS[place % len(_COLOURS)]
        width = (_WIDTH - _LEFT - 8) * share / total
        label = f"{part} {100 * share:.0f} %"
        lines.append(
            f'<rect x="{x:.1f}" y="8" width="{width:.1f}" height="{_BAR}" fill="{colour}"/>'
        )
        if len(label) * _CHARACTER < width:
            lines.append(f'<text x="{x + 4:.1f}" y="23" fill="white">{html.escape(label)}</text>')
        else:
            narrow_labels.append(f'<tspan fill="{colour}">■</tspan> {html.escape(label)}')
        x += width
    if narrow_labels:
        lines.append(f'<text x="{_LEFT}" y="46">{"   ".join(narrow_labels)}</text>')
    return lines


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
