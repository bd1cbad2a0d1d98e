"""Checks that prompts fit the model: its vocabulary and its context length."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.config import Config
from tlt.data.tables import DataError
from tlt.models.families import decoder_options, read_config
from tlt.models.model_folder import ModelError
from tlt.types import Prompt


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
