"""Folder of a learned drafter: checks that do not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt.files import read_json


class DrafterError(ValueError):
    """Error of a drafter or its folder. The message names the problem and the remedy."""


def drafter_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of config.json in the folder of a drafter. Raises DrafterError if it is not one."""
    path = Path(folder)
    if not path.is_dir():
        raise DrafterError(f"{path} is not a folder: give the folder of a drafter, or train one with tlt draft train")
    try:
        config = read_json(path / "config.json")
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if "tlt_drafter" not in config:
        fault = "config.json is not that of a drafter; a run saves its drafters in drafter/ of its folder"
        raise unreadable(path, fault)
    return config


def refuse_other_target(path: Path, drafter: Mapping[str, Any], target: Mapping[str, Any]) -> None:
    """Raise DrafterError if the drafter in `path`, with the options `drafter`, was made for a target with other sizes.
    Sizes that `target` does not have are not compared."""
    for name in ("hidden_size", "vocab_size", "head_dim", "max_positions"):
        if name in target and drafter.get(name) != target[name]:
            raise DrafterError(
                f"the drafter in {path} is for a target with {name} {drafter.get(name)}, "
                f"but the model has {target[name]}: train one with tlt draft train"
            )


def unreadable(path: Path, fault: object) -> DrafterError:
    return DrafterError(f"{path} has no readable drafter ({fault}): train one with tlt draft train")
