"""vLLM's two model runners as far as our noise sees them, by their documented interfaces, over a model of our own.

Both decode greedily and verify drafts greedily, as vLLM does: they know nothing of noise. Requests come and go, slots
are used again, rows of one request lie together and requests in any order, and drafts are made up.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tlt.fidelity.oracle import last_logits
from tlt.models.decoder import Decoder
from tlt.types import Request

CPU = torch.device("cpu")


class LogitsProcessor:
    """Of vllm.v1.worker.gpu.sample.logits_processor, as documented there."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None: ...

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None: ...

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        return True

    def apply_staged_writes(self) -> None: ...

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        raise NotImplementedError


def modules() -> dict[str, ModuleType]:
    """For sys.modules, where vLLM is not installed."""
    leaf = "vllm.v1.worker.gpu.sample.logits_processor"
    names = [leaf[:end] for end in range(len(leaf) + 1) if leaf[:end] == leaf or leaf[end : end + 1] == "."]
    found = {name: ModuleType(name) for name in names if name not in sys.modules}
    found[leaf].LogitsProcessor = LogitsProcessor  # type: ignore[attr-defined]
    return found


class Runner:
    """A request is decoded in a slot; `draft` makes up what may follow it. Subclasses put the noise on the logits."""

    def __init__(self, target: Decoder, slots: int, seed: int = 0) -> None:
        self.target, self.slots, self.rng = target, slots, random.Random(seed)
        self.free = list(range(slots))
        self.live: dict[str, SimpleNamespace] = {}

    def add(self, name: str, request: Request, params: Any, tokens: Sequence[int] = ()) -> None:
        prompt = [*request.prompt.token_ids, *tokens]
        slot = self.free.pop(self.rng.randrange(len(self.free)))
        self.live[name] = SimpleNamespace(slot=slot, prompt=prompt, tokens=[], params=params, request=request)
        self.joined(name)

    def remove(self, name: str) -> list[int]:
        row = self.live.pop(name)
        self.free.append(row.slot)
        return row.tokens

    @torch.inference_mode()
    def step(self, guesses: dict[str, Sequence[int]]) -> None:
        """One pass over all; a draft is kept as far as it is what greedy decoding says, and one token more."""
        names = list(self.live)
        self.rng.shuffle(names)
        rows = [self.live[name] for name in names]
        drafts = [list(guesses.get(name, ())) for name in names]
        contexts = [
            [*row.prompt, *row.tokens, *draft[:count]]
            for row, draft in zip(rows, drafts, strict=True)
            for count in range(len(draft) + 1)
        ]
        scores = self.sample(names, drafts, last_logits(self.target, contexts), contexts)
        best = iter(scores.argmax(-1).tolist())
        for row, draft in zip(rows, drafts, strict=True):
            said = [next(best) for _ in range(len(draft) + 1)]
            right = next((i for i, token in enumerate(draft) if token != said[i]), len(draft))
            row.tokens += said[: right + 1]

    def joined(self, name: str) -> None:
        raise NotImplementedError

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        raise NotImplementedError


class RunnerV2(Runner):
    def __init__(self, target: Decoder, slots: int, processor: type, seed: int = 0) -> None:
        super().__init__(target, slots, seed)
        self.prompt_len = SimpleNamespace(np=[0] * slots)
        states = SimpleNamespace(device=CPU, max_num_reqs=slots, prompt_len=self.prompt_len)
        self.processor = processor(None, states)

    def joined(self, name: str) -> None:
        row = self.live[name]
        self.prompt_len.np[row.slot] = len(row.prompt)
        self.processor.validate_params(row.params)
        self.processor.add_request(row.slot, row.params)

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        slots = [self.live[name].slot for name, draft in zip(names, drafts, strict=True) for _ in range(len(draft) + 1)]
        positions = torch.tensor([len(context) - 1 for context in contexts])
        self.processor.apply_staged_writes()
        return self.processor.apply(
            logits, SimpleNamespace(expanded_idx_mapping=torch.tensor(slots), pos=positions, expanded_local_pos=None)
        )


class RunnerV1(Runner):
    """`positions` and `query_start_loc` are of all tokens of a pass, as there: here each context is fed whole."""

    def __init__(self, target: Decoder, slots: int, seed: int = 0) -> None:
        super().__init__(target, slots, seed)
        self.device, self.max_num_reqs = CPU, slots
        self.requests: dict[str, Any] = {}

    def joined(self, name: str) -> None:
        row = self.live[name]
        self.requests[name] = SimpleNamespace(prompt_token_ids=row.prompt, sampling_params=row.params)

    def remove(self, name: str) -> list[int]:
        del self.requests[name]
        return super().remove(name)

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: Any) -> torch.Tensor:
        return logits

    def sample(self, names: list[str], drafts: list[list[int]], logits: torch.Tensor, contexts: Any) -> torch.Tensor:
        fed = [[*self.live[n].prompt, *self.live[n].tokens, *draft] for n, draft in zip(names, drafts, strict=True)]
        ends = torch.tensor([len(tokens) for tokens in fed]).cumsum(0)
        self.input_batch = SimpleNamespace(req_ids=names)
        self.positions = torch.cat([torch.arange(len(tokens)) for tokens in fed])
        self.query_start_loc = SimpleNamespace(gpu=torch.cat([torch.zeros(1, dtype=torch.int32), ends.int()]))
        metadata = None
        if any(drafts):
            counts = [len(draft) for draft in drafts]
            rows = [end - count - 1 + i for end, count in zip(ends, counts, strict=True) for i in range(count + 1)]
            metadata = SimpleNamespace(num_draft_tokens=counts, logits_indices=torch.stack(rows))
        return self._sample(logits, metadata)
