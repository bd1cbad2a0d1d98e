"""The device of a model."""

from __future__ import annotations

import os

import pytest

from tlt.config import ModelConfig
from tlt.models.device import torch_device


def test_cublas_is_configured_before_its_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.9 reads the variable only once, and without it refuses every product of a deterministic update."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch_device(ModelConfig(path="model", device="cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch_device(ModelConfig(path="model", device="cpu"))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
