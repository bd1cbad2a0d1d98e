"""Folders of runs that never ran, with numbers that a test can compute by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATES = {"ROLLOUT": 4.0, "IDLE": 2.0, "AHEAD": 1.0, "SPOT": 0.5, "UPDATE": 2.5, "ABSENT": 0.0}


def line(step: int, num_workers: int = 2, **changes: Any) -> dict[str, Any]:
    """Return a step's metrics. The rollout takes 4 s. Plain decoding of the same tokens takes 6 s on even steps, and 3
    s on step 5."""
    compared = step % 2 == 0 or step == 5
    seconds = {"rollout": 4.0, "reward": 0.5, "update": 2.0, "sync": 0.5, "total": 7.0}
    seconds |= {"compare": 3.0 if step == 5 else 6.0, "total": 13.0} if compared else {}
    return {
        **{"step": step + 1, "reward": step / 10, "reward_std": 0.1, "accept_length": 2.0},
        **{"responses": 8, "tokens": 160, "tokens_per_second": 40.0, "seconds": seconds},
        "tasks": {"gcd": {"mean": step / 10, "std": 0.1, "responses": 4}},
        "lengths": {"mean": 20.0, "median": 18, "p99": 40, "max": 41, "truncated": 0.0},
        "update": {"entropy": 0.5, "grad_norm": 1.5, "mismatch_mean": 1e-7, "mismatch_p999": 1e-6},
        "rollout": {
            **{"row_passes": 80, "drafted": 100, "accepted": 80},
            "acceptance_rate": {"eagle": 0.8},
            "by_depth": {"eagle": {"1": 0.8, "2": 0.75}},
            "spot": {"version": step // 2},
            **{f"{name}_seconds": 1.0 for name in ("prefill", "draft", "verify", "commit")},
        },
        "batch": {"without_spread_share": 0.0},
        "eval": {"mean@2": 0.5} if step == 0 else {},
        "prompts": [[2 * step, 0], [2 * step + 1, 0]],
        "compared": {"tokens": 160, "responses": 8, "differ": 0} if compared else {},
        "workers": [dict(STATES) for _ in range(num_workers)],
        "useful_share": 0.8 if compared else 0.4,
        "energy": {"cpu_seconds": 10.0, "phases": {"rollout": {"cpu_seconds": 4.0}, "compare": {"cpu_seconds": 5.0}}},
        **changes,
    }


def make_run(folder: Path, steps: int = 8, config: dict[str, Any] | None = None, workers: int = 2) -> Path:
    folder.mkdir(parents=True)
    lines = [line(step, workers) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    recipe = {"model": {"path": "models/small"}, "train": {"steps": steps}, "run": {"folder": str(folder)}}
    (folder / "config.json").write_text(json.dumps(recipe | (config or {})), encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps({"steps": steps, "policy_sha256": "ab" * 32}), encoding="utf-8")
    (folder / "trace.json").touch()
    return folder
