"""Sampling with tlt's noise in vLLM's model runner V1. vLLM uses V1 on CPUs, and on GPUs if V2 lacks a feature.

V1 refuses logits processors together with speculative decoding (vllm#43672). So this module wraps the runner's
`_sample`, which receives the logits of all rows.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tlt.sampling import has_kernel
from tlt.vllm.noise import Draw, NoiseTable
from tlt.vllm.proposer import Proposer
from tlt.vllm.versions import require_vllm

_SLOTS = 2  # slots per running request, because preempted requests keep theirs


class NoisySampling:
    """Wrapper of a runner's `_sample` that adds the noise to the logits before sampling."""

    def __init__(self, runner: Any) -> None:
        """Replace the runner's `_sample`, and attach tlt's proposer if it has one. Raises VllmError if vLLM is not
        installed."""
        require_vllm()
        before = getattr(type(runner)._sample, "original", None)  # set if tlt's plugin wrapped it
        self.runner, self._sample = runner, MethodType(before, runner) if before else runner._sample
        slots = _SLOTS * runner.max_num_reqs
        self.table = NoiseTable(slots, runner.device)
        self._slots: dict[str, int] = {}
        self._free = list(range(slots))
        runner._sample = self
        if isinstance(drafter := getattr(runner, "drafter", None), Proposer):
            drafter.attach(runner)

    def __call__(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        drafts = spec_decode_metadata
        if drafts is not None and not any(drafts.num_draft_tokens):
            drafts = None  # vLLM's sampler takes less time than its verification of drafts
        if logits is not None:
            logits = _widened(logits)
            self.table.apply(logits, *self._rows(drafts), self._noise(drafts))
        return self._sample(logits, drafts)

    def _rows(self, drafts: Any) -> tuple[Tensor, Tensor]:
        """Return the slot and the input position of each row of logits, both [R]. Each request has a row for its last
        token and one for each draft token. `drafts` is vLLM's `spec_decode_metadata`; None in a pass without draft
        tokens."""
        runner, device = self.runner, self.runner.device
        slots = torch.tensor([self._slot(name) for name in runner.input_batch.req_ids], device=device)
        if drafts is None:
            return slots, runner.positions[runner.query_start_loc.gpu[1 : len(slots) + 1].long() - 1]
        counts = torch.tensor(drafts.num_draft_tokens, device=device) + 1
        return slots.repeat_interleave(counts), runner.positions[drafts.logits_indices.long()]

    def _noise(self, drafts: Any) -> Tensor | None:
        """Return the noise of all rows of logits if the drafters have computed it. Devices with a kernel for the noise
        compute it again, which is faster."""
        proposer = getattr(self.runner, "drafter", None)
        if (
            drafts is None
            or not isinstance(proposer, Proposer)
            or proposer.drafting is None
            or has_kernel(self.runner.device)
        ):
            return None
        return proposer.drafting.noise(self.runner.input_batch.req_ids, drafts.num_draft_tokens)

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            gone = [other for other in self._slots if other not in self.runner.requests] if not self._free else []
            for other in gone:
                slot = self._slots.pop(other)
                self.table.leave(slot)
                self._free.append(slot)
            request = self.runner.requests[name]
            params, slot = request.sampling_params, self._free.pop()
            self.table.add(slot, Draw.of_params(params), len(request.prompt_token_ids or ()) + params.max_tokens)
            self._slots[name] = slot
        return self._slots[name]


def _widened(logits: Tensor) -> Tensor:
    """Return logits in float32 or wider, because rounding to bfloat16 would make close scores equal."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
