"""Triton kernels of a target pass over slots: one stores keys and values, two compute attention.

The sums of a token depend on the token and on the keys before it alone, whatever else is in a pass. Keys are summed in
blocks that begin at fixed positions. `PART` keys make a part, and parts are added in the order of their positions. A
masked key has weight 0 and adds exactly 0. A program computes a tile: up to 16 pairs of a new token and a query head,
because tensor cores multiply 16 rows at once. A row of a tile has sums of its own.

Lengths are read on the device, so that a CUDA graph serves rows of any lengths. Without a GPU the kernels run in
Triton's interpreter (TRITON_INTERPRET=1).

Shapes: B rows, N new tokens per row, H query heads, K key-value heads, E head size, T tokens per slot, S parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found]
import triton.language as tl  # type: ignore[import-not-found]
from torch import Tensor

from tlt.attention.slots import SlotAttention

PART = 512
"""number of keys in a part"""
_TILE = 16  # least number of rows in a product on tensor cores
_BLOCK_BYTES = 2**14  # size of a block of keys: two blocks of keys and two of values fit the fast memory
_PROGRAMS = 1024  # number of programs that keep a GPU busy
_PARTS_BYTES = 2**26  # largest size of the parts of a call, unless one tile per row needs more
_EVERYTHING = 2**30  # window of a layer without one
# Code is not compiled for particular values of these arguments, because it could round in another way.
_COUNTS = ("first", "new", "begin", "some", "window", "tokens", "parts", "query_stride", "key_stride", "value_stride")


def store(layer: Tensor, first: int, lengths: Tensor, new: int, key: Tensor, value: Tensor) -> None:
    """Write `key` and `value` [B * N, K, E] to slots [first, first + B) of `layer` [2, slots, K, T, E]. Those of row b
    follow `lengths[b]` positions. A row of length -1 is skipped."""
    _, _, heads, tokens, size = layer.shape
    launch: Any = _store
    counts = first, new, tokens, key.stride(0), value.stride(0)
    blocks = {"HEADS": heads, "HEAD_BLOCK": _power_of_two(heads), "SIZE": size, "SIZE_BLOCK": _power_of_two(size)}
    with torch.cuda.device_of(layer):  # Triton starts kernels on the current device
        launch[(len(key),)](key, value, *layer, lengths, *counts, **blocks)


def attend(
    layer: Tensor, first: int, lengths: Tensor, new: int, query: Tensor, window: int | None, longest: int
) -> Tensor:
    """Return the attention output [B * N, H * E] of `query` [B * N, H, E]. Row b is slot `first` + b of `layer`
    [2, slots, K, T, E], which has `lengths[b]` positions and the new tokens.

    A token attends to the last `window` tokens, itself included (None: to all). `longest` is a bound of the lengths,
    new tokens included. The output of a row of length -1 is 0."""
    (_, heads, size), (_, _, kv_heads, tokens, _) = query.shape, layer.shape
    rows, parts, blocks = len(lengths), triton.cdiv(longest, PART), _blocks(heads // kv_heads, size, layer.dtype)
    of_tile = blocks["TILE"] // blocks["GROUP"]  # new tokens in a tile
    # long prompts are cut, so that their parts need little memory
    step = max(1, _PARTS_BYTES // (4 * rows * heads * parts * size * of_tile)) * of_tile
    out = torch.empty(len(query), heads * size, dtype=query.dtype, device=query.device)
    for begin in range(0, new, step):
        some = min(step, new - begin)
        sums = torch.empty(rows * some * heads * parts, size, device=query.device)
        scales = torch.empty(rows * some * heads * parts, 2, device=query.device)
        counts = first, new, begin, some, window or _EVERYTHING, tokens, parts
        tiles = triton.cdiv(some, of_tile), rows * kv_heads
        workers = min(parts, triton.cdiv(_PROGRAMS, tiles[0] * tiles[1]))
        with torch.cuda.device_of(layer):
            launch: Any = _parts
            launch[*tiles, workers](
                query, *layer, lengths, sums, scales, *counts, query.stride(0), KV_HEADS=kv_heads, **blocks
            )
            launch = _joined
            launch[some, rows, heads](
                sums, scales, lengths, out, *counts, PART=PART, SIZE=size, SIZE_BLOCK=blocks["SIZE_BLOCK"]
            )
    return out


def _blocks(group: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the constants of `_parts`. They decide the order of sums, and depend on the model alone."""
    size_block = max(_TILE, _power_of_two(size))
    tile = {"GROUP": group, "TILE": max(_TILE, _power_of_two(group)), "SIZE": size, "SIZE_BLOCK": size_block}
    return tile | {"KEYS": max(16, min(64, _BLOCK_BYTES // (size_block * dtype.itemsize))), "PART": PART}


def _power_of_two(count: int) -> int:
    return triton.next_power_of_2(count)


@triton.jit(do_not_specialize=_COUNTS)
def _store(
    key, value, keys, values, lengths, first, new, tokens, key_stride, value_stride,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = token // new
    length = tl.load(lengths + row)
    if length >= 0:
        heads, sizes = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, SIZE_BLOCK)[None, :]
        inside = (heads < HEADS) & (sizes < SIZE)
        place = (((first + row) * HEADS + heads) * tokens + length + token % new) * SIZE + sizes
        at = heads * SIZE + sizes
        tl.store(keys + place, tl.load(key + token * key_stride + at, inside), inside)
        tl.store(values + place, tl.load(value + token * value_stride + at, inside), inside)


@triton.jit(do_not_specialize=_COUNTS)
def _parts(
    query, keys, values, lengths, sums, scales, first, new, begin, some, window, tokens, parts, query_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
    KEYS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute the sums of weighted values of a tile, and their scales: the largest score and the sum of weights."""
    row, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    length = tl.load(lengths + row)
    if length >= 0:
        pairs, sizes = tl.arange(0, TILE), tl.arange(0, SIZE_BLOCK)
        low = tl.program_id(0) * (TILE // GROUP)  # first new token of the tile, counted from `begin`
        node, head = low + pairs // GROUP, kv_head * GROUP + pairs % GROUP
        real = (pairs < TILE // GROUP * GROUP) & (node < some)
        position = (length + begin + node)[:, None]
        at = ((row * new + begin + node) * query_stride + head * SIZE)[:, None] + sizes[None, :]
        asks = tl.load(query + at, real[:, None] & (sizes < SIZE)[None, :], other=0.0)
        slot = ((first + row) * KV_HEADS + kv_head) * tokens * SIZE
        seen_from = tl.maximum(length + begin + low - window + 1, 0)
        seen_to = length + begin + tl.minimum(low + TILE // GROUP, some)
        place = (((row * some + node) * KV_HEADS * GROUP + head) * parts)[:, None]
        for part in range(seen_from // PART + tl.program_id(2), tl.cdiv(seen_to, PART), tl.num_programs(2)):
            most = tl.full([TILE], -float("inf"), tl.float32)
            total = tl.zeros([TILE], tl.float32)
            mixed = tl.zeros([TILE, SIZE_BLOCK], tl.float32)
            start = tl.maximum(part * PART, seen_from // KEYS * KEYS)
            for block in range(start, tl.minimum(part * PART + PART, seen_to), KEYS):
                those = block + tl.arange(0, KEYS)
                inside = (those < seen_to)[:, None] & (sizes < SIZE)[None, :]
                places = slot + those[:, None] * SIZE + sizes[None, :]
                key = tl.load(keys + places, inside, other=0.0)
                score = tl.dot(asks, tl.trans(key), input_precision="ieee") * (SIZE**-0.5 * 1.4426950408889634)
                seen = (those[None, :] <= position) & (those[None, :] > position - window)
                score = tl.where(seen, score, -float("inf"))
                larger = tl.maximum(most, tl.max(score, 1))
                base = tl.where(larger == -float("inf"), 0.0, larger)  # a token may see no key of this block
                weight = tl.exp2(score - base[:, None])
                shrink = tl.exp2(most - base)
                value = tl.load(values + places, inside, other=0.0)
                total = total * shrink + tl.sum(weight, 1)
                mixed = mixed * shrink[:, None]
                mixed += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
                most = larger
            tl.store(sums + (place + part) * SIZE + sizes[None, :], mixed, real[:, None] & (sizes < SIZE)[None, :])
            into = scales + (place + part) * 2
            tl.store(into, most[:, None], real[:, None])
            tl.store(into + 1, total[:, None], real[:, None])


@triton.jit(do_not_specialize=_COUNTS)
def _joined(
    sums, scales, lengths, out, first, new, begin, some, window, tokens, parts,
    PART: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts of a pair of a token and a head in order, and write the attention output."""
    node, row, head = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length, sizes = tl.load(lengths + row), tl.arange(0, SIZE_BLOCK)
    position = length + begin + node
    place = ((row * some + node) * tl.num_programs(2) + head) * parts
    most, total, mixed = -float("inf"), 0.0, tl.zeros([SIZE_BLOCK], tl.float32)
    if length >= 0:
        for part in range(tl.maximum(position - window + 1, 0) // PART, position // PART + 1):
            its_most = tl.load(scales + (place + part) * 2)
            larger = tl.maximum(most, its_most)
            shrink, share = tl.exp2(most - larger), tl.exp2(its_most - larger)
            total = total * shrink + tl.load(scales + (place + part) * 2 + 1) * share
            mixed = mixed * shrink + tl.load(sums + (place + part) * SIZE + sizes, sizes < SIZE, other=0.0) * share
            most = larger
        mixed = mixed / total
    into = out + ((row * new + begin + node) * tl.num_programs(2) + head) * SIZE + sizes
    tl.store(into, mixed.to(out.dtype.element_ty), sizes < SIZE)


class KernelPlan(NamedTuple):
    """Plan of a target pass over slots [first, first + B), with `new` new tokens per row."""

    first: int
    lengths: Tensor
    """[B] committed positions of each row; -1 for padding"""
    new: int
    longest: int
    """bound of the rows' lengths, new tokens included"""


class KernelAttention(SlotAttention):
    """Slots whose target passes have the same bits for each number of rows and of new tokens, by construction."""

    def mask_bytes(self, new: int) -> int:
        return 0  # the kernels compare positions

    def plan(self, first: int, lengths: Sequence[int], new: int) -> Any:
        longest = max(lengths) + new
        assert longest <= self.tokens, "the cache must resize before a pass"
        return KernelPlan(first, torch.tensor(lengths, device=self.shape.device), new, longest)

    def fixed_plan(self, lengths: Tensor, new: int) -> Any:
        return KernelPlan(0, lengths, new, self.tokens)

    def attend(
        self, plan: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None
    ) -> Tensor:
        if not isinstance(plan, KernelPlan):
            return super().attend(plan, layer, query, key, value, window)
        both, (first, lengths, new, longest) = self.layers[layer], plan
        store(both, first, lengths, new, key, value)
        return attend(both, first, lengths, new, query, window, longest)
