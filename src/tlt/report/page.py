"""Content of report.html as one JSON value. The script page.js defines the sections of the page and draws them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from tlt.energy import total_energy
from tlt.gain import gain_of, verdict
from tlt.report import story
from tlt.report.read import RunData

_MOST_GROUPS, _MOST_RESPONSES, _MOST_CHARACTERS = 30, 8, 2500
_FACTS = ("step", "task", "reward", "scores", "outcome", "length", "finish_reason")

Row = Mapping[str, Any]


def groups_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the groups with the highest and the lowest mean reward (`best`, `worst`) in rows of completions.jsonl, and
    the number of groups and the range of steps in these rows."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row["step"], row["prompt_id"], row["epoch"]), []).append(row)
    rated = sorted(found.values(), key=_mean, reverse=True)
    half = min(_MOST_GROUPS // 2, (len(rated) + 1) // 2)
    best, worst = rated[:half], rated[half:][-half:][::-1]
    steps = [row["step"] for row in rows]
    newest = {"num_groups": len(rated), "first_step": min(steps), "last_step": max(steps)} if steps else {}
    return newest | {"best": [_group(group) for group in best], "worst": [_group(group) for group in worst]}


def _mean(rows: Sequence[Row]) -> float:
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    return fmean(rewards) if rewards else float("-inf")


def _group(rows: Sequence[Row]) -> dict[str, Any]:
    rated, half = sorted(rows, key=_reward, reverse=True), _MOST_RESPONSES // 2
    shown = [*rated[:half], *rated[half:][-half:]]
    return {
        **_shown(rows[0], "prompt", "answer"),
        "reward": _mean(rows),
        "responses": [_shown(row, "response") for row in shown],
        "left": len(rows) - len(shown),
    }


def _reward(row: Row) -> float:
    return row["reward"] or 0.0


def _shown(row: Row, *texts: str) -> dict[str, Any]:
    """Return the fields of a response that the page shows. `texts` are the names of text fields. The middle of a long
    text is cut out."""
    return {name: row[name] for name in _FACTS} | {name: _cut(row[name]) for name in texts}


def _cut(value: Any) -> str | None:
    text = None if value is None else str(value)
    if text is None or len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS * 2 // 3]} […] {text[-_MOST_CHARACTERS // 3 :]}"


def page_of(run: RunData) -> str:
    """Return the page about a run as self-contained HTML."""
    content = content_of(run)
    # JSON.parse in browsers refuses NaN, and a "<" could end the HTML script element
    finite = json.loads(json.dumps(content), parse_constant=lambda name: None)
    text = json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")
    html, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    return html.replace("{{script}}", script).replace("{{content}}", text)


def content_of(run: RunData) -> dict[str, Any]:
    """Return the numbers and texts of a run that the script page.js shows, as a dictionary for JSON."""
    gain = gain_of(run.steps)
    return {
        "name": run.name,
        "num_steps": len(run.steps),
        "sentences": story.sentences(run),
        "advice": story.advice(run)[1:],
        "faults": run.faults,
        "gain": gain._asdict() | {"verdict": verdict(gain)} if gain else None,
        "policy_sha256": run.summary.get("policy_sha256"),
        "proof": _proof(run),
        "useful_share": story.useful_share(run),
        "worker_seconds": story.worker_seconds(run),
        "has_trace": (run.folder / "trace.json").exists(),
        "columns": {path: list(column.items()) for path, column in run.columns.items()},
        "groups": groups_of(run.completions),
        "energy": total_energy(run.steps),
    }


def _proof(run: RunData) -> dict[str, str | float]:
    tokens, responses, differ = (run.total(f"compared/{name}") for name in ("tokens", "responses", "differ"))
    compared = {"tokens compared with plain decoding": f"{tokens:,.0f} in {responses:,.0f} responses"} if tokens else {}
    return {
        "bits with and without speculation": run.summary.get("exactness", "known when the run ends"),
        **compared,
        "responses that differ": differ if tokens else "not compared",
        "prompts replayed within an epoch": run.replayed,
        "steps skipped": run.missing_steps,
        "seconds that a worker was absent": run.states["ABSENT"],
    }
