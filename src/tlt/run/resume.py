"""Comparison of a resumed run's recipe with the recipe in the checkpoint. The new recipe may change fields that do not
affect the weights, fields that change only the rounding, and fields that the user names with --force."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from pydantic import BaseModel

from tlt.config import Config, ConfigError
from tlt.config.section import section_of
from tlt.engine.exactness import Exactness
from tlt.models.device import torch_dtype

# Fields that do not affect the weights. Prompts, model and reward functions are compared by the content of their files.
_FREE = (
    *("run.folder", "run.keep", "run.save_every", "run.overwrite", "run.compare_every"),
    *("run.trackers", "run.stop_within", "run.on_save"),
    *("reward.timeout_seconds", "reward.folder"),
    *("model.hub", "data.hub"),
    *("data.path", "data.prompt_column", "data.answer_column", "data.template", "data.chat", "data.max_prompt_tokens"),
    "data.long_prompts",
    *("eval", "speculation.training", "cluster.address", "cluster.slice_seconds", "cluster.patience"),
    *("cluster.min_workers", "cluster.grace"),
)
# Fields that change only the rounding, because sums are computed in another order or by other kernels.
_ROUNDS = (
    *("train.micro_batch_tokens", "train.gradient_checkpointing", "train.deterministic", "train.shard"),
    *("cluster.workers", "model.device", "model.cuda_graphs", "engine", "speculation"),
)
_OF_PASSES = ("engine", "speculation")  # fields that change only what is decoded together, apart from the backend


class Contents(NamedTuple):
    """sha256 of files that the recipe names. Only their content counts, not their place."""

    model: str
    """sha256 of the files in model.path"""
    reward: str
    """sha256 of the files with the user's reward functions or environment"""


def allowed_changes(
    state: Mapping[str, Any], config: Config, contents: Contents, force: Collection[str]
) -> list[dict[str, Any]]:
    """Compare the recipe in a checkpoint (`state`) with the recipe of the resumed run (`config`). Return the changes
    that may affect the result, as dictionaries for JSON. Raises ConfigError for a change that may affect the result by
    more than rounding, unless its field is in `force`."""
    _refuse_unknown(force, config)
    done, found = state["step"], []
    if config.train.steps < done:
        raise ConfigError(f"train.steps = {config.train.steps} is below {done}, the number of steps done: raise it")
    for key, before, now in _differences(state, config, contents):
        if key == "train.lora.rank":
            raise ConfigError(
                f"{key} = {now}, but the run to be resumed has {before}, and its weights do not fit: set it to that "
                "value, or export that run with `tlt export` and start a new run from the exported model"
            )
        change = {"step": done, "key": key, "before": before, "now": now}
        if key in force:
            found.append(change | {"effect": "forced"})
        elif _is_of(key, _FREE):
            continue
        elif not _is_of(key, _ROUNDS):
            raise ConfigError(_refusal(key, before, now, done, contents))
        else:
            found.append(change | {"effect": "rounding"})
    return found


def has_effect(change: Mapping[str, Any], exactness: Exactness) -> bool:
    """Return whether a change of the recipe may affect the result, if the engine is as exact as the check at start
    found."""
    key = change["key"]
    harmless = exactness.exact and _is_of(key, _OF_PASSES) and key != "engine.backend"
    return change["effect"] == "forced" or not harmless


def changes_environment(changes: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether these changes of the recipe may change the replies of an environment."""
    return any(_is_of(change["key"], ("reward",)) for change in changes)


def as_at_its_start(config: Config, state: Mapping[str, Any] | None) -> Config:
    """Return the configuration with two values that the recipe may leave to the start of the run. They are those in the
    checkpoint (`state`), or for a new run those of this moment and machine.

    `model.dtype` = "auto" becomes a number format. `data.now`, the time that chat templates use, is set if data.chat is
    true."""
    now, dtype = config.data.now, config.model.dtype
    if config.data.chat and not now:
        now = state["config"]["data"].get("now") if state else datetime.now().isoformat(timespec="seconds")
    if dtype == "auto":
        dtype = state["config"]["model"]["dtype"] if state else str(torch_dtype(config.model)).removeprefix("torch.")
    data, model = config.data.model_copy(update={"now": now}), config.model.model_copy(update={"dtype": dtype})
    return config.model_copy(update={"data": data, "model": model})


def sentence(change: Mapping[str, Any]) -> str:
    """Return a sentence for the log that describes a change of the recipe at a resume."""
    key, before, now = change["key"], change["before"], change["now"]
    values = f"{key} was {json.dumps(before)} and is {json.dumps(now)}"
    if _is_sha256(before) and _is_sha256(now):
        values = f"the files of {key} have changed"
    if change["effect"] == "forced":
        return f"{values} (--force): the result of the run changes"
    return f"{values}: from this step on, results differ by rounding"


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _differences(state: Mapping[str, Any], config: Config, contents: Contents) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, old value, new value) for each configuration field that differs from the checkpoint (`state`). Models
    and the user's reward functions are compared by the sha256 of their files."""
    old: dict[str, Any] = dict(_fields(state["config"]))
    new: dict[str, Any] = dict(_fields(config.model_dump(mode="json")))
    reward = config.reward
    functions = f"reward.{'environment' if reward.environment else 'terms' if reward.terms else 'name'}"
    for key in sorted(old.keys() | new.keys()):
        values: tuple[Any, Any] = (old.get(key), new.get(key))
        if key == "model.path":
            commit = config.model.hub  # compared first, because the hub's cache may contain more files than before
            values = (commit, commit) if commit and commit == old.get("model.hub") else (state["model"], contents.model)
        if key == functions and values[0] == values[1]:
            values = (state["reward"], contents.reward)
        raised = key == "train.steps" and config.train.schedule == "constant" and values[1] > values[0]
        if values[0] != values[1] and not raised:
            yield key, values[0], values[1]


def _fields(tree: Mapping[str, Any], section: type[BaseModel] = Config, within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for all configuration fields, including those of nested sections."""
    for name, value in tree.items():
        if inner := section_of(section.model_fields.get(name)):
            yield from _fields(value, inner, f"{within}{name}.")
        else:
            yield within + name, value


def _is_of(key: str, keys: Collection[str]) -> bool:
    """Return whether a dotted key, or a section that contains it, is in `keys`."""
    return any(key == name or key.startswith(f"{name}.") for name in keys)


def _refusal(key: str, before: Any, now: Any, done: int, contents: Contents) -> str:
    remedy = f"or set --force {key} to continue with another result, or start a new run in another run.folder"
    if key == "model.path":
        return f"the files in model.path differ from those of the run to be resumed: use the same model, {remedy}"
    if now == contents.reward:
        return f"the file of the function in {key} has changed since the run to be resumed: restore it, {remedy}"
    if key == "train.steps":
        problem = f"train.steps = {now}, but the run to be resumed has {before}, of which {done} are done"
        return f"{problem}: it can only be raised, and only if train.schedule is constant; set it to {before}, {remedy}"
    values = f"{key} = {json.dumps(now)}, but the run to be resumed has {json.dumps(before)}"
    return f"{values}: set it to that value, {remedy}"


def _refuse_unknown(force: Collection[str], config: Config) -> None:
    known = dict(_fields(config.model_dump()))
    for key in force:
        if key not in known:
            raise ConfigError(f"--force {key}: there is no such field; name a field such as train.learning_rate")
