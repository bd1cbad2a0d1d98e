"""Checks of a recipe that need no torch. Commands make them before torch is imported, so that mistakes are reported at
once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlt.cluster.pool import refuse_no_ray
from tlt.config import ClusterConfig, Config, ConfigError, DataConfig, GenerationConfig, ModelConfig, SpeculationConfig
from tlt.data.prompts import first_prompts, held_out_data, task_dataset
from tlt.data.tables import NO_TEMPLATE, DataError, files_of
from tlt.draft.drafter_folder import DrafterError, drafter_config, refuse_other_target
from tlt.files import refuse_to_overwrite
from tlt.models.model_folder import (
    ModelError,
    has_chat_template,
    model_folder,
    raw_config,
    refuse_no_tokenizer,
    weight_paths,
)
from tlt.rewards import refuse_unanswered
from tlt.rewards.scores import refuse_missing_functions
from tlt.store.checkpoint import is_of_run, policy_in
from tlt.store.hub import is_on_hub, local_data, local_model

_WORKER_BYTES = 256 * 2**20  # memory of a worker's process with torch, but without a model


def refuse_mistakes(config: Config) -> None:
    """Raise a ValueError of one sentence for a mistake in the recipe: a model, drafter, weights or data file that does
    not exist, a missing column or right answer, a missing reward or environment, a missing chat template, or responses
    longer than the model's context. Names on the hub are not checked."""
    _refuse_workers(config.cluster)
    _refuse_wrong_folders(config.model, config.speculation)
    refuse_missing_functions(config.reward)
    for stage in {task.stage for task in config.data.tasks}:
        task_dataset(config.data, stage)
    _refuse_data("data.path", config, config.data)
    if config.eval.path:
        _refuse_data("eval.path", config, held_out_data(config.data, config.eval))
    if not is_on_hub(config.model.path):
        _refuse_impossible(config, Path(config.model.path))


def refuse_generation_mistakes(
    config: GenerationConfig, file: str | None, fields: Mapping[str, Any], out: Path | None
) -> None:
    """Raise a ValueError of one sentence for a mistake in the arguments of `tlt generate`: a model, drafter or file
    that does not exist, a missing column, or a file `out` that is not empty. `file` is the file of prompts, and
    `fields` are the given fields of [data]."""
    if out:
        refuse_to_overwrite(out)
    path = local_model(config.model.path)[0]
    if not is_of_run(Path(path)):  # a run's checkpoint is checked when it is read
        _refuse_wrong_folders(config.model.model_copy(update={"path": str(policy_in(path))}), config.speculation)
    if file:
        data = local_data(file)[0]
        files_of(data)
        if "prompt_column" in fields:
            first_prompts(DataConfig(path=data, prompt_column=fields["prompt_column"]))


def refuse_export_mistakes(source: Path, out: Path) -> None:
    """Raise a ValueError of one sentence if the folder to export does not exist, or if `out` is not empty."""
    refuse_to_overwrite(out)
    if not is_of_run(path := Path(local_model(str(source))[0])):
        model_folder(policy_in(path))


def _refuse_workers(cluster: ClusterConfig) -> None:
    if cluster.workers == 1:
        return
    refuse_no_ray()
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // _WORKER_BYTES
    if not cluster.address and cluster.workers > most:
        raise ConfigError(
            f"cluster.workers = {cluster.workers}, but the memory of this machine has room for at most {most}, because "
            f"each worker is a process of at least {_WORKER_BYTES // 2**20} MiB: lower it, or set cluster.address"
        )


def _refuse_wrong_folders(model: ModelConfig, speculation: SpeculationConfig) -> None:
    with named("model.path"):
        if not is_on_hub(model.path):
            raw_config(model.path)
            refuse_no_tokenizer(Path(model.path))
            weight_paths(model.path)  # raises if a file is missing
    with named("speculation.path"):
        if speculation.path:
            drafter = drafter_config(speculation.path)["tlt_drafter"]
            raw = {} if is_on_hub(model.path) else raw_config(model.path)
            sizes = {name: raw[name] for name in ("hidden_size", "vocab_size") if name in raw}
            if isinstance(drafter, dict):
                refuse_other_target(Path(speculation.path), drafter, sizes)


def _refuse_impossible(config: Config, folder: Path) -> None:
    if config.data.chat and not has_chat_template(folder):
        raise DataError(NO_TEMPLATE)
    most, new = raw_config(folder).get("max_position_embeddings"), config.rollout.max_new_tokens
    if isinstance(most, int) and new >= most:
        raise ModelError(
            f"rollout.max_new_tokens = {new}, but config.json has max_position_embeddings = {most} for a prompt with "
            "its response: lower rollout.max_new_tokens"
        )


def _refuse_data(field: str, config: Config, data: DataConfig) -> None:
    if not data.path or is_on_hub(data.path):
        return
    with named(field):
        files_of(data.path)
    prompts = first_prompts(data)
    if data.long_prompts == "refuse":  # otherwise prompts without a right answer may be dropped
        refuse_unanswered(config, prompts)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Put the name of a configuration field in front of errors."""
    try:
        yield
    except (ModelError, DrafterError, DataError) as error:
        raise type(error)(f"{field}: {error}") from None
