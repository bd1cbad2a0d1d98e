"""How good the calibration is by which trees are cut: predicted chances against how often the target took the token.

    python bench/calibration.py recipes/longtail.toml --svg FILE [--json FILE]

Each verified child whose parent was reached counts once, with the chance that the calibration predicted for it just
before, and whether the target took it. Numbers are by depth. The first 100 rounds are left out, as the counts begin
from their prior.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tlt.config import load_config
from tlt.draft.calibration import Calibration
from tlt.draft.eagle import load_drafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import Strategy
from tlt.drafting import Workbench
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.metrics import provenance, write_json

TREE = Strategy("eagle", 6, 2, 13)
WARM_UP, BINS, LEAST = 100, 10, 30
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f")


class Watched(Calibration):
    def __init__(self) -> None:
        super().__init__()
        self.seen_pairs: list[tuple[int, float, bool]] = []  # depth, predicted, taken

    def observe(self, cells: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> None:
        reached, depth = set(path), {0: 0}
        for node in range(1, len(cells)):
            depth[node] = depth[parents[node]] + 1
            if parents[node] in reached and self.rounds > WARM_UP:
                self.seen_pairs.append((depth[node], float(self.table[cells[node]]), node in reached))
        super().observe(cells, parents, path)


def reliability(pairs: Sequence[tuple[int, float, bool]]) -> list[dict[str, Any]]:
    """For each depth and bin of predictions: the mean prediction, the fraction that was taken, and the count."""
    depth, predicted, taken = (np.array(column) for column in zip(*pairs, strict=True))
    which = np.minimum((predicted * BINS).astype(int), BINS - 1)
    points = []
    for d in np.unique(depth):
        for b in range(BINS):
            mine = (depth == d) & (which == b)
            if mine.sum() >= LEAST:
                point = {"predicted": float(predicted[mine].mean()), "seen": float(taken[mine].mean())}
                points.append({"depth": int(d), **point, "count": int(mine.sum())})
    return points


def picture(points: Sequence[dict[str, Any]]) -> str:
    """An SVG of points in a square. A perfect calibration lies on the diagonal; a point's area stands for its count."""
    size, edge = 420, 50
    most = max(p["count"] for p in points)

    def x(value: float) -> float:
        return edge + value * size

    def y(value: float) -> float:
        return edge + (1 - value) * size

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size + 180}" height="{size + 110}" '
        'font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<line x1="{x(0)}" y1="{y(0)}" x2="{x(1)}" y2="{y(1)}" stroke="#bbb" stroke-dasharray="4"/>',
        f'<rect x="{edge}" y="{edge}" width="{size}" height="{size}" fill="none" stroke="#888"/>',
        f'<text x="{x(0.5)}" y="{y(0) + 38}" text-anchor="middle">predicted chance that the target agrees</text>',
        f'<text transform="rotate(-90)" x="{-y(0.5)}" y="14" text-anchor="middle">share that it agreed</text>',
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{x(tick)}" y="{y(0) + 18}" text-anchor="middle">{tick:g}</text>')
        parts.append(f'<text x="{edge - 6}" y="{y(tick) + 4}" text-anchor="end">{tick:g}</text>')
    for p in points:
        radius = 2 + 12 * (p["count"] / most) ** 0.5
        colour = COLOURS[(p["depth"] - 1) % len(COLOURS)]
        parts.append(
            f'<circle cx="{x(p["predicted"]):.1f}" cy="{y(p["seen"]):.1f}" r="{radius:.1f}" '
            f'fill="{colour}" fill-opacity="0.65"/>'
        )
    for i, d in enumerate(sorted({p["depth"] for p in points})):
        parts.append(
            f'<circle cx="{x(1) + 24}" cy="{edge + 14 + 22 * i}" r="6" fill="{COLOURS[(d - 1) % len(COLOURS)]}"/>'
        )
        parts.append(f'<text x="{x(1) + 36}" y="{edge + 18 + 22 * i}">depth {d}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    config = load_config(arguments.recipe)
    bench = Workbench.of(config)
    assert config.speculation.path is not None, "the recipe names a drafter"
    layer = load_drafter(config.speculation.path, bench.target.options)
    drafter = EagleDrafter(layer, bench.target)
    rows = config.engine.model_copy(update={"max_rows": 2})
    watched = Watched()
    layout = layer.options.layout
    engine = Engine(bench.target, rows, [drafter], Fixed(TREE), layout=layout)
    engine.drafters.calibrations[drafter.name] = watched
    for _ in engine.generate(bench.held_out):
        pass
    points = reliability(watched.seen_pairs)
    error = sum(abs(p["predicted"] - p["seen"]) * p["count"] for p in points) / sum(p["count"] for p in points)
    print(f"{len(watched.seen_pairs):,} children, mean |predicted - seen| {error:.3f}")
    arguments.svg.parent.mkdir(parents=True, exist_ok=True)
    arguments.svg.write_text(picture(points), encoding="utf-8")
    if arguments.json:
        write_json(arguments.json, {"points": points, "mean_error": error, **provenance()})


if __name__ == "__main__":
    main()
