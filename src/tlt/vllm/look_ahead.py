"""Look-ahead in vLLM: a `custom_class` proposer whose drafts are responses of an older target to the same request.

The old responses are sent with the request. vLLM gives a proposer the rows of tokens, but not their requests. So
`runner_v1.py` gives it the model runner, which has the requests. Model runner V2 does not support such proposers, so
vLLM uses V1 if one is configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt.draft.ahead import AheadStore, Pointer
from tlt.types import Row
from tlt.vllm.noise import CHAINS, KEY


def chains_for(store: AheadStore, row: Row, vocab_size: int) -> list[bytes]:
    """Return the look-ahead drafts of a row's request and of the other requests in its group, each as int32 bytes. The
    draft of the request itself comes first.

    The list is empty if the request itself has no draft, or if a token is outside the vocabulary.
    """
    group = store.group(row.request)
    known = bool(group) and group[0].seed == row.request.seed
    sound = known and all(ahead.is_valid(vocab_size) for ahead in group)
    return [ahead.tokens.astype(np.int32).tobytes() for ahead in group] if sound else []


class LookAheadProposer:
    """Draft proposer for vLLM's speculative method `custom_class`. It proposes the next tokens of a look-ahead draft:
    the response of an older target version to the same request, or to another request of its group."""

    def __init__(self, vllm_config: Any) -> None:
        self.widest = vllm_config.speculative_config.num_speculative_tokens
        self.longest = vllm_config.model_config.max_model_len
        self.runner: Any = None
        """V1 model runner, set by `NoisySampling`"""
        self._rows: dict[str, _Followed] = {}

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """Do nothing, because this proposer has no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return the next tokens of each row's look-ahead draft. A row gets none if it has no draft, or if its list in
        `sampled_token_ids` is empty. `token_ids_cpu` [rows, longest] holds prompt and response, and
        `num_tokens_no_spec` [rows] their number of tokens."""
        requests, drafts = self.runner.requests, []
        for place, name in enumerate(self.runner.input_batch.req_ids[: len(sampled_token_ids)]):
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = _Followed(requests[name])
            end = int(num_tokens_no_spec[place])
            ready = bool(sampled_token_ids[place]) and row.pointer is not None
            most = min(self.widest, self.longest - end, row.last - end - 1)  # the last token needs no draft
            drafts.append(row.draft(token_ids_cpu[place], end, most) if ready else [])
        if len(self._rows) > 2 * len(drafts):
            self._rows = {name: row for name, row in self._rows.items() if name in requests}
        return drafts


class _Followed:
    """Request of vLLM, with its current position in its look-ahead drafts."""

    def __init__(self, request: Any) -> None:
        ours = (request.sampling_params.extra_args or {}).get(KEY) or {}
        chains = [np.frombuffer(chain, dtype=np.int32) for chain in ours.get(CHAINS) or ()]
        self.pointer = Pointer(chains, ()) if chains else None
        self.end = ours.get("prompt_tokens", 0)
        self.last = len(request.prompt_token_ids) + request.sampling_params.max_tokens

    def draft(self, tokens: np.ndarray, end: int, most: int) -> list[int]:
        assert self.pointer is not None, "the request has no look-ahead draft"
        self.pointer.advance(tokens[self.end : end].tolist())
        self.end = end
        return self.pointer.propose(max(0, min(self.pointer.left(), most)))
