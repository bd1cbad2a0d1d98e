"""The deterministic settings of PyTorch are restored, because a process of TRL, for example, has its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tlt.config import ConfigError
from tlt.rl.passes import deterministic


def settings() -> tuple[bool, bool, bool]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return enabled, warns, torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _settings_are_restored() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize(("mode", "warns"), [(False, False), (True, False), (True, True)])
def test_the_settings_of_the_process_are_restored(mode: bool, warns: bool, enabled: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=warns)
    before = settings()
    with pytest.raises(KeyError), deterministic(enabled):  # noqa: PT012
        # attention has a fixed order only if PyTorch may raise
        assert settings() == ((True, False, False) if enabled else before)
        raise KeyError
    assert settings() == before


def test_an_operation_without_a_fixed_order_names_the_remedy() -> None:
    said = "put_ does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'."
    with pytest.raises(ConfigError, match=r"put_ does not.*set train\.deterministic = false"), deterministic(True):
        raise RuntimeError(said)
    for enabled, other in ((False, said), (True, "the wrong shape")):
        with pytest.raises(RuntimeError, match=other[:9]) as raised, deterministic(enabled):
            raise RuntimeError(other)
        assert not isinstance(raised.value, ConfigError)
