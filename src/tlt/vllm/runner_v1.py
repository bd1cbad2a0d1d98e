"""The noise for vLLM's model runner V1 (CPUs, and GPUs where V2 lacks something), which refuses logits processors where
it speculates (vllm#43672). One method of one runner is wrapped: `_sample`, which is given the logits of all rows."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tlt.vllm.look_ahead import LookAheadProposer
from tlt.vllm.noise import Draw, NoiseTable
from tlt.vllm.versions import require_vllm

_SLOTS = 2  # times the requests that run at once: one that was preempted keeps its own


class NoisySampling:
    """Puts the noise on the logits of a runner before it samples from them."""

    def __init__(self, runner: Any) -> None:
        """Raises VllmError for a version whose runner was not tested."""
        require_vllm()
        before = getattr(type(runner)._sample, "original", None)  # where our plugin has been
        self.runner, self._sample = runner, MethodType(before, runner) if before else runner._sample
        slots = _SLOTS * runner.max_num_reqs
        self.table = NoiseTable(slots, runner.device)
        self._slots: dict[str, int] = {}
        self._free = list(range(slots))
        runner._sample = self
        if isinstance(getattr(runner, "drafter", None), LookAheadProposer):
            runner.drafter.runner = runner

    def __call__(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if logits is not None:
            self.table.apply(logits, *self._rows(spec_decode_metadata))
        return self._sample(logits, spec_decode_metadata)

    def _rows(self, drafts: Any) -> tuple[Tensor, Tensor]:
        """Slot and input position of each row of logits: a request's last token, and each token of its draft."""
        runner, device = self.runner, self.runner.device
        held = [self._slot(name) for name in runner.input_batch.req_ids]
        slots = torch.tensor(held, device=device)
        if drafts is None:
            return slots, runner.positions[runner.query_start_loc.gpu[1 : len(slots) + 1].long() - 1]
        for slot, count in zip(held, drafts.num_draft_tokens, strict=True):
            self.table.drafted(slot, count)
        counts = torch.tensor(drafts.num_draft_tokens, device=device) + 1
        return slots.repeat_interleave(counts), runner.positions[drafts.logits_indices.long()]

    def _slot(self, name: str) -> int:
        if name not in self._slots:
            gone = [other for other in self._slots if other not in self.runner.requests] if not self._free else []
            for other in gone:
                slot = self._slots.pop(other)
                self.table.leave(slot)
                self._free.append(slot)
            request = self.runner.requests[name]
            params, slot = request.sampling_params, self._free.pop()
            draw = Draw.of(params.extra_args)
            before = len(request.prompt_token_ids) - draw.prompt_tokens if draw else 0
            self.table.add(slot, draw, before + params.max_tokens)
            self._slots[name] = slot
        return self._slots[name]
