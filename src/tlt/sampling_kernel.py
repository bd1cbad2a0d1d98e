"""Triton kernels of the Gumbel noise, and of sampling from logits. Without a GPU they run in Triton's interpreter
(TRITON_INTERPRET=1).

The noise: for token v at position t, Philox4x32-10 with key = seed and counter = (v div 4, 0, t, 0), and
g = -log(-log(1 - u)) in float64, rounded once. The operations of `sampling.py` take 1.1 ms on an H100 for 32 rows of
49,152 tokens, and the kernel takes 0.03 ms.

Sampling: temperature, log-softmax, noise, the token and its log-probs. The kernels compute what
`sampling.py` computes for rows without top-k and top-p, without a tensor of log-probs or noise. A row is cut into
blocks of `_BLOCK` tokens. Sums over a block, and then over all blocks, have an order that depends on the vocabulary
size alone. So a row has the same bits, whatever other rows are in the call.

Shapes: M rows of logits, of which N belong to each of B requests, V vocabulary, S blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from tlt.sampling import lowest_temperature

_LANES = 256  # Philox counters per program of the noise, each for four tokens
_BLOCK = 2048  # tokens per program of the sampling
# Code is not compiled for particular values of these arguments, because it could round in another way.
_COUNTS = ("new", "vocab_size", "stride", "blocks")


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Compute `sampling.gumbel_noise` with Triton: [M, vocab_size] float32 for `seeds` [M] and `positions` [M]."""
    noise = torch.zeros(len(seeds), vocab_size, device=seeds.device)
    everywhere = torch.ones(len(seeds), dtype=torch.bool, device=seeds.device)
    write_scores(noise, noise, seeds, positions, everywhere, everywhere)
    return noise


def write_scores(logits: Tensor, log_p: Tensor, seeds: Tensor, times: Tensor, ours: Tensor, noisy: Tensor) -> None:
    """Compute `vllm.noise.write_scores` with Triton: write log p + noise into those rows of `logits` [R, V] that the
    mask `ours` [R] selects. If such a row is outside the mask `noisy` [R], write log p alone. `times` [R] are the
    positions for the noise."""
    assert logits.stride(1) == log_p.stride(1) == 1, "rows must be contiguous"
    rows, vocab_size = logits.shape
    grid = rows, triton.cdiv(vocab_size, 4 * _LANES)
    strides = logits.stride(0), log_p.stride(0)
    launch: Any = _write_scores
    with torch.cuda.device_of(logits):  # Triton starts kernels on the current device
        launch[grid](logits, log_p, seeds, times.int(), ours, noisy, vocab_size, *strides, LANES=_LANES)


@triton.jit
def _write_scores(
    logits, log_p, seeds, times, ours, noisy, vocab_size, logits_stride, log_p_stride, LANES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(ours + row):
        lanes = tl.program_id(1) * LANES + tl.arange(0, LANES)
        share = tl.load(noisy + row).to(tl.float32)
        word0, word1, word2, word3 = tl.philox(tl.load(seeds + row), lanes, 0, tl.load(times + row), 0)
        into, of = logits + row * logits_stride, log_p + row * log_p_stride
        _write(into, of, 4 * lanes, word0, share, vocab_size)
        _write(into, of, 4 * lanes + 1, word1, share, vocab_size)
        _write(into, of, 4 * lanes + 2, word2, share, vocab_size)
        _write(into, of, 4 * lanes + 3, word3, share, vocab_size)


@triton.jit
def _write(into, of, tokens, words, share, vocab_size):
    inside = tokens < vocab_size
    score = tl.load(of + tokens, inside, other=0.0) + share * gumbel(words)
    tl.store(into + tokens, score.to(into.dtype.element_ty), inside)


@triton.jit
def gumbel(words):
    """Return the noise of 32-bit words, in float32. A fused multiply-add changes no bit, because each
    product is exact."""
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32: 1 - u is exact
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


def sample(logits: Tensor, seeds: Tensor, times: Tensor, temperature: Tensor) -> Tensor:
    """Sample a token from each row of `logits` [M, V] in float32 or bfloat16. Return [M, 3] in float64: the token, its
    log-prob, and its log-prob before top-k and top-p (see `Response`).

    Row b * N + n is token n of request b, at position `times[b]` + n of its response. `seeds` [B] and `temperature` [B]
    (float64) are those of the requests. With a temperature of 0 the token is the most likely one."""
    assert logits.stride(1) == 1, "rows must be contiguous"
    (rows, vocab_size), device = logits.shape, logits.device
    blocks = triton.cdiv(vocab_size, _BLOCK)
    sums = torch.empty(rows, 4, blocks, device=device)  # largest value and sum of exponentials; best score and token
    found = torch.empty(rows, 3, dtype=torch.float64, device=device)
    given = logits, sums, seeds, times, temperature
    counts = rows // len(seeds), vocab_size, logits.stride(0), blocks
    sizes = {"BLOCK": _BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "LOWEST": lowest_temperature(torch.float32)}
    with torch.cuda.device_of(logits):  # Triton starts kernels on the current device
        launch: Any = _sum
        launch[rows, blocks](*given, *counts, **sizes)
        launch = _rank
        launch[rows, blocks](*given, *counts, **sizes)
        launch = _pick
        launch[(rows,)](*given, found, *counts, **sizes)
    return found


@triton.jit(do_not_specialize=_COUNTS)
def _sum(
    logits, sums, seeds, times, temperature, new, vocab_size, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Compute the largest scaled logit of a block, and the sum of exponentials relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + tokens, tokens < vocab_size, other=-float("inf"))
    x = _scaled(x, tl.load(temperature + row // new), LOWEST)
    most = tl.max(x, 0)
    into = sums + row * 4 * blocks + block
    tl.store(into, most)
    tl.store(into + blocks, tl.sum(tl.exp(x - _finite(most)), 0))


@triton.jit(do_not_specialize=_COUNTS)
def _rank(
    logits, sums, seeds, times, temperature, new, vocab_size, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Find the best token of a block by log-prob plus noise. Of equal tokens the first one is better."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row // new)
    x = tl.load(logits + row * stride + tokens, tokens < vocab_size, other=-float("inf"))
    log_p = _log_prob(_scaled(x, heat, LOWEST), sums + row * 4 * blocks, blocks, BLOCKS)
    lanes = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    time = (tl.load(times + row // new) + row % new).to(tl.int32)
    word0, word1, word2, word3 = tl.philox(tl.load(seeds + row // new), lanes, 0, time, 0)
    words = tl.reshape(tl.join(tl.join(word0, word2), tl.join(word1, word3)), [BLOCK])
    score = log_p + (heat > 0).to(tl.float32) * gumbel(words)
    score = tl.where(score == score, score, -float("inf"))  # a NaN is no score
    best, place = tl.max(score, 0, return_indices=True)
    into = sums + (row * 4 + 2) * blocks + block
    tl.store(into, best)
    tl.store(into + blocks, place.to(tl.float32))


@triton.jit(do_not_specialize=_COUNTS)
def _pick(
    logits, sums, seeds, times, temperature, found, new, vocab_size, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """Find the best token of a row, and its log-probs."""
    row, order = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    own = sums + row * 4 * blocks
    _, block = tl.max(tl.load(own + 2 * blocks + order, order < blocks, other=-float("inf")), 0, return_indices=True)
    token = block * BLOCK + tl.load(own + 3 * blocks + block).to(tl.int32)
    heat = tl.load(temperature + row // new)
    x = tl.load(logits + row * stride + token + tl.arange(0, 1))
    log_p = tl.sum(_log_prob(_scaled(x, heat, LOWEST), own, blocks, BLOCKS), 0)
    tl.store(found + 3 * row, token.to(tl.float64))
    tl.store(found + 3 * row + 1, tl.where(heat > 0, log_p, 0.0).to(tl.float64))
    tl.store(found + 3 * row + 2, log_p.to(tl.float64))


@triton.jit
def _scaled(logits, temperature, LOWEST: tl.constexpr):
    """Return logits divided by the temperature, or as they are if it is 0."""
    divisor = tl.where(temperature > 0, tl.maximum(temperature, LOWEST), 1.0)
    return tl.div_rn(logits.to(tl.float32), divisor.to(tl.float32))


@triton.jit
def _log_prob(x, sums, blocks, BLOCKS: tl.constexpr):
    """Return log-probs of scaled logits, from the sums of all blocks of their row."""
    order = tl.arange(0, BLOCKS)
    mosts = tl.load(sums + order, order < blocks, other=-float("inf"))
    totals = tl.load(sums + blocks + order, order < blocks, other=0.0)
    most = tl.max(mosts, 0)
    return x - most - tl.log(tl.sum(totals * tl.exp(mosts - _finite(most)), 0))


@triton.jit
def _finite(most):
    """Return 0 for -inf, of which no difference can be taken, and other numbers as they are."""
    return tl.where(most == -float("inf"), 0.0, most)
