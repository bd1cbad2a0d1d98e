"""Methods that vLLM adds to its worker class (`worker_extension_cls`) and that are called by `collective_rpc`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tlt.vllm.noise import Drawn, NoiseTable
from tlt.vllm.runner_v1 import NoisySampling


class WorkerExtension:
    model_runner: Any
    _tlt_table: NoiseTable

    def tlt_begin(self) -> None:
        """Make the runner sample with tlt's noise. Call it once, after the model is loaded."""
        processors = getattr(getattr(self.model_runner, "sampler", None), "logits_processors", ())
        tables = [processor.table for processor in processors if hasattr(processor, "table")]
        self._tlt_table = tables[0] if tables else NoisySampling(self.model_runner).table

    def tlt_load(self, weights: Mapping[str, Tensor]) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))

    def tlt_load_drafter(self, weights: Mapping[str, Tensor]) -> None:
        from vllm.model_executor.model_loader.reload import inplace  # type: ignore[import-not-found]

        drafter = getattr(self.model_runner, "drafter", None) or self.model_runner.speculator
        config = drafter.vllm_config
        inplace.reload_weights(config, drafter.model, iter(weights.items()), None, is_checkpoint_format=True)

    def tlt_take(self, wanted: Mapping[int, tuple[int, int]]) -> dict[int, Drawn]:
        return self._tlt_table.take(wanted)

    def tlt_forget(self) -> None:
        self._tlt_table.forget()

    def tlt_distribution(self) -> Tensor:
        return self._tlt_table.take_distribution()
