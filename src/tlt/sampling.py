"""Shared-noise sampling: the noise g, the distribution p, and the one function that ranks tokens by log p + g.

    token = argmax_v [ log p(v) + g(request, position, v) ]        g: standard Gumbel noise, a pure function

Targets and drafters both use `gumbel_topk`. So a draft token usually equals the target's token if their distributions
are close. The committed token is always the target's exact sample (Gumbel-max), and no drafter can change it (drafter
invariance: arXiv 2408.07978).
Shapes: M rows or tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from randomgen import Philox
from torch import Tensor

from tlt.types import Prompt, Request, SamplingParams

log = logging.getLogger(__name__)
_MASK = 0xFFFFFFFF


def request_seed(run_seed: int, domain: str, prompt_id: int, epoch: int, index: int) -> int:
    """Return the 64-bit seed of a request. `domain` separates training, evaluation and the command line."""
    text = f"{run_seed}/{domain}/{prompt_id}/{epoch}/{index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_requests(
    prompts: Iterable[Prompt], samples: int, sampling: SamplingParams, seed: int, domain: str = "generate"
) -> list[Request]:
    """Return `samples` requests for each prompt, grouped by prompt. The same arguments give the same responses.
    Requests of another `domain` have other seeds."""
    return [
        Request(prompt, index, 0, request_seed(seed, domain, prompt.prompt_id, 0, index), sampling)
        for prompt in prompts
        for index in range(samples)
    ]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return g(seed, position, v) for M (seed, position) pairs as [M, V] float32. The bits depend on nothing else.

    `seeds` [M] int64 holds the 64 bits of the seed (two's complement), `positions` [M] the position in the response.
    """
    if has_kernel(seeds.device):
        from tlt import sampling_kernel

        return sampling_kernel.gumbel_noise(seeds, positions, vocab_size)
    if seeds.device.type != "cpu":
        return _gumbel(philox_words(seeds, positions, vocab_size)).float()
    out = torch.empty(len(seeds), vocab_size)
    for row, words in zip(out, _host_words(seeds.tolist(), positions.tolist(), vocab_size), strict=True):
        row.copy_(_gumbel(words))  # one row at a time fits a core's cache
    return out


@cache
def has_kernel(device: torch.device) -> bool:
    """Return whether `sampling_kernel` runs on this device. Triton needs a C compiler and a GPU that it supports."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    from tlt import sampling_kernel

    try:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        sampling_kernel.gumbel_noise(zero, zero, 1)
    except Exception as error:
        log.warning("Triton does not run on %s, so PyTorch computes the noise, which takes longer: %s", device, error)
        return False
    return True


def _gumbel(words: Tensor) -> Tensor:
    """Return -log(-log(1 - u)) in float64 for u = (word + 0.5) / 2^32, with 32-bit words as int64.

    All 32 bits are used for u, because the smallest u gives the largest noise. 1 - u is exact in float64.
    """
    rest = words.double().mul_(-(2.0**-32)).add_(1 - 2.0**-33)
    return rest.log_().neg_().log_().neg_()  # log is three times as fast as log1p


def _host_words(seeds: Sequence[int], positions: Sequence[int], count: int) -> Iterator[Tensor]:
    """Yield the rows [count] of `philox_words`, computed by the package randomgen in half the time. The counter is set
    one lower, because randomgen increments it before each block."""
    generator = Philox(number=4, width=32)
    state = generator.state
    for seed, position in zip(seeds, positions, strict=True):
        counter, key = ((position << 64) - 1) % 2**128, seed % 2**64
        state["state"] = {"counter": _as_words(counter, 4), "key": _as_words(key, 2)}
        generator.state = state  # a new generator would take three times as long
        yield torch.from_numpy(np.asarray(generator.random_raw(count)).view(np.int64))


def _as_words(number: int, count: int) -> np.ndarray:
    """Return an integer as `count` 32-bit words, the lowest first."""
    return np.frombuffer(number.to_bytes(4 * count, "little"), dtype="<u4")


def philox_words(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    """Return the first `count` words of Philox4x32-10 with key = seed and counter = (word index div 4, 0, position, 0),
    [M, count]."""
    lanes = torch.arange((count + 3) // 4, device=seeds.device)
    zero = torch.zeros_like(lanes)
    words = philox((lanes, zero, positions[:, None], zero), (seeds[:, None] & _MASK, seeds[:, None] >> 32 & _MASK))
    return torch.stack(words, dim=-1).flatten(1)[:, :count]


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the four words of Philox4x32-10 (Salmon et al., SC 2011). Counter, key and result are int64 tensors of
    32-bit words, which broadcast together."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        # Products wrap mod 2^64 with the bits of unsigned products. Only the factors c0 and c2 must be 32-bit words;
        # the upper halves of the other words and of the keys need not be cleared.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 ^ c1 ^ k0) & _MASK, p1, (p0 >> 32 ^ c3 ^ k1) & _MASK, p0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1 & _MASK, c2, c3 & _MASK


class SamplingTensors(NamedTuple):
    """Sampling parameters of M rows, as tensors [M]. `restricted`, `tempered` and `greedy` say whether some row may use
    top-k or top-p, may have a temperature other than 1, or may have a temperature of 0."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    restricted: bool
    tempered: bool = True
    greedy: bool = True

    def of(self, rows: Tensor) -> SamplingTensors:
        return self._replace(temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows])


def lowest_temperature(dtype: torch.dtype) -> float:
    """Return the smallest temperature that is used. Lower temperatures above 0 are raised to it. At this temperature,
    scaled logits are finite for logits up to 4e8, and the distribution is already concentrated on the most likely
    tokens."""
    return torch.finfo(dtype).tiny * 1e8


def sampling_log_probs(logits: Tensor, sampling: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Return (log p, log softmax(logits / temperature)), each [M, V]. p is the distribution after temperature, top-k
    and top-p, in that order.

    Both are computed in float32, or in float64 if the logits are float64. Tokens outside top-k or top-p have log p =
    -inf. If logits are equal, top-k keeps the lower id. Top-p keeps the smallest prefix, by probability and then id,
    whose mass reaches top_p. A temperature of 0 counts as 1 here, because the caller then adds no noise and takes the
    argmax.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.tempered:
        temperature = sampling.temperature.clamp(min=lowest_temperature(wide.dtype)).to(wide.dtype)
        wide = wide / torch.where(sampling.temperature > 0, temperature, 1.0)[:, None]
    full = torch.log_softmax(wide, dim=-1)
    if not sampling.restricted:
        return full, full
    ordered, ids = torch.sort(full, dim=-1, descending=True, stable=True)
    vocab_size = full.shape[-1]
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocab_size)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=full.device) >= top_k, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    # mass of the tokens ranked above, in float64, because the rounding of many small terms could move the cut
    before = torch.cumsum(probabilities, dim=-1, dtype=torch.float64) - probabilities
    top_p = torch.where(sampling.top_p < 1, sampling.top_p, torch.inf)  # 1 keeps all tokens, even if a sum rounds to 1
    outside = before >= top_p[:, None]
    outside[..., 0] = False
    ordered = torch.log_softmax(ordered.masked_fill(outside, -torch.inf), dim=-1)
    restricted = torch.empty_like(ordered).scatter_(-1, ids, ordered)
    # rows without top-k and top-p keep the same bits, whatever other rows are in the batch
    return torch.where(((sampling.top_k > 0) | (sampling.top_p < 1))[:, None], restricted, full), full


class TopK(NamedTuple):
    """The k best candidates of each row, best first: `scores` and `picks`, both [..., k]. A pick is an index
    into the last dimension of the log-probs."""

    scores: Tensor
    picks: Tensor


def gumbel_topk(log_probs: Tensor, noise: Tensor, k: int = 1) -> TopK:
    """Add the noise to log-probs and return the best k: [..., V] -> [..., k]. With k=1 this is the sample itself. Ties
    go to the lower index."""
    noisy = log_probs + noise
    if k == 1:
        scores, picks = noisy.max(dim=-1, keepdim=True)
        return TopK(scores, picks)
    return TopK(*torch.topk(noisy, min(k, noisy.shape[-1]), dim=-1))
