"""Responses on the page: the best and the worst groups, and who proposed each token of a response."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tlt.report.charts import short
from tlt.report.read import Run

_MOST_GROUPS, _MOST_RESPONSES, _MOST_CHARACTERS = 30, 8, 2500
_MOST_STEPS, _MOST_TOKENS, _CELLS = 8, 4000, 80
_RUN = re.compile(r"(\d+)(\D)")
SOURCES = {"a": "look-ahead", "e": "learned drafter", "s": "suffix", ".": "nobody (the model's own)"}

Row = Mapping[str, Any]


def groups_of(run: Run) -> str:
    """Return the groups with the highest and with the lowest mean reward, side by side."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in run.completions:
        found.setdefault((row["step"], row.get("prompt_id"), row.get("epoch")), []).append(row)
    rated = sorted(((_mean(rows), rows) for rows in found.values()), key=lambda pair: -pair[0])
    if not rated:
        return ""
    half = min(_MOST_GROUPS // 2, (len(rated) + 1) // 2)
    sides = {"Best": rated[:half], "Worst": rated[half:][-half:][::-1]}
    steps = sorted({row["step"] for row in run.completions})
    seen = f'<p class="note">Of the {len(rated):,} newest groups, steps {steps[0]} to {steps[-1]}.</p>'
    columns = "".join(
        f"<div><h3>{name}</h3>{''.join(_group(mean, rows) for mean, rows in groups)}</div>"
        for name, groups in sides.items()
    )
    return f'{seen}<div class="cols">{columns}</div>'


def _mean(rows: Sequence[Row]) -> float:
    rewards = [reward for row in rows if isinstance(reward := row.get("reward"), int | float)]
    return sum(rewards) / len(rewards) if rewards else float("-inf")


def _group(mean: float, rows: Sequence[Row]) -> str:
    first = rows[0]
    rated = sorted(rows, key=lambda row: -(row.get("reward") or 0))
    shown = [*rated[: _MOST_RESPONSES // 2], *rated[_MOST_RESPONSES // 2 :][-(_MOST_RESPONSES // 2) :]]
    left = f"<p>{len(rows) - len(shown)} more responses are in the file.</p>" if len(rows) > len(shown) else ""
    reward = "no reward" if mean == float("-inf") else f"reward {mean:.3f}"
    answer = "" if first.get("answer") is None else f"<p>answer: <code>{_text(first['answer'], 300)}</code></p>"
    task = f" · {_text(first['task'], 60)}" if first.get("task") else ""
    return (
        f'<details class="group"><summary><b>{reward}</b> · step {first["step"]}{task} · '
        f"{_text(first.get('prompt'), 90)}</summary><pre>{_text(first.get('prompt'))}</pre>{answer}"
        f"{''.join(map(_response, shown))}{left}</details>"
    )


def _response(row: Row) -> str:
    return f"<p>{_facts(row)}</p><pre>{_text(row.get('response'))}</pre>"


def _facts(row: Row) -> str:
    """Return a response's reward, its terms, its length and how it ended."""
    reward = row.get("reward")
    said = [f"<b>{short(reward)}</b>" if isinstance(reward, int | float) else _text(row.get("outcome") or "no reward")]
    scores = row.get("scores")
    said += (
        [f"{escape(str(name))} {short(score)}" for name, score in scores.items()] if isinstance(scores, dict) else []
    )
    return " · ".join([*said, f"{row.get('length', 0):,} tokens", escape(str(row.get("finish_reason", "")))])


def _text(value: Any, most: int = _MOST_CHARACTERS) -> str:
    words = "" if value is None else str(value)
    return escape(words if len(words) <= most else f"{words[: most * 2 // 3]} […] {words[-most // 3 :]}")


# -- the token ribbon --------------------------------------------------------------------------------------------------


def ribbons(run: Run) -> str:
    """Return, for some steps, the longest, the best and the worst response as a ribbon of cells, one a token."""
    rows = [row for row in run.completions if row.get("proposed")]
    steps = sorted({row["step"] for row in rows})[-_MOST_STEPS:]
    if not steps:
        return ""
    options = "".join(
        f'<option value="{step}"{" selected" * (step == steps[-1])}>step {step}</option>' for step in steps
    )
    blocks = "".join(
        f'<div data-step="{step}"{"" if step == steps[-1] else " hidden"}>'
        f"{_of_step([row for row in rows if row['step'] == step])}</div>"
        for step in steps
    )
    legend = "".join(f'<li><i class="key k-p{_code(letter)}"></i>{name}</li>' for letter, name in SOURCES.items())
    return (
        f'<div class="ribbons"><p><label>Responses of <select>{options}</select></label></p>'
        f'<ul class="legend">{legend}</ul>{blocks}</div>'
    )


def _of_step(rows: Sequence[Row]) -> str:
    rated = [row for row in rows if isinstance(row.get("reward"), int | float)] or rows
    chosen = {
        "Longest": max(rows, key=lambda row: row.get("length") or 0),
        "Best": max(rated, key=lambda row: (row.get("reward") or 0, row.get("length") or 0)),
        "Worst": min(rated, key=lambda row: (row.get("reward") or 0, -(row.get("length") or 0))),
    }
    return "".join(f"<h3>{name}</h3><p>{_facts(row)}</p>{_ribbon(row)}" for name, row in chosen.items())


def _ribbon(row: Row) -> str:
    runs = [(int(count), letter) for count, letter in _RUN.findall(str(row["proposed"]))]
    total = sum(count for count, _ in runs)
    pieces, at = [], 0
    for count, letter in runs:
        while count and at < _MOST_TOKENS:  # a run goes on in the next row of cells
            here = min(count, _CELLS - at % _CELLS)
            x, y = at % _CELLS, at // _CELLS
            pieces.append(f'<rect class="p{_code(letter)}" x="{x}" y="{y * 2}" width="{here}" height="1.7"/>')
            at, count = at + here, count - here
    shares = {name: sum(count for count, letter in runs if letter == code) / total for code, name in SOURCES.items()}
    said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share)
    height = 2 * (-(-at // _CELLS))
    return (
        f'<svg class="ribbon" viewBox="0 0 {_CELLS} {height}" role="img" aria-label="{escape(said)}">{"".join(pieces)}'
        f"</svg><p>{escape(said)}</p><details><summary>Text</summary><pre>{_text(row.get('prompt'))}</pre>"
        f"<pre>{_text(row.get('response'))}</pre></details>"
    )


def _code(letter: str) -> str:
    return {"a": "a", "e": "e", "s": "s", ".": "n"}.get(letter, "o")
