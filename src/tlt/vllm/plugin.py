"""Plugin that vLLM loads in each of its processes if tlt is installed (entry point `vllm.general_plugins`)."""

from __future__ import annotations

import os
from typing import Any

from tlt.vllm.settings import EXTENSION, PROCESSOR, is_tested, vllm_version


def register() -> None:
    """Wrap model runner V1, so that it samples with tlt's noise if a request has a `Draw` in its `extra_args`.

    Model runner V2 needs `--logits-processors tlt.vllm.processor:SharedNoise` instead. If this vLLM does not sample
    with tlt's noise, requests with a `Draw` are refused. A vLLM of an untested version is not changed.
    """
    if not is_tested(vllm_version() or ""):
        return
    from vllm.v1.engine.input_processor import InputProcessor  # type: ignore[import-not-found]

    _wrap(InputProcessor, "_validate_params", _refusing)
    if _wraps_v1():
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found]

        _wrap(GPUModelRunner, "_sample", _with_noise)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    """Replace a method by `wrapper(method)`, but only once, because vLLM may load its plugins several times in a
    process."""
    original = getattr(owner, name)
    if not hasattr(original, "original"):
        wrapped = wrapper(original)
        wrapped.original = original
        setattr(owner, name, wrapped)


def _refusing(original: Any) -> Any:
    """Return `_validate_params` with a check of the `Draw` in the `extra_args` of each new request.

    A ValueError here is returned to the client. Raised later, in the model runner, it would end the vLLM server.
    """

    def _validate_params(processor: Any, params: Any, *others: Any) -> Any:
        from tlt.vllm.noise import KEY, Draw

        if KEY in (getattr(params, "extra_args", None) or {}):
            Draw.of_params(params)
            if not _draws(processor.vllm_config):
                raise ValueError(
                    f"extra_args['{KEY}'] asks for tlt's noise, but this vLLM does not sample with it: start vLLM with "
                    f"--logits-processors {PROCESSOR}, or with VLLM_USE_V2_MODEL_RUNNER=0 in its environment"
                )
        return original(processor, params, *others)

    return _validate_params


def _draws(config: Any) -> bool:
    """Return whether a vLLM with this configuration samples with tlt's noise. Model runner V2 does so with tlt's logits
    processor, and V1 if this plugin or tlt's worker extension wraps it."""
    if config.use_v2_model_runner:
        given = config.model_config.logits_processors or ()
        return any(p == PROCESSOR or getattr(p, "__module__", "") == PROCESSOR.partition(":")[0] for p in given)
    return _wraps_v1() or config.parallel_config.worker_extension_cls == EXTENSION  # tlt's extension adds the noise


def _wraps_v1() -> bool:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    return current_platform.is_cpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"


def _with_noise(original: Any) -> Any:
    def _sample(runner: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        from tlt.vllm.worker_extension import NoisySampling

        return NoisySampling(runner)(logits, spec_decode_metadata)  # this replaces runner._sample, so it runs once

    return _sample
