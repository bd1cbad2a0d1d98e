"""Forks: the first token where two runs of one request differ, and whether rounding explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tlt.config import Config
from tlt.engine.sampling_table import sampling_tensors
from tlt.models.decoder import Decoder
from tlt.models.device import torch_dtype
from tlt.models.loading import make_target
from tlt.sampling import gumbel_noise, sampling_log_probs
from tlt.types import Request, Response, SamplingParams
from tlt.verify.oracle import last_logits

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
