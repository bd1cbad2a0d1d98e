"""New places of moved fields. Old recipes are refused with the new name, and old checkpoints are converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED = {"kind": "kind", "window": "window", "idle_training": "training.idle"}
_REPLACED = ("budget", "catch_up")  # fields of speculation.training that `extra` replaces


def fault(tree: Mapping[str, Any]) -> str | None:
    """Return one sentence about the first moved field; None if there is none."""
    if "drafter" not in tree:
        return _fault_of_training(tree)
    fields = tree["drafter"]
    if not isinstance(fields, Mapping) or not fields:
        return "[drafter] is now [speculation.training], except kind and window, which are in [speculation]"
    name = next(iter(fields))
    return f"drafter.{name} is now {_new_key(name)}: rename it"


def renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe of an older checkpoint with all fields in their new places."""
    now = {section: fields for section, fields in tree.items() if section != "drafter"}
    speculation = dict(now.get("speculation", {}))
    for name, value in tree.get("drafter", {}).items():
        *tables, field = _new_key(name).split(".")[1:]
        place = speculation
        for table in tables:
            place = place.setdefault(table, {})
        place[field] = value
    if "training" in speculation:
        kept = {name: value for name, value in speculation["training"].items() if name not in _REPLACED}
        speculation["training"] = {"extra": speculation["training"].get("budget", 0.0)} | kept
    return now | {"speculation": speculation}


def _fault_of_training(tree: Mapping[str, Any]) -> str | None:
    speculation = tree.get("speculation")
    training = speculation.get("training") if isinstance(speculation, Mapping) else None
    found = [name for name in _REPLACED if isinstance(training, Mapping) and name in training]
    if not found:
        return None
    return (
        f"speculation.training.{found[0]} is replaced by speculation.training.extra, the share of the rollout's time "
        "during which training may delay a step (default 0): rename it, or remove it"
    )


def _new_key(name: str) -> str:
    return f"speculation.{_RENAMED.get(name, f'training.{name}')}"
