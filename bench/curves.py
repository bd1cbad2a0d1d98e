"""Draws the curves of a result of bench/learning.py: accuracy on held-out prompts, and the mean reward of each step.

python bench/curves.py bench/results/learning_sums.json docs/sums.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tlt.files import read_json

LEFT, TOP, WIDTH, HEIGHT = 60, 56, 660, 220
COLOURS = {False: "#1f6feb", True: "#8c959f"}
FONT = 'font-family="Helvetica, Arial" font-size="12" fill="#57606a"'


def drawn(runs: list[dict[str, Any]]) -> str:
    """Return an SVG picture. The first reward of each run must be its first step's."""
    steps = max(len(run["rewards"]) for run in runs)

    def line(points: Iterable[tuple[float, float]], colour: str, width: float, opacity: float) -> str:
        places = (f"{LEFT + WIDTH * x / steps:.1f},{TOP + HEIGHT * (1 - y):.1f}" for x, y in points)
        style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
        return f'<polyline points="{" ".join(places)}" {style}/>'

    parts = [f'<rect width="{LEFT + WIDTH + 20}" height="{TOP + HEIGHT + 40}" fill="#ffffff"/>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = TOP + HEIGHT * (1 - share)
        parts.append(f'<path d="M{LEFT} {y} h{WIDTH}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" {FONT}>{share:g}</text>')
    for step in range(0, steps + 1, 10):
        x, y = LEFT + WIDTH * step / steps, TOP + HEIGHT + 18
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle" {FONT}>{step}</text>')
    for run in runs:
        colour = COLOURS[run["shuffled"]]
        parts.append(line(enumerate(run["rewards"]), colour, 1, 0.35))
        parts.append(line(((int(step), value) for step, value in run["held_out"].items()), colour, 2.5, 1))
    for i, (shuffled, meaning) in enumerate({False: "rewards of the task", True: "shuffled rewards"}.items()):
        x = LEFT + 180 * i
        parts.append(f'<path d="M{x} 20 h24" stroke="{COLOURS[shuffled]}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x + 32}" y="24" {FONT}>{meaning}</text>')
    seeds = len({run["seed"] for run in runs})
    what = f"thick: accuracy on held-out prompts; thin: mean reward of a step; {seeds} seeds; by step of training"
    parts.append(f'<text x="{LEFT}" y="44" {FONT}>{what}</text>')
    size = f'viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 40}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    arguments.picture.write_text(drawn(read_json(arguments.result)["runs"]), encoding="utf-8")


if __name__ == "__main__":
    main()
