"""Translation of TRL's prompts, sampling options and tools for tlt's engine. Unsupported options are refused by name.

TRL calls the tools of its trainer or environment, and tlt decodes the next turn.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from tlt.config import EngineConfig
from tlt.integrations import UnsupportedError
from tlt.integrations.decoding import prompt_number
from tlt.integrations.trl_vllm import refuse_vllm
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response, SamplingParams

TESTED = ((1, 16), (1, 16))
"""first and last tested version (major, minor) of TRL"""
_SEAM = "_generate_single_turn"
_ARGUMENTS = ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"]
_NAMES = (_SEAM, "_tokenize_prompts", "_tool_call_loop")


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


# -- turns after tool calls --------------------------------------------------------------------------------------------


def has_tools(trainer: Any) -> bool:
    return bool(trainer.tools or trainer.environment_factories)


@dataclass
class _Row:
    """A completion that TRL may continue."""

    first: Request
    text: tuple[int, ...]
    """tokens of the prompt and of all turns"""


class ToolTurns:
    """Replacement for the trainer's method that generates a turn after a tool call. The tokens of a turn are a function
    of the weights, the tokens before the turn, the seed of the row and the number of the turn."""

    def __init__(self, trainer: Any, decode: Callable[[Sequence[Request]], list[Response]]) -> None:
        """Replace the trainer's method. `decode` returns the responses in the order of the requests."""
        self._decode = decode
        self._rows: list[_Row] = []
        self._turn = 0
        setattr(trainer, _SEAM, self.next_turn)

    def begin(self, requests: Sequence[Request], responses: Sequence[Response]) -> None:
        """Record the first turn of each row of a new batch."""
        pairs = zip(requests, responses, strict=True)
        self._rows = [_Row(first, (*first.prompt.token_ids, *response.token_ids)) for first, response in pairs]
        self._turn = 0

    def next_turn(
        self,
        prompt_ids: Sequence[Sequence[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens and the log-probs of each row's next turn. `prompt_ids` has all tokens of each row before
        this turn, including the results of tools. If they fill max_completion_length, the row gets no tokens."""
        if images or has_tool_images:
            raise UnsupportedError(
                "tlt in TRL does not support images: let tools return text, or leave rollout_func out"
            )
        self._turn += 1
        rows = self._continued(prompt_ids)
        requests = [self._request(row, tuple(ids)) for row, ids in zip(rows, prompt_ids, strict=True)]
        wanted = [request for request in requests if request.sampling.max_new_tokens > 0]
        found = {response.request.seed: response for response in self._decode(wanted)}
        tokens, logprobs = list[list[int]](), list[list[float]]()
        for row, request in zip(rows, requests, strict=True):
            response = found.get(request.seed)
            tokens.append(list(response.token_ids) if response else [])
            logprobs.append(list(response.full_logprobs) if response else [])
            row.text = (*request.prompt.token_ids, *tokens[-1])
        return tokens, logprobs

    def _continued(self, prompt_ids: Sequence[Sequence[int]]) -> list[_Row]:
        """Return the rows that these token sequences continue, found by their tokens. TRL keeps the order of the rows,
        but does not number them."""
        left = iter(self._rows)
        found = [next((row for row in left if tuple(ids[: len(row.text)]) == row.text), None) for ids in prompt_ids]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            raise UnsupportedError(
                "tlt in TRL cannot continue a completion whose earlier tokens have changed: use a chat template that "
                "keeps earlier turns unchanged, or leave tools out"
            )
        return rows

    def _request(self, row: _Row, text: tuple[int, ...]) -> Request:
        first = row.first
        seed = request_seed(first.seed, "trl turn", 0, self._turn, 0)
        new = first.sampling.max_new_tokens - (len(text) - len(first.prompt.token_ids))
        prompt = Prompt(prompt_number(text), "", text)
        return Request(prompt, first.index, first.epoch, seed, replace(first.sampling, max_new_tokens=new))


def refuse_other_methods(trainer: Any) -> None:
    """Raise UnsupportedError if the trainer of the installed TRL lacks the methods that this module uses."""
    missing = [name for name in _NAMES if not callable(getattr(trainer, name, None))]
    if missing or list(inspect.signature(getattr(trainer, _SEAM)).parameters) != _ARGUMENTS:
        what = missing[0] if missing else f"{_SEAM} with the arguments {', '.join(_ARGUMENTS)}"
        raise UnsupportedError(
            f"tlt does not support tools in this TRL, whose trainer has no {what}: install trl 1.16, or leave tools out"
        )
