"""Proposer for vLLM's speculative method `custom_class`, on its model runner V1. It drafts with tlt's drafters.

vLLM gives such a proposer the tokens of its rows, but neither their requests nor the hidden states of the pass. So
`attach` replaces the runner's method that calls the proposer. Model runner V2 has no custom proposers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tlt.types import Prompt, Reply, Request, SamplingParams
from tlt.vllm.drafting import DraftedRow, Drafting, Passed
from tlt.vllm.noise import Draw


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
