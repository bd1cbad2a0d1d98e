"""Sampling parameters of rollouts and evaluations, with the end tokens of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.config import Config, RolloutConfig
from tlt.files import errors_as, read_json
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.types import SamplingParams


def sampling_params(config: RolloutConfig, folder: str | Path, tokenizer: Any) -> SamplingParams:
    """Return the sampling parameters of a rollout. Raises ModelError if there is neither an end token nor a stop
    string."""
    vocab_size, strings = decoder_options(read_config(folder)).vocab_size, tuple(config.stop_strings)
    stops = tuple(token for token in stop_token_ids(folder, tokenizer) if token < vocab_size)
    if not stops and not strings:
        raise ModelError(
            f"neither the tokenizer nor config.json or generation_config.json in {folder} names an end token below the "
            f"vocab_size of {vocab_size}, so no response would end: set eos_token_id there, or set rollout.stop_strings"
        )
    return SamplingParams(config.temperature, config.top_k, config.top_p, config.max_new_tokens, stops, strings)


def eval_sampling(config: Config, params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of evaluations: those of the rollout (`params`) with eval.temperature."""
    temperature = config.eval.temperature
    return params if temperature is None else replace(params, temperature=temperature)


def stop_token_ids(folder: str | Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of all end tokens that config.json, generation_config.json and the tokenizer name."""
    named = [tokenizer.eos_token_id]
    for file in ("config.json", "generation_config.json"):
        path = Path(folder) / file
        with errors_as(ModelError, f"{path} cannot be read"):
            ids = read_json(path).get("eos_token_id") if path.is_file() else None
        named += ids if isinstance(ids, list) else [ids]
    for token in named:
        if token is not None and (type(token) is not int or token < 0):
            raise ModelError(f"{folder} has {token!r} for an eos_token_id: give a token's number, or several in a list")
    return tuple(sorted({i for i in named if i is not None}))
