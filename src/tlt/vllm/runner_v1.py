"""Sampling with tlt's noise in vLLM's model runner V1. vLLM uses V1 on CPUs, and on GPUs if V2 lacks a feature.

V1 refuses logits processors together with speculative decoding (vllm#43672). So this module wraps the runner's
`_sample`, which receives the logits of all rows. A learned drafter samples with the noise too. For this, its methods
`set_inputs_first_pass` and `_greedy_sample` are replaced.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tlt.vllm.look_ahead import LookAheadProposer
from tlt.vllm.noise import Draw, NoiseTable
from tlt.vllm.versions import require_vllm

_SLOTS = 2  # slots per running request, because preempted requests keep theirs


class NoisySampling:
    """Wrapper of a runner's `_sample` that adds the noise to the logits before sampling."""

    def __init__(self, runner: Any) -> None:
        """Replace the runner's `_sample`. Give a look-ahead proposer the runner, or make a learned drafter draft with
        the noise. Raises VllmError if vLLM is not installed."""
        require_vllm()
        before = getattr(type(runner)._sample, "original", None)  # set if tlt's plugin wrapped it
        self.runner, self._sample = runner, MethodType(before, runner) if before else runner._sample
        slots = _SLOTS * runner.max_num_reqs
        self.table = NoiseTable(slots, runner.device)
        self._slots: dict[str, int] = {}
        self._free = list(range(slots))
        runner._sample = self
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, LookAheadProposer):
            drafter.runner = runner
        elif _drafts_greedily(drafter):
            NoisyDrafts(self, drafter)

    def __call__(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if logits is not None:
            logits = _widened(logits)
            self.table.apply(logits, *self._rows(spec_decode_metadata))
        return self._sample(logits, spec_decode_metadata)

    def _rows(self, drafts: Any) -> tuple[Tensor, Tensor]:
        """Return the slot and the input position of each row of logits, both [R], and count the draft tokens. Each
        request has a row for its last token and one for each draft token. `drafts` is vLLM's `spec_decode_metadata`;
        None in a pass without draft tokens."""
        runner, device = self.runner, self.runner.device
        held = self._held()
        slots = torch.tensor(held, device=device)
        if drafts is None:
            return slots, runner.positions[runner.query_start_loc.gpu[1 : len(slots) + 1].long() - 1]
        for slot, count in zip(held, drafts.num_draft_tokens, strict=True):
            self.table.drafted(slot, count)
        counts = torch.tensor(drafts.num_draft_tokens, device=device) + 1
        return slots.repeat_interleave(counts), runner.positions[drafts.logits_indices.long()]

    def slots(self) -> Tensor:
        """Return the slots [requests] of the current pass, in the order of its requests."""
        return torch.tensor(self._held(), device=self.runner.device)

    def _held(self) -> list[int]:
        return [self._slot(name) for name in self.runner.input_batch.req_ids]

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


def _drafts_greedily(drafter: Any) -> bool:
    """Return whether this is a learned drafter of vLLM that takes the argmax over the target's vocabulary, step by
    step."""
    others = ("use_local_argmax_reduction", "use_heterogeneous_vocab", "uses_mrope", "parallel_drafting")
    return hasattr(drafter, "_greedy_sample") and not any(getattr(drafter, name, False) for name in others)


class NoisyDrafts:
    """Wrapper that adds the noise to a learned drafter's logits.

    It uses the target's noise for the same position. This raises the acceptance rate, because drafter and target then
    draw the same token more often.
    """

    def __init__(self, sampling: NoisySampling, drafter: Any) -> None:
        self.sampling, self.drafter = sampling, drafter
        self._first_pass = drafter.set_inputs_first_pass
        self._positions: Tensor | None = None
        drafter.set_inputs_first_pass = self.first_pass
        drafter._greedy_sample = self.sample_draft

    def first_pass(self, *arguments: Any, **named: Any) -> Any:
        """Prepare the first draft step. Record the position of each draft token's input, which selects its noise.

        This position is the drafter's position + 1, because the drafter's inputs are shifted by one token.
        """
        found = self._first_pass(*arguments, **named)
        self._positions = self.drafter.positions[found[1]] + 1
        return found

    def sample_draft(self, hidden_states: Tensor) -> Tensor:
        """Return the draft tokens [requests] of one draft step."""
        logits, positions = self.drafter.model.compute_logits(hidden_states), self._positions
        if positions is None or len(positions) != len(logits):  # vLLM's dummy run at startup
            return logits.argmax(dim=-1)
        self._positions = positions + 1
        return self.sampling.table.add_noise(_widened(logits), self.sampling.slots(), positions).argmax(dim=-1)
