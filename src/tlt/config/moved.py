"""Configuration fields that were moved or removed. In a recipe they are an error that names the replacement. Recipes in
old checkpoints are converted."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

_RENAMED = {"kind": "kind", "window": "window", "idle_training": "training.idle"}
_EXTRA = (
    "is replaced by speculation.training.extra, the share of the rollout's time during which training may delay a step "
    "(default 0): rename it, or remove it"
)
_REMOVED = {
    "speculation.training.budget": _EXTRA,
    "speculation.training.catch_up": _EXTRA,
    "speculation.training.decay": "is always 0.4: remove it",
    "speculation.training.warmup_steps": "is always 20: remove it",
    "speculation.training.max_grad_norm": "is always 0.5: remove it",
    "speculation.training.loss": "is always cross_entropy: remove it",
    "run.report": "is always on: remove it",
    "eval.keep_best": "is always on: remove it",
}
"""removed configuration field -> note on what to use instead. These fields do not affect the result of a run."""


def fault(tree: Mapping[str, Any]) -> str | None:
    """Return a sentence about the first moved or removed entry of a recipe; None if it has none."""
    if "drafter" in tree:
        return _fault_of_drafter(tree["drafter"])
    for key, note in _REMOVED.items():
        table, name = _table_of(tree, key)
        if name in table:
            return f"{key} {note}"
    return None


def _fault_of_drafter(fields: Any) -> str:
    if not isinstance(fields, Mapping) or not fields:
        return "[drafter] is now [speculation.training], except kind and window, which are in [speculation]"
    name = next(iter(fields))
    return f"drafter.{name} is now {_new_key(name)}: rename it"


def renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the recipe of an older checkpoint: move and rename its fields, and drop removed fields."""
    now = deepcopy(dict(tree))
    for name, value in now.pop("drafter", {}).items():
        _set(now, _new_key(name), value)
    training, _ = _table_of(now, "speculation.training.extra")
    if training:
        _set(now, "speculation.training.extra", training.get("extra", training.get("budget", 0.0)))
    for key in _REMOVED:
        table, name = _table_of(now, key)
        table.pop(name, None)
    return now


def _new_key(name: str) -> str:
    return f"speculation.{_RENAMED.get(name, f'training.{name}')}"


def _table_of(tree: Any, key: str) -> tuple[dict[str, Any], str]:
    """Return the table of `tree` that holds the field with the dotted name `key`, and the last part of the name. If
    there is no such table, return an empty one."""
    *tables, name = key.split(".")
    for table in tables:
        tree = tree.get(table) if isinstance(tree, Mapping) else None
    return (tree if isinstance(tree, dict) else {}), name


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *tables, name = key.split(".")
    for table in tables:
        tree = tree.setdefault(table, {})
    tree[name] = value
