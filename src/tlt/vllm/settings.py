"""From a recipe to vLLM's own arguments."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from tlt.config import EngineConfig, ModelConfig, SpeculationConfig
from tlt.vllm.versions import VllmError

PROCESSOR = "tlt.vllm.processor:SharedNoise"
EXTENSION = "tlt.vllm.worker.WorkerExtension"
PROPOSER = "tlt.vllm.look_ahead.LookAheadProposer"
WIDEST = 16
"""tokens of a look-ahead that are verified in one pass; vLLM keeps room for so many in every request"""
_CACHE_MB = 1024  # where engine.kv_memory_mb is "auto": vLLM never gives the memory back
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, so that weights are handed over as they lie in memory
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a worker has its cores already
}


def set_environment() -> None:
    """Before vLLM is imported; what the user has set stays."""
    # numba, which the n-gram lookup loads, takes all cores, and torch's kernels with it: ten times slower on busy ones
    for name, value in (_ENVIRONMENT | {"NUMBA_NUM_THREADS": str(torch.get_num_threads())}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # what it says before it has read that


def engine_arguments(
    model: ModelConfig, engine: EngineConfig, speculative: dict[str, Any] | None, longest: int, sleeps: bool
) -> dict[str, Any]:
    """Keyword arguments of vLLM's `EngineArgs`. `longest`: tokens of a prompt with its response. Raises VllmError."""
    drafted = speculative["num_speculative_tokens"] if speculative else 0
    ours = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": longest,
        "max_num_seqs": engine.max_rows,
        "max_num_batched_tokens": max(engine.prefill_tokens, engine.max_rows * (1 + drafted)),  # all rows in each pass
        "kv_cache_memory_bytes": (_CACHE_MB if engine.kv_memory_mb == "auto" else engine.kv_memory_mb) * 2**20,
        "speculative_config": speculative,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        "enable_sleep_mode": sleeps,  # to give the cache's memory back for the update
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    taken = ours.keys() & engine.vllm.keys()
    if taken:
        raise VllmError(f"engine.vllm.{min(taken)} is set by tlt itself, from the recipe's other keys: leave it out")
    return ours | engine.vllm


def speculative_arguments(
    speculation: SpeculationConfig, export: Callable[[], tuple[str, str]]
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a drafter of ours; `export` writes the learned one for vLLM and gives its method
    and folder. Raises VllmError where there is none."""
    if speculation.drafter == "off":
        return None
    if speculation.drafter == "suffix":
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
        return {"method": "ngram", "num_speculative_tokens": speculation.depth, **lookup}
    if speculation.drafter == "adaptive":
        return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": WIDEST}
    if speculation.drafter == "eagle":
        method, folder = export()
        return {"method": method, "model": folder, "num_speculative_tokens": speculation.depth}
    raise VllmError(
        f"speculation.drafter = {speculation.drafter!r} is not for engine.backend = 'vllm': take 'adaptive' "
        "(look-ahead), 'eagle' (the learned one), 'suffix' (vLLM's n-gram lookup) or 'off'"
    )
