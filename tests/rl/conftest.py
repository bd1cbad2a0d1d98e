"""Models of the tests in this folder. Their vocabulary has 31 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import save_weights


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_weights(tmp_path_factory.mktemp("model"), 31, scale=0.3)


@pytest.fixture(scope="session")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of another model, from which training started."""
    return save_weights(tmp_path_factory.mktemp("starting"), 31, seed=1, scale=0.3)
