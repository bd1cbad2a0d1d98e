"""Where the fields of the former section [drafter] are now: old recipes are told, old checkpoints are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_RENAMED = {"kind": "kind", "window": "window", "idle_training": "training.idle"}


def fault(tree: Mapping[str, Any]) -> str | None:
    """One sentence on the first field of the former section, by its new name."""
    if "drafter" not in tree:
        return None
    fields = tree["drafter"]
    if not isinstance(fields, Mapping) or not fields:
        return "[drafter] is now [speculation.training], but for kind and window, which are in [speculation]"
    name = next(iter(fields))
    return f"drafter.{name} is now {_new_key(name)}: rename it"


def renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as an older checkpoint holds it, with all fields where they are now."""
    now = {section: fields for section, fields in tree.items() if section != "drafter"}
    speculation = dict(now.get("speculation", {}))
    for name, value in tree.get("drafter", {}).items():
        *tables, field = _new_key(name).split(".")[1:]
        place = speculation
        for table in tables:
            place = place.setdefault(table, {})
        place[field] = value
    return now | {"speculation": speculation}


def _new_key(name: str) -> str:
    return f"speculation.{_RENAMED.get(name, f'training.{name}')}"
