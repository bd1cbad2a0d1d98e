"""Logits processor for vLLM's model runner V2, which calls it for all rows of logits, including those of draft tokens.

If vLLM is started with `--logits-processors tlt.vllm.processor:SharedNoise`, it samples each request that has a `Draw`
in its `extra_args` with tlt's noise.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor  # type: ignore[import-not-found]

from tlt.vllm.noise import Draw, NoiseTable


class SharedNoise(LogitsProcessor):
    """Logits processor that makes vLLM sample with tlt's noise. For each request with a `Draw` in its `extra_args`, the
    logits are replaced by log p + Gumbel noise, of which vLLM takes the argmax."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.req_states = req_states
        self.table = NoiseTable(req_states.max_num_reqs, req_states.device)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for an invalid `Draw` in `extra_args`, or for a `Draw` with a temperature other than 0."""
        Draw.of_params(sampling_params)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        draw = Draw.of(sampling_params.extra_args)
        return self.table.add(req_idx, draw, int(self.req_states.prompt_len.np[req_idx]) + sampling_params.max_tokens)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        return self.table.apply(logits, ctx.expanded_idx_mapping, ctx.pos)
