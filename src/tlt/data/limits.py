"""Limits of prompts and responses: vocabulary and context length of the model, sampling parameters, and end tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlt.config import Config, RolloutConfig
from tlt.data.tables import DataError
from tlt.files import errors_as, read_json
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.types import Prompt, SamplingParams


def refuse_foreign_tokens(prompts: Sequence[Prompt], vocab_size: int) -> None:
    """Raise DataError if a prompt has a token outside the model's vocabulary. Such tokens come from another model's
    tokenizer."""
    for prompt in prompts:
        if max(prompt.token_ids) >= vocab_size:
            raise DataError(
                f"prompt {prompt.prompt_id} has token {max(prompt.token_ids)}, outside the model's vocabulary of "
                f"{vocab_size} tokens: copy the tokenizer that belongs to this model into its folder"
            )


def refuse_misfits(config: Config, prompts: Sequence[Prompt], held_out: bool = False) -> None:
    """Raise DataError if a prompt has a token outside the model's vocabulary. Raise ModelError if a prompt with the
    longest possible response exceeds the model's context length. `held_out`: whether the prompts are for
    evaluations."""
    if not prompts:
        return
    options = decoder_options(read_config(config.model.path))
    refuse_foreign_tokens(prompts, options.vocab_size)
    new = config.rollout.max_new_tokens
    longest = max(len(prompt.token_ids) for prompt in prompts) + new
    if longest > options.max_positions:
        whose = "a held-out prompt" if held_out else "a prompt"
        why = ", and the rollout decoder cannot exceed the window" if options.limited_by == "sliding_window" else ""
        most = options.max_positions - longest + new
        least = f"lower rollout.max_new_tokens to at most {most}"
        shorter = f"lower data.max_prompt_tokens below {options.max_positions}, with data.long_prompts = 'drop'"
        raise ModelError(
            f"{whose} with its response may reach {longest} tokens, but config.json has {options.limited_by} = "
            f"{options.max_positions}{why}: {least if most > 0 else shorter}"
        )


# -- sampling parameters -----------------------------------------------------------------------------------------------


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
