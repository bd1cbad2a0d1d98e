"""What vLLM loads by itself, in each of its processes, where tlt is installed (entry point `vllm.general_plugins`)."""

from __future__ import annotations

import os
from typing import Any

from tlt.vllm.versions import is_tested, vllm_version


def register() -> None:
    """Have the model runner V1 draw with our noise for requests that ask for it in `extra_args`, and no others. The
    runner V2 takes `--logits-processors tlt.vllm.processor:SharedNoise` instead; a vLLM that was not tested is left
    as it is."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    runs_v1 = current_platform.is_cpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
    if not runs_v1 or not is_tested(vllm_version() or ""):
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

    if not hasattr(GPUModelRunner._sample, "original"):
        GPUModelRunner._sample = _with_noise(GPUModelRunner._sample)


def _with_noise(original: Any) -> Any:
    def _sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        from tlt.vllm.runner_v1 import NoisySampling

        return NoisySampling(runner)(logits, spec_decode_metadata)  # from the next time on it is called itself

    _sample.original = original  # type: ignore[attr-defined]
    return _sample
