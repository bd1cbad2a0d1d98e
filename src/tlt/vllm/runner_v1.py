"""The noise for vLLM's model runner V1 (CPUs, and GPUs where V2 lacks something), which refuses logits processors where
it speculates (vllm#43672). One method of the runner is wrapped: `_sample`, which is given the logits of all rows. So
that a learned drafter guesses with the noise too, so are two of it: the one that says where it begins, and the one that
takes its likeliest tokens."""

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
        drafter = getattr(runner, "drafter", None)
        if isinstance(drafter, LookAheadProposer):
            drafter.runner = runner
        elif _guesses_greedily(drafter):
            NoisyGuesses(self, drafter)

    def __call__(self, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if logits is not None:
            logits = _widened(logits)
            self.table.apply(logits, *self._rows(spec_decode_metadata))
        return self._sample(logits, spec_decode_metadata)

    def _rows(self, drafts: Any) -> tuple[Tensor, Tensor]:
        """Slot and input position of each row of logits: a request's last token, and each token of its draft."""
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
        """Of the requests of a pass, in its order."""
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
            draw = Draw.of_params(params)
            before = len(request.prompt_token_ids) - draw.prompt_tokens if draw else 0
            self.table.add(slot, draw, before + params.max_tokens)
            self._slots[name] = slot
        return self._slots[name]


def _widened(logits: Tensor) -> Tensor:
    """In bfloat16 scores would be rounded, and the nearest of them tie."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _guesses_greedily(drafter: Any) -> bool:
    """One of vLLM's learned ones that takes the argmax of logits over our vocabulary, a step after the other."""
    others = ("use_local_argmax_reduction", "use_heterogeneous_vocab", "uses_mrope", "parallel_drafting")
    return hasattr(drafter, "_greedy_sample") and not any(getattr(drafter, name, False) for name in others)


class NoisyGuesses:
    """Puts the noise on a learned drafter's logits: with that of its position it guesses the target's very sample."""

    def __init__(self, sampling: NoisySampling, drafter: Any) -> None:
        self.sampling, self.drafter = sampling, drafter
        self._first_pass = drafter.set_inputs_first_pass
        self._positions: Tensor | None = None
        drafter.set_inputs_first_pass = self.first_pass
        drafter._greedy_sample = self.guess

    def first_pass(self, *arguments: Any, **named: Any) -> Any:
        """The last token that the target has been at stands there; the drafter was given the one behind it."""
        found = self._first_pass(*arguments, **named)
        self._positions = self.drafter.positions[found[1]] + 1
        return found

    def guess(self, hidden_states: Tensor) -> Tensor:
        """[requests] its guesses of one step."""
        logits, positions = self.drafter.model.compute_logits(hidden_states), self._positions
        if positions is None or len(positions) != len(logits):  # vLLM tries it out at its start
            return logits.argmax(dim=-1)
        self._positions = positions + 1
        return self.sampling.table.guess(_widened(logits), self.sampling.slots(), positions).argmax(dim=-1)
