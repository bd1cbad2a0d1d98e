"""Messages if vLLM is missing, or if its version was not tested."""

from __future__ import annotations

import pytest

from tlt.vllm import versions
from tlt.vllm.versions import VllmError, is_tested, require_vllm


def test_a_missing_vllm_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: None)
    with pytest.raises(VllmError, match=r"needs vLLM 0\.31 or 0\.32: pip install 'tlt-rl\[vllm\]'"):
        require_vllm()


@pytest.mark.parametrize("found", ["0.30.0", "0.33.0", "0.320.1", "1.0", "unknown"])
def test_an_untested_version_is_logged(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: found)
    require_vllm()
    assert f"vLLM {found} is not tested with tlt (tested: 0.31 or 0.32)" in caplog.text


@pytest.mark.parametrize("found", ["0.31.0", "0.32", "0.32.0", "0.32.1+cpu"])
def test_tested_versions_are_accepted(
    found: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_tested(found)
    monkeypatch.setattr(versions, "vllm_version", lambda: found)
    require_vllm()
    assert not caplog.text
