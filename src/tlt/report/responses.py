"""Responses in report.html: the best and worst groups, and some responses with the drafter that proposed each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_MOST_GROUPS, _MOST_RESPONSES, _MOST_CHARACTERS, _MOST_STEPS = 30, 8, 2500, 8
_FACTS = ("step", "task", "reward", "scores", "outcome", "length", "finish_reason")

Row = Mapping[str, Any]


def groups_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the groups with the highest and the lowest mean reward, from rows of completions.jsonl."""
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


def ribbons_of(rows: Sequence[Row]) -> dict[int, dict[str, Any]]:
    """Return step -> the longest, the best and the worst response of the step, each with the drafter that proposed each
    token (`proposed`). Only the newest 8 steps are included."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        if row["proposed"]:
            found.setdefault(row["step"], []).append(row)
    return {step: _of_step(found[step]) for step in sorted(found)[-_MOST_STEPS:]}


def _of_step(rows: Sequence[Row]) -> dict[str, Any]:
    rated = [row for row in rows if row["reward"] is not None] or rows
    chosen = {
        "Longest": max(rows, key=lambda row: row["length"]),
        "Best": max(rated, key=lambda row: (_reward(row), row["length"])),
        "Worst": min(rated, key=lambda row: (_reward(row), -row["length"])),
    }
    return {name: _shown(row, "prompt", "response") | {"proposed": row["proposed"]} for name, row in chosen.items()}


def _shown(row: Row, *texts: str) -> dict[str, Any]:
    """Return the fields of a response that the page shows. The middle of long `texts` is left out."""
    return {name: row[name] for name in _FACTS} | {name: _cut(row[name]) for name in texts}


def _cut(value: Any) -> str | None:
    text = None if value is None else str(value)
    if text is None or len(text) <= _MOST_CHARACTERS:
        return text
    return f"{text[: _MOST_CHARACTERS * 2 // 3]} […] {text[-_MOST_CHARACTERS // 3 :]}"
