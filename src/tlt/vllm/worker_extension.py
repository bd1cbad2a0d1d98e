"""tlt in a worker of vLLM: sampling with tlt's noise in model runner V1, and methods that vLLM adds to its worker class
(`worker_extension_cls`) and that are called by `collective_rpc`.

vLLM uses V1 on CPUs, and on GPUs if V2 lacks a feature. V1 refuses logits processors together with speculative decoding
(vllm#43672). So this module wraps the runner's `_sample`, which receives the logits of all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tlt.draft.ahead import Ahead
from tlt.sampling import has_kernel
from tlt.types import Prompt, Reply, Request, SamplingParams
from tlt.vllm.drafting import Decoded, DraftedRow, Drafting, Passed
from tlt.vllm.noise import Draw, NoiseTable
from tlt.vllm.settings import require_vllm

_SLOTS = 2  # slots per running request, because preempted requests keep theirs


class Proposer:
    """Draft proposer. `drafting` has the drafters and the rows; without it there are no drafts."""

    def __init__(self, vllm_config: Any) -> None:
        self.drafting: Drafting | None = None
        self.runner: Any = None

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Do nothing, because the drafters are made elsewhere."""

    def attach(self, runner: Any) -> None:
        """Let the model runner V1 call `draft`."""
        self.runner = runner
        runner.propose_draft_token_ids = self.draft
        runner.effective_drafter_max_model_len = sys.maxsize  # else vLLM drafts token 0 near the maximum length

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *arguments: Any, **named: Any) -> list[list[int]]:
        """Return no drafts. vLLM calls this method in a runner without `attach`."""
        return [[] for _ in sampled_token_ids]

    def draft(
        self,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        sampling_metadata: Any,
        hidden_states: Tensor,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        *others: Any,
    ) -> list[Sequence[int]]:
        """Return the draft tokens of each row of vLLM's batch. A row without a token in `sampled_token_ids` has not
        completed its prompt."""
        if self.drafting is None:
            return [[] for _ in sampled_token_ids]
        batch, drafting = self.runner.input_batch, self.drafting
        names = batch.req_ids[: len(sampled_token_ids)]
        counts = spec_decode_metadata.num_draft_tokens if spec_decode_metadata else [0] * len(names)
        starts, first = self.runner.query_start_loc.np.tolist(), batch.num_computed_tokens_cpu.tolist()
        parts = []
        for at, (name, sampled) in enumerate(zip(names, sampled_token_ids, strict=True)):
            if sampled and (row := self._row(name)):
                length = starts[at + 1] - starts[at]
                parts.append(Passed(row, first[at], starts[at], length, counts[at], sampled))
        drafts = drafting.round(parts, hidden_states, others=len(parts) < len(names))
        if len(drafting.known) > 2 * len(names):
            drafting.known = {name: row for name, row in drafting.known.items() if name in self.runner.requests}
        return [drafts.get(name, ()) for name in names]

    def _row(self, name: str) -> DraftedRow | None:
        """Return the row of a request; None if it does not ask for tlt's noise."""
        known, request = self.drafting.known if self.drafting else {}, self.runner.requests[name]
        if name not in known and (draw := Draw.of_params(request.sampling_params)):
            known[name] = drafted_row(name, request, draw)
        return known.get(name)


def drafted_row(name: str, request: Any, draw: Draw) -> DraftedRow:
    """Return the row of vLLM's `CachedRequestState`, as it was when the request arrived."""
    params, tokens = request.sampling_params, request.prompt_token_ids
    prompt, had = tuple(tokens[: draw.prompt_tokens]), tokens[draw.prompt_tokens :]
    sampling = SamplingParams(
        temperature=draw.temperature,
        top_k=draw.top_k,
        top_p=draw.top_p,
        max_new_tokens=len(had) + params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids or ()),
    )
    asked = Request(Prompt(draw.prompt_id, "", prompt), draw.index, draw.epoch, draw.seed, sampling)
    row = DraftedRow(asked, list(had), ahead=draw.ahead, name=name, key=draw.key)
    if draw.turn:  # hidden states of earlier turns are not training data
        row.replies, row.harvested = [Reply(0, draw.turn, "")], len(prompt) + draw.turn - 1
    return row


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
