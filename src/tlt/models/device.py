"""Device and dtype of a model, and the CPU cores that workers share."""

from __future__ import annotations

import os

import torch

from tlt.config import Config, ModelConfig
from tlt.models.model_folder import ModelError


def torch_dtype(config: ModelConfig) -> torch.dtype:
    if config.dtype == "auto":
        fast = torch_device(config).type == "cuda" or multiplies_bfloat16()
        return torch.bfloat16 if fast else torch.float32
    return getattr(torch, config.dtype)


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for products of bfloat16: AVX512-BF16 or AMX. oneDNN computes them on
    other CPUs too, by conversion to float32."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def torch_device(config: ModelConfig) -> torch.device:
    name = config.device if config.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    if config.dtype == "float64" and config.device == "auto":
        name = "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"model.device = {config.device!r}, but this machine has no CUDA device: set it to 'cpu'")
    count = torch.cuda.device_count()
    if name.startswith("cuda:") and int(name.removeprefix("cuda:")) >= count:
        raise ModelError(f"model.device = {name!r}, but this machine has {count} CUDA devices, counted from cuda:0")
    # Without memory for parts of a sum, cuBLAS splits no sum, as in vLLM on Hopper. Else the number of rows decides.
    # PyTorch reads both at its first matrix product, and needs the first for deterministic algorithms.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")
    # otherwise cuBLAS may round the parts of a sum to bfloat16 before it adds them
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device(name)


def share_cores(config: Config) -> bool:
    """Return whether the workers run on this machine's CPU and outnumber its cores. If so, look-ahead is off."""
    alone, on_cpu = config.cluster.address is None, torch_device(config.model).type == "cpu"
    return alone and on_cpu and config.cluster.workers > len(os.sched_getaffinity(0))
