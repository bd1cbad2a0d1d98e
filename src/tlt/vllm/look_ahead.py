"""Look-ahead in vLLM: what an older target said to a request, as the draft of a `custom_class` proposer.

The old responses travel with the request. vLLM gives a proposer rows of tokens and no requests, so our V1 wrapper hands
it the runner. vLLM's runner V2 has no such proposers, and vLLM takes V1 where one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt.draft.ahead import AheadStore, Pointer
from tlt.types import Row
from tlt.vllm.noise import CHAINS, KEY


def chains_for(store: AheadStore, row: Row, vocab_size: int) -> list[bytes]:
    """What is known of a row's request and its siblings, its own first, int32; none unless its own is known."""
    group = store.group(row.request)
    known = bool(group) and group[0].seed == row.request.seed
    sound = known and all(ahead.tokens.min() >= 0 and ahead.tokens.max() < vocab_size for ahead in group)
    return [ahead.tokens.astype(np.int32).tobytes() for ahead in group] if sound else []


def rest_of(store: AheadStore, row: Row) -> list[int]:
    """Of the row's own old response, what is still to come."""
    group = store.group(row.request)
    known = bool(group) and group[0].seed == row.request.seed
    return Pointer([ahead.tokens for ahead in group], row.tokens).rest() if known else []


class LookAheadProposer:
    def __init__(self, vllm_config: Any) -> None:
        self.widest = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.runner: Any = None
        """of V1; our wrapper sets it"""
        self._rows: dict[str, _Followed] = {}

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """There is none."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """For each row what comes next in its old response. `token_ids_cpu` [rows, longest] holds its prompt and its
        response, `num_tokens_no_spec` [rows] tokens of them."""
        requests, drafts = self.runner.requests, []
        for place, name in enumerate(self.runner.input_batch.req_ids[: len(sampled_token_ids)]):
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = _Followed(requests[name])
            end = int(num_tokens_no_spec[place])
            ready = bool(sampled_token_ids[place]) and row.pointer is not None
            most = min(self.widest, self.longest - end, row.last - end - 1)  # the last token comes without a draft
            drafts.append(row.draft(token_ids_cpu[place], end, most) if ready else [])
        if len(self._rows) > 2 * len(drafts):
            self._rows = {name: row for name, row in self._rows.items() if name in requests}
        return drafts


class _Followed:
    """A request, and where it stands in what was said before."""

    def __init__(self, request: Any) -> None:
        ours = (request.sampling_params.extra_args or {}).get(KEY) or {}
        chains = [np.frombuffer(chain, dtype=np.int32) for chain in ours.get(CHAINS) or ()]
        self.pointer = Pointer(chains, ()) if chains else None
        self.end = ours.get("prompt_tokens", 0)
        self.last = len(request.prompt_token_ids) + request.sampling_params.max_tokens

    def draft(self, tokens: np.ndarray, end: int, most: int) -> list[int]:
        assert self.pointer is not None, "it has nothing to follow"
        self.pointer.advance(tokens[self.end : end].tolist())
        self.end = end
        return self.pointer.propose(max(0, min(self.pointer.left(), most)))
