"""Energy and cost on the page. A measured number and an estimated one are never added."""

from __future__ import annotations

from typing import Any

from tlt.energy import total_energy
from tlt.report.charts import mark, short, table
from tlt.report.read import Run

KINDS = {
    "gpu_joules": ("GPU energy, whole cards (NVML)", "J", True),
    "cpu_joules": ("CPU energy, whole packages (RAPL)", "J", True),
    "cpu_seconds": ("CPU time of the run's processes", "s", True),
    "estimated_cpu_joules": ("CPU energy (CPU time × run.watts_per_core)", "J", False),
    "cost": ("cost (time × run.price_per_hour)", "", False),
}
"""Name, unit, and whether it is measured."""


def energy_rows(run: Run) -> str:
    found = total_energy(run.steps)
    if not found:
        return ""
    parts = [found[name] for name in ("sums", "per_step", "per_million_tokens", "per_reward_point")]
    rows = [[f"{name} {mark(measured)}", *(_cell(part, key, unit) for part in parts)]
            for key, (name, unit, measured) in KINDS.items() if key in found["sums"]]  # fmt: skip
    head = ["", "the run", "per step", "per million tokens", "per reward point"]
    notes = ["A reward point is 0.01 of mean reward, gained from the first to the last tenth of the steps."]
    if "gpu_joules" not in found["sums"]:
        notes.append("No GPU counter was read.")
    if "cpu_joules" not in found["sums"]:
        notes.append("No CPU energy counter was readable, so joules of the CPU are estimated or left out.")
    note = f'<p class="note">{" ".join(notes)}</p>'
    return table(head, rows) + _plain_against_ours(found["compared"]) + note


def _cell(part: dict[str, float], key: str, unit: str) -> str:
    return f"{short(part[key])} {unit}" if key in part else "–"


def _plain_against_ours(compared: dict[str, Any]) -> str:
    plain, ours = compared.get("plain"), compared.get("ours")
    if not plain or not ours:
        return ""
    rows = [
        [f"{name} {mark(measured)}", _cell(plain, key, unit), _cell(ours, key, unit), f"{ours[key] / plain[key]:.2f}"]
        for key, (name, unit, measured) in KINDS.items()
        if key in ours and plain.get(key)
    ]
    head = [f"same tokens, {compared['steps']:,} step(s)", "plain decoding", "tlt", "tlt / plain"]
    note = (
        '<p class="note">Above 1, speculation used more than plain decoding. The rollout of tlt includes '
        "look-ahead and drafter training in idle time, which plain decoding does without.</p>"
    )
    return f"<h3>Does speculation save energy?</h3>{table(head, rows)}{note}" if rows else ""
