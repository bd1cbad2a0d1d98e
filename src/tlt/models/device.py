"""Device and dtype of a model, copies between the host and the device, and the CPU cores that workers share.

Drafting, verification and prefill wait for the device only in `to_host`, so that these waits can be counted. The hidden
states saved for drafter training are copied elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tlt.config import Config, ModelConfig
from tlt.models.model_folder import ModelError

_NUMPY = {torch.float64: np.float64, torch.int64: np.int64}


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


def to_device(device: torch.device, *columns: np.ndarray) -> Sequence[Tensor]:
    """Copy int64 arrays [M] to the device in one transfer. On a CUDA device the host does not wait for it."""
    flat = torch.from_numpy(np.concatenate(columns))
    if device.type == "cuda":
        flat = flat.pin_memory()
    return flat.to(device, non_blocking=True).split([len(column) for column in columns])


def to_host(*tensors: Tensor) -> list[np.ndarray]:
    """Copy tensors to the host in one transfer, and return them as NumPy arrays of the same shapes. On a GPU, int64
    stays int64 and all other dtypes become float64. On a CPU the dtypes are kept. Integers must be below 2^53, because
    they are transferred as float64."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = torch.cat([tensor.reshape(-1).double() for tensor in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([tensor.numel() for tensor in tensors])[:-1])
    return [
        part.reshape(tensor.shape).astype(_NUMPY.get(tensor.dtype, np.float64))
        for part, tensor in zip(parts, tensors, strict=True)
    ]
