"""Fixtures for vLLM's tests."""

from __future__ import annotations

import fake_vllm
import pytest


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[fake_vllm.LLM]:
    """Return the list of engines that were started instead of vLLM's."""
    return fake_vllm.install(monkeypatch)
