"""Oracle checks: the target is its own drafter or its own look-ahead. Every draft token must be accepted.

`causal_hidden` is the reference for the engine and its cache: causal attention over whole rows, without a cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tlt.attention.key_counts import BLOCK
from tlt.config import Config, EngineConfig
from tlt.draft.ahead import AheadStore
from tlt.draft.drafter import Drafter, Offer, Prefix, PrefixDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.sampling_table import sampling_tensors
from tlt.engine.tuner import Fixed
from tlt.models.decoder import Decoder
from tlt.models.device import torch_dtype
from tlt.models.loading import make_target
from tlt.sampling import gumbel_noise, sampling_log_probs
from tlt.types import Prompt, Request, Response, SamplingParams

_DISTRIBUTIONS = ((1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 20, 0.9), (0.6, 20, 0.9))  # temperature, top_k, top_p
_TOKENS, _ROWS, _DEPTH, _AHEAD = 48, 4, 3, 16


def causal_hidden(target: Decoder, tokens: Tensor) -> Tensor:
    """Return hidden states [R, W, D] after the final norm, for tokens [R, W]: R rows, which may be right-padded."""
    options, (rows, width) = target.options, tokens.shape
    share = options.num_heads // options.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        query, key, value = (x.unflatten(0, (rows, width)).transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(share, dim=1) for x in (key, value))
        scores = query @ key.transpose(2, 3) * options.head_dim**-0.5
        causal = torch.ones(width, width, dtype=torch.bool, device=target.device).tril().triu(1 - (window or width))
        weights = torch.softmax(scores.masked_fill(~causal, -math.inf), dim=-1)
        return (weights @ value).transpose(1, 2).reshape(rows * width, -1)

    return target.forward(tokens, torch.arange(width, device=target.device).expand_as(tokens), attend)


class OracleDrafter(PrefixDrafter):
    """Drafter whose distributions are those of the target itself, computed without engine or KV cache: one causal pass
    over the whole context of each row."""

    name = "oracle"

    def __init__(self, target: Decoder) -> None:
        self.target = target

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        contexts = [[*p.request.prompt.token_ids, *p.committed, *p.drafted] for p in prefixes]
        sampling = sampling_tensors([p.request.sampling for p in prefixes], self.target.device)
        return Offer(None, sampling_log_probs(last_logits(self.target, contexts), sampling)[0])


def last_logits(target: Decoder, contexts: Sequence[Sequence[int]]) -> Tensor:
    """Return logits [M, V] after each context, by plain causal attention over right-padded rows."""
    width = max(len(c) for c in contexts)
    tokens = torch.tensor([[*c, *[0] * (width - len(c))] for c in contexts], device=target.device)
    last = torch.tensor([len(c) - 1 for c in contexts], device=target.device)
    return target.logits(causal_hidden(target, tokens)[torch.arange(len(contexts), device=target.device), last])


def oracle_checks(
    target: Decoder, config: EngineConfig, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[dict[str, Any]]:
    """Return the numbers of drafted and accepted tokens of the oracle drafter, for each sampling distribution.

    `target` computes in float64, whatever the dtype of the runs, because only then must every token be accepted."""
    strategy, checks = Strategy("oracle", _DEPTH), list[dict[str, Any]]()
    for distribution in _DISTRIBUTIONS:
        requests = _requests(prompts, sampling, *distribution)
        engine = _engine(target, config, requests, strategy, [OracleDrafter(target)])
        for _ in engine.generate(requests):
            pass
        checks.append(_counts(engine, *distribution))
    return checks


def look_ahead_checks(
    target: Decoder, config: EngineConfig, prompts: Sequence[Prompt], sampling: SamplingParams
) -> list[dict[str, Any]]:
    """Return the numbers of drafted and accepted tokens when the target verifies its own look-ahead drafts, for each
    sampling distribution. Also return the number of row passes, and the smallest possible number of them."""
    ahead = PLAIN._replace(ahead=_AHEAD)
    checks = []
    for distribution in _DISTRIBUTIONS:
        requests, store = _requests(prompts, sampling, *distribution), AheadStore()
        before, now = (_engine(target, config, requests, ahead, store=store) for _ in range(2))
        before.look_ahead(requests)
        while before.looks_ahead:
            before.round()
        for _ in now.generate(requests):
            pass
        fewest = len(requests) * -(-_TOKENS // (_AHEAD + 1))
        passes = {"passes": now.stats.row_passes, "fewest_passes": fewest}
        checks.append(_counts(now, *distribution) | passes)
    return checks


def _requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, temperature: float, top_k: int, top_p: float
) -> list[Request]:
    """Return requests that stop only at their token limit."""
    params = replace(
        sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_new_tokens=_TOKENS,
        stop_token_ids=(),
        stop_strings=(),
    )
    return [Request(prompt, 0, 0, 1000 + i, params) for i, prompt in enumerate(prompts[:_ROWS])]


def _engine(
    target: Decoder,
    config: EngineConfig,
    requests: Sequence[Request],
    strategy: Strategy,
    drafters: Sequence[Drafter] = (),
    store: AheadStore | None = None,
) -> Engine:
    """Return an engine whose KV cache is so small that rows are preempted, because drafts must be accepted after a
    preemption too. Its slots have any size, because rounded slots are longer than the rows."""
    longest = max(len(request.prompt.token_ids) for request in requests)
    bound = max(len(requests) * (longest + 36), longest + _TOKENS + 32)
    engine = Engine(target, config, drafters, Fixed(strategy), store=store, kv_tokens=bound)
    engine.cache.store.key_counts = tuple(range(1, BLOCK + 1))
    return engine


def _counts(engine: Engine, temperature: float, top_k: int, top_p: float) -> dict[str, Any]:
    stats = engine.stats
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return sampling | {"drafted": stats.drafted, "accepted": stats.accepted, "preemptions": stats.preemptions}


# rounding may swap the order of two noisy scores (log-prob + Gumbel noise) that are closer than this
EXPLAINED_GAP = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.25}


@dataclass
class Fork:
    mode: str
    step: int
    """number of the step, from 1"""
    prompt: int
    index: int
    position: int
    gap: float


def float64_target(config: Config, weights: Mapping[str, Tensor]) -> Decoder:
    """Return a target that computes in float64, with weights rounded to the engine's dtype."""
    target = make_target(config.model.model_copy(update={"dtype": "float64", "device": "cpu"}))
    target.load({name: tensor.to(torch_dtype(config.model)) for name, tensor in weights.items()}, version=0)
    return target


def fork_of(mode: str, step: int, plain: Response, other: Response, reference: Decoder) -> Fork:
    """Return the fork of two responses in a step with this index: the first position with different tokens, and a gap
    recomputed in float64. The gap is the distance between the noisy scores (log-prob + Gumbel noise) of the two tokens,
    or the distance of either token to the top-k or top-p cut if that is smaller.

    The gap is infinite if one response is a prefix of the other."""
    pairs = enumerate(zip(plain.token_ids, other.token_ids, strict=False))
    shorter = min(len(plain.token_ids), len(other.token_ids))
    position, tokens = next(((t, pair) for t, pair in pairs if pair[0] != pair[1]), (shorter, None))
    request = plain.request
    gap = math.inf if tokens is None else _gap(reference, request, plain.token_ids[:position], *tokens)
    return Fork(mode, step + 1, request.prompt.prompt_id, request.index, position, gap)


def _gap(reference: Decoder, request: Request, prefix: Sequence[int], a: int, b: int) -> float:
    logits = last_logits(reference, [[*request.prompt.token_ids, *prefix]])
    sampling = sampling_tensors([request.sampling], reference.device)
    log_p, full = (x[0] for x in sampling_log_probs(logits, sampling))
    seed = torch.tensor([request.seed], dtype=torch.uint64).view(torch.int64)
    noise = gumbel_noise(seed, torch.tensor([len(prefix)]), len(log_p))[0]
    scores = log_p + noise.double()
    apart = (scores[a] - scores[b]).abs().item()
    cut = min(_distance_to_cut(full, request.sampling, token) for token in (a, b))
    return min(cut, apart if math.isfinite(apart) else math.inf)


def _distance_to_cut(full: Tensor, params: SamplingParams, token: int) -> float:
    """Return the smallest change that moves a token across the top-k cut (in log-prob) or top-p cut (in mass)."""
    ordered, ids = torch.sort(full, descending=True, stable=True)
    place = int((ids == token).nonzero())
    distances = [math.inf]
    k = params.top_k or len(full)
    if k < len(full):
        other = ordered[k] if place < k else ordered[k - 1]
        distances.append((ordered[place] - other).abs().item())
    if params.top_p < 1 and 0 < place < k:
        kept = torch.softmax(ordered[:k], dim=-1)
        distances.append(abs(kept[:place].sum().item() - params.top_p))
    return min(distances)
