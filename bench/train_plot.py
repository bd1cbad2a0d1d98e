"""Draws the result of `tlt bench train`: accept length and seconds of every step, for each mode.

python bench/train_plot.py RESULT.json PICTURE.svg
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLOURS = {
    "plain": "#888888",
    "suffix": "#f28e2b",
    "frozen": "#4e79a7",
    "spot": "#59a14f",
    "adaptive": "#b07aa1",
}
PANELS = (("accept_length", "accept length"), ("seconds_by_step", "seconds a step"))
WIDTH, HEIGHT, EDGE, GAP = 560, 240, 56, 64


def picture(runs: Sequence[dict[str, Any]]) -> str:
    tall = EDGE + len(PANELS) * (HEIGHT + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + EDGE + 130}" height="{tall}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (key, title) in enumerate(PANELS):
        parts += panel({run["name"]: run[key] for run in runs}, title, EDGE / 2 + number * (HEIGHT + GAP))
    for number, run in enumerate(runs):
        y, colour = EDGE / 2 + 10 + 22 * number, COLOURS[run["name"]]
        parts.append(f'<line x1="{EDGE + WIDTH + 14}" x2="{EDGE + WIDTH + 36}" y1="{y}" y2="{y}" stroke="{colour}"/>')
        parts.append(f'<text x="{EDGE + WIDTH + 42}" y="{y + 4}">{run["name"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(curves: dict[str, list[float]], title: str, top: float) -> list[str]:
    """The SVG elements of one panel: steps to the right, values from 0 up."""
    steps = max(map(len, curves.values()))
    most = 1.05 * max(max(values) for values in curves.values())

    def x(step: float) -> float:
        return EDGE + WIDTH * (step - 1) / max(1, steps - 1)

    def y(value: float) -> float:
        return top + HEIGHT * (1 - value / most)

    parts = [
        f'<rect x="{EDGE}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>',
        f'<text x="{x((1 + steps) / 2)}" y="{top + HEIGHT + 34}" text-anchor="middle">step</text>',
        f'<text transform="rotate(-90)" x="{-y(most / 2)}" y="14" text-anchor="middle">{title}</text>',
    ]
    for value in ticks(most):
        parts.append(f'<line x1="{EDGE}" x2="{EDGE + WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#eee"/>')
        parts.append(f'<text x="{EDGE - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for step in sorted({1, *(round(steps * part / 5) for part in range(1, 6))} - {0}):
        parts.append(f'<text x="{x(step):.1f}" y="{top + HEIGHT + 17}" text-anchor="middle">{step}</text>')
    for name, values in curves.items():
        points = " ".join(f"{x(1 + i):.1f},{y(value):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.6"/>')
    return parts


def ticks(most: float) -> list[float]:
    """Round values for an axis: about four to nine of them, from 0 up to `most`."""
    unit = 10.0 ** (len(str(int(most))) - 1)
    step = next(unit * part for part in (0.1, 0.2, 0.25, 0.5, 1, 2) if most / (unit * part) < 9)
    return [round(i * step, 6) for i in range(int(most / step) + 1)]


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["runs"]
    Path(sys.argv[2]).write_text(picture(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
