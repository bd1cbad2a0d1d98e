"""Attention over cache slots, against a plain implementation that keeps the key and value of each position in a
dict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from small import ANY_SIZE
from torch import Tensor

import tlt.attention.slots
from tlt.attention.slot_memory import Entries, HeadShape
from tlt.attention.slots import SlotAttention, exact_attention, in_full

CPU = torch.device("cpu")
LAYERS, QUERY_HEADS, HEADS, SIZE = 2, 4, 2, 4
SHAPE = HeadShape(LAYERS, QUERY_HEADS, HEADS, SIZE, torch.float64, CPU)
AHEAD = 6


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Iterator[None]:
    """Use small rings and spans, so that short rows reach the end of a ring and need several spans."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tlt.attention.slots, "MAX_DRAFT_TOKENS", AHEAD)
    patch.setattr(tlt.attention.slots, "_SPAN_COST", 4)
    yield
    patch.undo()


class Pass(NamedTuple):
    """New data of one layer: query [B, N, H, E], key and value [B, N, K, E]."""

    query: Tensor
    key: Tensor
    value: Tensor


class Both:
    """Slots and the plain implementation, with the same calls. Memory that nobody wrote holds noise, so that reading it
    changes the result."""

    def __init__(self, slots: int, tokens: int, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.slots = SlotAttention(SHAPE)
        self.slots.key_counts = ANY_SIZE
        self.slots.resize(slots, tokens)
        for layer in self.slots.layers:
            layer.copy_(self.normal(*layer.shape))
        self.plain: list[dict[tuple[int, int], tuple[Tensor, Tensor]]] = [{} for _ in range(LAYERS)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.random)

    def commit(self, slot: int, positions: Sequence[int]) -> None:
        for layer, plain in zip(self.slots.layers, self.plain, strict=True):
            for p in positions:
                plain[slot, p] = self.normal(HEADS, SIZE), self.normal(HEADS, SIZE)
                layer[0, slot, :, p % self.slots.tokens], layer[1, slot, :, p % self.slots.tokens] = plain[slot, p]

    def new(self, rows: int, new: int) -> list[Pass]:
        shapes = ((rows, new, QUERY_HEADS, SIZE), *((rows, new, HEADS, SIZE),) * 2)
        return [Pass(*(self.normal(*shape) for shape in shapes)) for _ in range(LAYERS)]

    def check(
        self,
        plan: Any,
        first: int,
        passes: Sequence[list[Pass]],
        starts: Sequence[int],
        lengths: Sequence[int],
        written: tuple[list[tuple[int, int]], Tensor] | None = None,
        window: int | None = None,
    ) -> None:
        """Check the last of `passes` against the plain implementation. The tokens of earlier ones come before it."""
        *_, now = passes
        rows, new = now[0].query.shape[:2]
        for layer in range(LAYERS):
            key, value = now[layer].key.flatten(0, 1), now[layer].value.flatten(0, 1)
            if written:
                key, value = written[1][layer]
            query = now[layer].query.flatten(0, 1)
            got = self.slots.attend(plan, layer, query, key, value, window).view(rows, new, -1)
            keys, values = (torch.cat([p[layer][i] for p in passes], dim=1) for i in (1, 2))
            for b in range(rows):
                for n in range(new):
                    held = [self.plain[layer][first + b, p] for p in range(starts[b], lengths[b])]
                    seen = held + [(keys[b, m], values[b, m]) for m in range(keys.shape[1] - new + n + 1)]
                    seen = seen[-window:] if window else seen
                    want = plainly(now[layer].query[b, n], *(torch.stack(x) for x in zip(*seen, strict=True)))
                    assert torch.allclose(got[b, n], want, rtol=0, atol=1e-10), (layer, b, n)


def plainly(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the attention [H * E] of query [H, E] over keys and values [S, K, E], one head at a time."""
    share = QUERY_HEADS // HEADS
    heads = []
    for h in range(QUERY_HEADS):
        weights = torch.softmax(keys[:, h // share] @ query[h] / SIZE**0.5, dim=0)
        heads.append(weights @ values[:, h // share])
    return torch.cat(heads)


@given(st.data())
@settings(max_examples=140)
def test_new_tokens_after_rows_of_any_lengths(data: st.DataObject) -> None:
    """Plans may have a fixed shape. The window of a layer may be shorter than the new tokens."""
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=6))
    rows, new, padded = len(lengths), data.draw(st.integers(1, 5)), data.draw(st.booleans())
    first = 0 if padded else data.draw(st.integers(0, 2))
    least = max(lengths) + new
    both = Both(first + rows, least + data.draw(st.sampled_from([0, 0, 9])), rows)
    for b, length in enumerate(lengths):
        both.commit(first + b, range(length))
    plan = both.slots.fixed_plan(torch.tensor(lengths), new) if padded else both.slots.plan(first, lengths, new)
    for window in (None, data.draw(st.integers(1, 40))):
        both.check(plan, first, [both.new(rows, new)], [0] * rows, lengths, window=window)


@given(st.data())
@settings(max_examples=120)
def test_tokens_of_a_draft_in_a_ring_with_a_window(data: st.DataObject) -> None:
    window, rows = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 4))
    ends = data.draw(st.lists(st.integers(0, 40), min_size=rows, max_size=rows))
    if data.draw(st.booleans()):
        ends = [ends[0]] * rows
    both = Both(rows, window + AHEAD + 1, rows)
    starts = [max(0, end - data.draw(st.integers(0, window))) for end in ends]
    late = [data.draw(st.integers(start, end)) for start, end in zip(starts, ends, strict=True)]
    for b, end in enumerate(ends):
        both.commit(b, range(max(0, end - window), late[b]))
    entries = [(b, p) for b, end in enumerate(ends) for p in range(late[b], end + 1)]
    caught_up = len(entries) == rows
    passes, written = [both.new(rows, 1)], None
    if not caught_up:
        fresh = [
            (both.normal(len(entries), HEADS, SIZE), both.normal(len(entries), HEADS, SIZE)) for _ in range(LAYERS)
        ]
        for layer, (keys, values) in enumerate(fresh):
            for m, (b, p) in enumerate(entries):
                if p < ends[b]:
                    both.plain[layer][b, p] = keys[m], values[m]
                else:
                    passes[0][layer].key[b, 0], passes[0][layer].value[b, 0] = keys[m], values[m]
        written = entries, fresh
    where = Entries(*np.array(entries).T)
    ends_of, starts_of = np.array(ends) + 1, np.array(starts)
    plan = both.slots.plan_draft(ends_of, starts_of, None if caught_up else where)
    both.check(plan, 0, passes, starts, ends, written)
    for _ in range(AHEAD):
        plan = both.slots.deeper(plan)
        passes.append(both.new(rows, 1))
        both.check(plan, 0, passes, starts, ends)


def test_attention_in_bfloat16_sums_in_float32() -> None:
    """A sum of ones in bfloat16 would stay at 256."""
    slots = SlotAttention(HeadShape(1, QUERY_HEADS, HEADS, SIZE, torch.bfloat16, CPU))
    slots.resize(1, 512)
    slots.write(0, torch.ones(1, 2, HEADS, 400, SIZE).bfloat16())
    query, key, value = (torch.ones(1, heads, SIZE).bfloat16() for heads in (QUERY_HEADS, HEADS, HEADS))
    mixed = slots.attend(slots.plan(0, [400], 1), 0, query, key, value)
    assert torch.equal(mixed, torch.ones_like(mixed))


@pytest.mark.parametrize(
    ("threads", "size", "queries", "tokens"), [(2, 16, 16, 2048), (3, 128, 4, 1024), (8, 64, 12, 1024), (8, 128, 8, 64)]
)
def test_a_single_row_with_one_head_has_the_same_bits_on_several_threads(
    threads: int, size: int, queries: int, tokens: int
) -> None:
    """Some rows of many, because few have sums that several threads round to other bits in bfloat16."""
    random, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    shapes = ((queries, size), (tokens, size), (tokens, size))
    query, key, value = (torch.randn(40, 1, *shape, generator=random).bfloat16() for shape in shapes)
    shape = HeadShape(1, 1, 1, size, torch.bfloat16, torch.device("cpu"))
    mask = torch.zeros(1, 1, in_full(query, shape).shape[2], tokens).bfloat16()
    together = exact_attention(query, key, value, mask, shape)
    torch.set_num_threads(threads)
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attend:
        alone = [exact_attention(query[i : i + 1], key[i : i + 1], value[i : i + 1], mask, shape) for i in range(40)]
    torch.set_num_threads(before)
    assert {len(call.args[0]) for call in attend.call_args_list} == {2}, "on some CPUs a single row has the same bits"
    assert torch.equal(torch.cat(alone), together)


def test_resized_slots_keep_positions_that_fit_and_are_zero_elsewhere() -> None:
    both = Both(2, 4, seed=0)
    before = [layer.clone() for layer in both.slots.layers]
    both.slots.resize(3, 6)
    for old, layer in zip(before, both.slots.layers, strict=True):
        assert torch.equal(layer[:, :2, :, :4], old)
        assert not layer[:, 2:].any()
        assert not layer[:, :, :, 4:].any()
    both.slots.resize(1, 3)
    assert all(torch.equal(now, old[:, :1, :, :3]) for old, now in zip(before, both.slots.layers, strict=True))


def test_a_wiped_slot_keeps_positions_before_the_start() -> None:
    both = Both(2, 4, seed=0)
    before = [layer.clone() for layer in both.slots.layers]
    both.slots.wipe(1, 2)
    for old, layer in zip(before, both.slots.layers, strict=True):
        old[:, 1, :, 2:] = 0
        assert torch.equal(layer, old)
