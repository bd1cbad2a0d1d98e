"""What a resumed run may change of its recipe: nothing that reaches the policy."""

from __future__ import annotations

import json
from typing import Any

from tlt.config import Config, ConfigError

# nothing of these reaches the policy; cluster.workers does, by the rounding of sums over other shards
_FREE = (
    *("run.folder", "run.keep", "run.save_every", "run.overwrite", "run.compare_every"),
    *("reward.timeout_seconds", "reward.workers"),
    *("cluster.address", "cluster.slice_seconds", "cluster.patience"),
)
_PLACES = ("data.path", "reward.folder")  # of the data itself there is a fingerprint
_FREE_SECTIONS = ("speculation", "drafter", "engine", "eval")


def refuse_changes(before: dict[str, Any], config: Config, done: int) -> None:
    """Refuse to resume a run of recipe `before` (as JSON), after `done` steps, by one that would end elsewhere."""
    if config.train.steps < max(done, before["train"]["steps"]):
        raise ConfigError(
            f"train.steps = {config.train.steps} is below the {before['train']['steps']} of the run to be resumed, "
            f"of which {done} are done: it can only be raised"
        )
    now = config.model_dump(mode="json")
    for section, fields in before.items():
        for name, value in fields.items():
            key, new = f"{section}.{name}", now.get(section, {}).get(name)
            raised = key == "train.steps" and config.train.schedule == "constant"  # else the rate depends on it
            if raised or key in (*_FREE, *_PLACES) or section in _FREE_SECTIONS or value == new:
                continue
            raise ConfigError(
                f"{key} = {json.dumps(new)}, but the run to be resumed has {json.dumps(value)}: "
                "give it that value, or start a new run in another run.folder"
            )
