"""Methods that vLLM adds to its worker class (`worker_extension_cls`) and that are called by `collective_rpc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tlt.draft.ahead import Ahead
from tlt.vllm.drafting import Decoded, Drafting
from tlt.vllm.noise import NoiseTable
from tlt.vllm.runner_v1 import NoisySampling


class WorkerExtension:
    model_runner: Any
    rank: int
    _tlt_table: NoiseTable
    _tlt_drafting: Drafting | None

    def tlt_begin(self) -> None:
        """Make the runner sample with tlt's noise. Call it once, after the model is loaded."""
        processors = getattr(getattr(self.model_runner, "sampler", None), "logits_processors", ())
        tables = [processor.table for processor in processors if hasattr(processor, "table")]
        self._tlt_drafting = None
        self._tlt_table = tables[0] if tables else NoisySampling(self.model_runner).table

    def tlt_load(self, weights: Mapping[str, Tensor]) -> None:
        self.model_runner.reload_weights(weights_iterator=iter(weights.items()))

    def tlt_start(self, drafting: Drafting | None) -> None:
        """Forget all requests, and draft with these drafters in this rollout. vLLM takes the drafts of rank 0."""
        self._tlt_table.forget()
        self._tlt_drafting = drafting if self.rank == 0 else None
        if drafting:
            drafting.begin()
            self.model_runner.drafter.drafting = self._tlt_drafting

    def tlt_drafts(self, found: Sequence[Ahead]) -> None:
        """Store old responses to a prompt."""
        if self._tlt_drafting:
            self._tlt_drafting.store.put(found)

    def tlt_take(self, wanted: Mapping[int, tuple[int, int]]) -> tuple[dict[int, list[list[float]]], Decoded | None]:
        """Return the log-probs of requests (`NoiseTable.take`), and what their passes gave."""
        return self._tlt_table.take(wanted), self._tlt_drafting.take(wanted) if self._tlt_drafting else None

    def tlt_distribution(self) -> Tensor:
        return self._tlt_table.take_distribution()
