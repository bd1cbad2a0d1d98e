"""Messages if vLLM is missing, or if its version was not tested."""

from __future__ import annotations

import pytest

from tlt.vllm import settings
from tlt.vllm.settings import VllmError, is_tested, require_vllm


def test_a_missing_vllm_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "vllm_version", lambda: None)
    with pytest.raises(VllmError, match=r"needs vLLM 0\.31 or 0\.32: pip install 'tlt-rl\[vllm\]'"):
        require_vllm()


def test_an_untested_version_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for found in ("0.31.0", "0.32", "0.32.0", "0.32.1+cpu", "0.30.0", "0.33.0", "0.320.1", "1.0", "unknown"):
        monkeypatch.setattr(settings, "vllm_version", lambda found=found: found)
        require_vllm()
        assert (f"tlt is not tested with vLLM {found} (tested: 0.31 or 0.32)" in caplog.text) != is_tested(found)
    assert caplog.text.count("is not tested") == 5
