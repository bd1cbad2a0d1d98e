"""The target as its own drafter: every token it drafts must be accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tlt.config import EngineConfig
from tlt.draft.drafter import Node, NodeDrafter, Offer
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.laws import law_of
from tlt.engine.tuner import Fixed
from tlt.models.causal import causal_hidden
from tlt.models.decoder import Decoder
from tlt.sampling import log_law
from tlt.types import Prompt, Request, SamplingParams

_LAWS = ((1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 20, 0.9), (0.6, 20, 0.9))  # temperature, top_k, top_p
_TOKENS, _ROWS, _DEPTH = 48, 4, 3


class OracleDrafter(NodeDrafter):
    """The target itself, computed without engine or cache: each node's whole context in one causal pass."""

    name = "oracle"

    def __init__(self, target: Decoder) -> None:
        self.target = target

    def propose(self, nodes: Sequence[Node]) -> Offer:
        contexts = [[*node.request.prompt.token_ids, *node.committed, *node.path] for node in nodes]
        law = law_of([node.request.sampling for node in nodes], self.target.device)
        return Offer(None, log_law(last_logits(self.target, contexts), law)[0])


def last_logits(target: Decoder, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Logits [M, V] after each context, by plain causal attention over right-padded rows."""
    width = max(len(c) for c in contexts)
    tokens = torch.tensor([[*c, *[0] * (width - len(c))] for c in contexts], device=target.device)
    last = torch.tensor([len(c) - 1 for c in contexts], device=target.device)
    return target.logits(causal_hidden(target, tokens)[torch.arange(len(contexts), device=target.device), last])


def oracle_checks(
    target: Decoder, config: EngineConfig, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[dict[str, Any]]:
    """What it drafted and what was accepted, by law. In float64, whatever the dtype of the runs: only there must the
    draft's every token be accepted."""
    checks = []
    for temperature, top_k, top_p in _LAWS:
        params = replace(
            sampling,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            max_new_tokens=_TOKENS,
            stop_token_ids=(),
            stop_strings=(),
        )
        rows = min(_ROWS, len(prompts))
        requests = [Request(prompts[i], 0, 0, 1000 + i, params) for i in range(rows)]
        chain = Strategy("oracle", _DEPTH, 1, _DEPTH + 1)
        # nothing stops early, so all rows are admitted and outgrow the cache later: what comes back must agree as well
        longest = max(len(request.prompt.token_ids) for request in requests)
        bound = max(rows * (longest + 36), longest + _TOKENS + 32)
        engine = Engine(target, config, [OracleDrafter(target)], Fixed(chain), kv_tokens=bound)
        for _ in engine.generate(requests):
            pass
        stats = engine.stats
        law = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        counts = {"drafted": stats.drafted, "accepted": stats.accepted, "preemptions": stats.preemptions}
        checks.append(law | counts)
    return checks
