"""Translation of TRL's prompts and sampling options for tlt's engine. Unsupported options are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from tlt.config import EngineConfig
from tlt.integrations import UnsupportedError
from tlt.integrations.trl_tools import has_tools, refuse_other_methods
from tlt.integrations.trl_vllm import refuse_vllm
from tlt.types import SamplingParams

TESTED = ((1, 16), (1, 16))
"""first and last tested version (major, minor) of TRL"""


def refuse(trainer: Any, engine: EngineConfig) -> None:
    """Raise UnsupportedError for options of the trainer that tlt's engine does not support."""
    args, model, plugin = trainer.args, trainer.model, getattr(trainer.accelerator.state, "fsdp_plugin", None)
    zero = getattr(getattr(trainer.accelerator.state, "deepspeed_plugin", None), "zero_stage", 0)
    for asked, what, remedy in (
        (args.min_p, "min_p", "set it to None, and top_p or top_k instead"),
        (args.repetition_penalty != 1.0, "repetition_penalty", "set it to 1.0"),
        (args.generation_kwargs, "generation_kwargs", "leave them out"),
        (getattr(args, "cache_implementation", None), "cache_implementation", "leave it out"),
        (args.use_transformers_continuous_batching, "use_transformers_continuous_batching", "set it to False"),
        (args.fp16 or model.dtype == torch.float16, "fp16", "set bf16=True, and load the model in bfloat16 or float32"),
        (args.fp16_full_eval, "fp16_full_eval", "leave it out"),
        (
            args.bf16_full_eval and not (args.bf16 or model.dtype == torch.bfloat16),
            "bf16_full_eval of a model that is trained in another dtype",
            "leave it out, or set bf16=True",
        ),
        (getattr(model, "is_quantized", False), "a quantized model", "load it in bfloat16"),
        (
            getattr(args, "cast_lm_head_to_fp32", False) and not args.bf16,
            "cast_lm_head_to_fp32 without bf16=True",
            "leave it out",
        ),
        (args.max_completion_length is None, "max_completion_length = None", "give it a number of tokens"),
        (args.temperature == 0, "temperature = 0", "set it above 0, because otherwise a group has equal completions"),
        (engine.backend != "tlt", f"engine.backend = {engine.backend!r}", "leave it out"),
        (plugin is not None and getattr(plugin, "fsdp_version", 1) == 1, "FSDP version 1", "set fsdp_version: 2"),
        (isinstance(getattr(plugin, "cpu_offload", None), CPUOffloadPolicy), "FSDP's cpu_offload", "set it to False"),
        (zero == 3, "DeepSpeed ZeRO-3", "use ZeRO-2 or FSDP2"),
    ):
        if asked:
            raise UnsupportedError(f"tlt in TRL does not support {what}: {remedy}")
    if args.use_vllm:
        refuse_vllm(args)
    if has_tools(trainer):
        refuse_other_methods(trainer)


def prompts_of(prompts: Sequence[Any], trainer: Any) -> list[tuple[int, ...]]:
    """Return the token ids of prompts, by the trainer's own tokenizer. Messages are rendered with its chat template.
    Raises UnsupportedError for messages with images."""
    tokenizer = trainer.processing_class
    if isinstance(prompts[0], str):
        return [tuple(ids) for ids in tokenizer(text=list(prompts))["input_ids"]]
    parts = [message["content"] for messages in prompts for message in messages]
    if any(isinstance(part, list) and any(piece.get("type") != "text" for piece in part) for part in parts):
        raise UnsupportedError("tlt in TRL does not support images: leave rollout_func out")
    if has_tools(trainer):  # TRL renders each prompt with the tools of its environment
        return [tuple(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
    rendered = tokenizer.apply_chat_template(
        conversation=list(prompts),
        chat_template=trainer.chat_template,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return [tuple(ids) for ids in rendered["input_ids"]]


def to_sampling_params(trainer: Any) -> SamplingParams:
    """Return the sampling parameters of a completion. Any end token of the model or the tokenizer ends a completion, as
    in TRL."""
    args = trainer.args
    return SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k or 0,
        top_p=args.top_p,
        max_new_tokens=args.max_completion_length,
        stop_token_ids=tuple(trainer.eos_token_ids),
    )


def refuse_impossible(token_ids: Sequence[int], params: SamplingParams, most: int) -> None:
    """Raise ValueError for a prompt that is empty, or too long with its completion. The message has TRL's names of
    options. `most` is the model's limit in tokens."""
    if not token_ids:
        raise ValueError("a prompt has no tokens: drop empty prompts from the data set")
    longest = len(token_ids) + params.max_new_tokens
    if longest > most:
        raise ValueError(
            f"a prompt of {len(token_ids)} tokens and its completion may reach {longest} tokens, but the model "
            f"supports {most}: lower max_completion_length, or drop long prompts from the data set"
        )
