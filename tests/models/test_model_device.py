"""The device of a model."""

from __future__ import annotations

import os

import pytest
import torch

from tlt.config import ModelConfig
from tlt.models import device
from tlt.models.device import torch_device, torch_dtype


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
