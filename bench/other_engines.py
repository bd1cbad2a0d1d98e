"""Plain decoding by other engines (transformers, vLLM), with the same prompts and lengths for all.

Each peer is a function that decodes once; its result is not used. A peer that is not installed is left out."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tlt.config import ModelConfig

Decode = Callable[[], Any]


def peers(
    config: ModelConfig, device: torch.device, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Decode]:
    """Return, by name, functions that decode `new_tokens` tokens for every prompt at temperature 1 without an early
    stop. All prompts must have the same length."""
    found = dict(_transformers(config, device, prompts, new_tokens))
    if importlib.util.find_spec("vllm"):
        found["vllm"] = _vllm(config, prompts, new_tokens)
    return found


def _transformers(
    config: ModelConfig, device: torch.device, prompts: Sequence[Sequence[int]], new_tokens: int
) -> dict[str, Decode]:
    for name in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(name).setLevel(logging.ERROR)  # its warnings are about settings that are intended here
    model: Any = AutoModelForCausalLM.from_pretrained(config.path, dtype=config.dtype, local_files_only=True)
    model.to(device).eval()
    model.generation_config.eos_token_id = model.config.eos_token_id = None  # no response stops early
    ids = torch.tensor(prompts, device=device)
    sampling: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    generation = GenerationConfig(**sampling, max_new_tokens=new_tokens, pad_token_id=0)

    @torch.inference_mode()
    def generate() -> None:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=generation)
        assert out.shape[1] == ids.shape[1] + new_tokens

    def generate_batch() -> None:
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        # allocating the default cache, most of the free memory, takes seconds; this one just fits prompts and responses
        pages = len(prompts) * (1 + (ids.shape[1] + new_tokens) // 256)
        cache = ContinuousBatchingConfig(num_blocks=pages + 8, max_batch_tokens=max(256, ids.numel()))
        rows = [list(p) for p in prompts]
        out = model.generate_batch(
            rows, generation_config=generation, continuous_batching_config=cache, persistent_manager=True
        )
        assert all(len(o.generated_tokens) == new_tokens for o in out.values())

    return {"transformers.generate": generate, "transformers.generate_batch": generate_batch}


def _vllm(config: ModelConfig, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decode:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # run vLLM in this process, like the others
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    length = len(prompts[0]) + new_tokens + 16
    engine = LLM(
        config.path,
        dtype=config.dtype,
        max_model_len=length,
        max_num_seqs=len(prompts),
        gpu_memory_utilization=0.3,  # on a CPU this is a fraction of the main memory
        seed=0,
    )
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    return lambda: engine.generate([{"prompt_token_ids": list(p)} for p in prompts], params, use_tqdm=False)
