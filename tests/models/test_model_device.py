"""The device of a model, and copies between it and the host."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from tlt.config import ModelConfig
from tlt.models import device
from tlt.models.device import to_device, to_host, torch_device, torch_dtype


def test_cublas_is_configured_before_its_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 reads the variable only once, and without it refuses every product of a deterministic update."""
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch_device(ModelConfig(path="model", device="cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLASLT_WORKSPACE_SIZE"] == "1"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch_device(ModelConfig(path="model", device="cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.parametrize(
    ("found", "dtype"),
    [
        ({"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({"architecture": "aarch64", "neon": True}, torch.float32),
    ],
    ids=["AVX512-BF16", "AMX", "AVX-512 alone", "another architecture"],
)
def test_auto_is_bfloat16_on_cpus_with_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, object], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(device.torch.cpu, "get_capabilities", lambda: found)
    assert torch_dtype(ModelConfig(path="model", device="cpu")) == dtype
    assert torch_dtype(ModelConfig(path="model", device="cpu", dtype="float32")) == torch.float32


def test_arrays_return_as_they_were_sent() -> None:
    sent = np.array([1, 2**62, -3]), np.array([], dtype=np.int64), np.array([7])
    received = to_device(torch.device("cpu"), *sent)
    assert [tensor.dtype for tensor in received] == [torch.int64] * 3
    assert [tensor.tolist() for tensor in received] == [array.tolist() for array in sent]
    assert [array.tolist() for array in to_host(*received)] == [array.tolist() for array in sent]
