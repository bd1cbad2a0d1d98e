"""Content of report.html as one JSON value. The script page.js defines the sections of the page and draws them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tlt.energy import total_energy
from tlt.report import story
from tlt.report.read import RunData
from tlt.report.responses import groups_of, ribbons_of

MOST_POINTS = 500  # largest number of points of a line in a chart


def page_of(runs: Sequence[RunData]) -> str:
    """Return the page about one or several runs as self-contained HTML."""
    content = {"runs": [content_of(run) for run in runs], "differences": story.differences(runs)}
    # JSON.parse in browsers refuses NaN, and a "<" could end the HTML script element
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")
    html, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    return html.replace("{{script}}", script).replace("{{content}}", text)


def content_of(run: RunData) -> dict[str, Any]:
    """Return the numbers and texts of a run that the script page.js shows, as a dictionary for JSON."""
    ratios = story.ratios(run)
    return {
        "name": run.name,
        "num_steps": len(run.steps),
        "sentences": story.sentences(run),
        "advice": story.advice(run)[1:],
        "faults": run.faults,
        "results": _results(run),
        "ratios": [found._asdict() | {"times": found.times} for found in ratios],
        "policy_sha256": run.summary.get("policy_sha256"),
        "proof": _proof(run),
        "useful_share": story.useful_share(run),
        "worker_seconds": story.worker_seconds(run),
        "timelines": run.timelines,
        "columns": {path: thinned(column) for path, column in run.columns.items()},
        "ribbons": ribbons_of(run.completions),
        "groups": groups_of(run.completions),
        "energy": total_energy(run.steps),
    }


def _results(run: RunData) -> dict[str, float | None]:
    """Return the results of a run for the table that compares several runs: label -> number."""
    rewards = story.rewards(run)
    times = {found.measured: found.times for found in story.ratios(run)}
    seconds = run.total("seconds/total") - run.total("seconds/compare")
    cpu_seconds = run.total("energy/cpu_seconds") - run.total("energy/phases/compare/cpu_seconds")
    per_step = "per step, without run.compare_every"
    return {
        "steps": len(run.steps),
        f"seconds {per_step}": seconds / (len(run.steps) or 1),
        "mean reward, last tenth": rewards[1] if rewards else None,
        "times plain decoding, measured": times.get(True),
        "times plain decoding, estimated": times.get(False),
        "tokens per second of rollout": run.total("tokens") / (run.total("seconds/rollout") or 1),
        "accept length": run.total("tokens") / (run.total("rollout/row_passes") or 1),
        "useful share of worker time": story.useful_share(run),
        f"CPU seconds {per_step}": cpu_seconds / len(run.steps) if cpu_seconds else None,
    }


def _proof(run: RunData) -> dict[str, str | float]:
    tokens, responses, differ = (run.total(f"compared/{name}") for name in ("tokens", "responses", "differ"))
    compared = {"tokens compared with plain decoding": f"{tokens:,.0f} in {responses:,.0f} responses"} if tokens else {}
    replaced = max(0, run.worker_starts - run.workers * max(1, run.driver_starts))
    return {
        **compared,
        "responses that differ": differ if tokens else "not compared",
        "prompts replayed within an epoch": run.replayed,
        "steps skipped": run.missing_steps,
        "workers replaced": replaced if run.worker_starts or run.workers == 1 else "not recorded",
        "seconds that a worker was absent": run.states["ABSENT"],
        "restarts survived": max(0, run.driver_starts - 1) if run.driver_starts else "not recorded",
    }


def thinned(column: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the points (step, value) of a chart line, at most about `MOST_POINTS`. If there are more, keep only the
    lowest and the highest value in each range of steps."""
    points = list(column.items())
    if len(points) > MOST_POINTS:
        size = -(-len(points) * 2 // MOST_POINTS)
        ranges = [points[at : at + size] for at in range(0, len(points), size)]
        ends = [{choose(part, key=lambda point: point[1]) for choose in (min, max)} for part in ranges]
        points = [point for pair in ends for point in sorted(pair)]
    return [(step, float(f"{value:.4g}")) for step, value in points]
