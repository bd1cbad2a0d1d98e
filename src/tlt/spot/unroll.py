"""Forward pass and loss of the learned drafter in training. The pass has packed hidden states, and is unrolled
over draft tokens as in decoding.

Training-time test (EAGLE-3, arXiv 2503.01840): at depth 0 (first draft token) the layer reads the target's hidden
states. At depth t it reads its own output of depth t - 1 instead. A draft token attends to the true entries up to the
root of its chain, and to the earlier draft tokens of this chain.

Sequences are packed one after the other; attention stays inside each sequence. Shapes: T entries (token positions) of a
pack, D hidden, H query heads, K key-value heads, E head size.

The loss is the cross entropy between the target's distribution p and the drafter's distribution q. Other losses were
measured and are no better (docs/measurements.md). Shapes: M draft tokens, T entries, D hidden size, V vocabulary size.
p and log q are [M, V].
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest

_QUERIES = 256  # maximum number of queries in a block of attention
LOGITS = 1 << 22  # maximum number of logits that are computed at a time (a chunk)


class Pack(NamedTuple):
    """Batch of training data: several items, one after the other, without padding."""

    tokens: Tensor
    """[T] token ids: for each entry, the next token of its sequence"""
    features: Tensor
    """[T, F] hidden states of the target at each entry, as laid out by `FeatureLayout`"""
    positions: Tensor
    """[T] position of each entry in its original sequence"""
    segments: Tensor
    """[T] index of the item that an entry belongs to"""
    counted: Tensor
    """[T] bool: whether the first draft token from this entry is a token of a response, not of a prompt"""
    version: int
    """version of the target that computed the hidden states"""


def pack(items: Sequence[Harvest], device: torch.device) -> Pack:
    """Concatenate items to a pack. All items must be of one target version."""
    lengths = torch.tensor([len(item.tokens) for item in items])
    start = torch.tensor([item.start for item in items]).repeat_interleave(lengths)
    first = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(int(lengths.sum())) - first + start
    prompt = torch.tensor([item.prompt_length for item in items]).repeat_interleave(lengths)
    return Pack(
        torch.cat([item.tokens for item in items]).to(device),
        torch.cat([item.features for item in items]).to(device),
        positions.to(device),
        torch.arange(len(items)).repeat_interleave(lengths).to(device),
        (positions + 2 >= prompt).to(device),
        items[0].target_version,
    )


def packs(items: Iterable[Harvest], tokens: int, device: torch.device, rng: random.Random) -> Iterator[Pack]:
    """Yield all items once, in random order, as packs of up to `tokens` entries. A longer item is a pack by itself."""
    order = list(items)
    rng.shuffle(order)
    for held in bundles(order, tokens):
        yield pack(held, device)


def bundles(items: Iterable[Harvest], tokens: int) -> Iterator[list[Harvest]]:
    """Yield groups of consecutive items of one target version, each with up to `tokens` entries. A longer item is a
    group by itself."""
    held: list[Harvest] = []
    for item in items:
        full = sum(len(other.tokens) for other in held) + len(item.tokens) > tokens
        if held and (full or item.target_version != held[0].target_version):
            yield held
            held = []
        held.append(item)
    if held:
        yield held


def unroll(
    layer: EagleLayer,
    embedding: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    batch: Pack,
    steps: int,
    roots: Tensor | None = None,
) -> Iterator[Tensor]:
    """Yield the layer's outputs for draft tokens 0 .. steps - 1 of each chain. They are inputs of the target's head.

    The output of depth 0 is [T, D], for all entries. The output of a later depth is [R, D], for the R entries in
    `roots` (ascending indices; None: all entries). Entry i at depth t predicts token i + t + 2. If that token is beyond
    the end of the sequence, the output must be ignored.

    `cos_sin`: cos and sin of the target's rotary embedding, [positions, E] each, in Hugging Face's order.
    """
    o = layer.options
    share = o.num_heads // o.num_kv_heads
    places = torch.arange(len(batch.tokens), device=batch.tokens.device)
    blocks = _blocks(batch, places, o.window)
    with _fast_products(batch.features):
        g = layer.fuse(batch.features).to(batch.features.dtype)
    true: tuple[Tensor, Tensor] | None = None  # keys and values of depth 0, [K, T, E]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of each other depth, [K, R, E]
    for t in range(steps):
        if t == 1 and roots is not None:
            g, places = g[roots], roots
            blocks = _blocks(batch, roots, o.window)
        with _fast_products(g):
            x, residual = layer.inputs(F.embedding(batch.tokens.roll(-t)[places], embedding), g)
            projected = [p(x).to(g.dtype) for p in (layer.q_proj, layer.k_proj, layer.v_proj)]
        at = (batch.positions[places] + t).clamp(max=len(cos_sin[0]) - 1)
        query, key, value = (heads.view(len(places), -1, o.head_dim) for heads in projected)
        query, key = (_rotate_halves(heads, cos_sin, at) for heads in (query, key))
        written = key.transpose(0, 1), value.transpose(0, 1)
        if true is None:
            true = written
        else:
            own.append(written)
        query = query.view(-1, o.num_kv_heads, share, o.head_dim).permute(1, 2, 0, 3) * o.head_dim**-0.5
        mixed = torch.cat([_attend(query, true, own, block) for block in blocks], dim=2)
        with _fast_products(g):
            g = layer.mlp(residual + layer.o_proj(mixed.permute(2, 0, 1, 3).flatten(1))).to(mixed.dtype)
            out = layer.finish(g)
        yield out


def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for matrix products of `dtype` tensors: bfloat16 if `dtype` is float32 and the device has
    hardware for bfloat16 products, else `dtype`. Lower precision is safe, because no token depends on how a drafter
    rounds."""
    if device.type == "cpu":
        is_fast = torch.cpu.get_capabilities().get("amx_bf16", False)
    else:
        is_fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if is_fast and dtype == torch.float32 else dtype


def _fast_products(x: Tensor) -> torch.autocast:
    return torch.autocast(x.device.type, torch.bfloat16, enabled=product_dtype(x.device, x.dtype) != x.dtype)


class _Block(NamedTuple):
    """Block of attention: queries [low, high) of one depth, and the entries [first, last) that they attend to."""

    low: int
    high: int
    first: int
    last: int
    bias: Tensor
    """[high - low, last - first] 0 where the query attends to the entry, else -inf"""


def _blocks(batch: Pack, places: Tensor, window: int) -> list[_Block]:
    """Return the blocks of queries at these `places` of the pack. A block has some whole sequences or a part of one,
    and the entries that its queries attend to. Attention is computed by blocks, because most pairs of entries are
    masked."""
    entries = torch.arange(len(batch.tokens), device=batch.tokens.device)
    blocks = []
    for begin, start, end in _cuts(torch.unique_consecutive(batch.segments, return_counts=True)[1].tolist()):
        low, high = torch.searchsorted(places, torch.tensor([start, end], device=places.device)).tolist()
        first = max(begin, start - window + 1)
        queries = places[low:high]
        apart = queries[:, None] - entries[first:end]
        seen = (apart >= 0) & (apart < window)
        seen &= batch.segments[queries, None] == batch.segments[first:end]
        bias = torch.zeros(seen.shape, dtype=batch.features.dtype, device=entries.device)
        blocks.append(_Block(low, high, first, end, bias.masked_fill_(~seen, -torch.inf)))
    return blocks


def _cuts(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut sequences of these lengths into blocks [low, high) of up to `_QUERIES` entries. Yield (begin, low, high),
    where `begin` is the start of the block's first sequence."""
    low = end = 0
    for length in lengths:
        begin, end = end, end + length
        if end - low <= _QUERIES:
            continue
        if begin > low:
            yield low, low, begin
        for part in range(begin, end, _QUERIES) if length > _QUERIES else ():
            yield begin, part, min(part + _QUERIES, end)
        low = end if length > _QUERIES else begin
    if end > low:
        yield low, low, end


def _attend(query: Tensor, true: tuple[Tensor, Tensor], own: Sequence[tuple[Tensor, Tensor]], block: _Block) -> Tensor:
    """Return the attention output [K, H / K, high - low, E] of the block's queries. `query` [K, H / K, M, E] has the
    queries of all blocks. A query attends to the `true` entries (depth 0) and to its `own` chain of draft tokens (other
    depths)."""
    low, high, first, last, bias = block
    query, (keys, values) = query[:, :, low:high], (x[:, None, first:last] for x in true)
    seen = query @ keys.transpose(2, 3) + bias  # [K, H / K, high - low, last - first]
    if not own:
        return torch.softmax(seen, dim=-1) @ values
    chain = [(query * k[:, None, low:high]).sum(-1, keepdim=True) for k, _ in own]
    seen, weights = torch.softmax(torch.cat([seen, *chain], dim=-1), dim=-1).split([last - first, len(own)], dim=-1)
    mixed = seen @ values
    for weight, (_, v) in zip(weights.unbind(-1), own, strict=True):
        mixed = mixed + weight[..., None] * v[:, None, low:high]
    return mixed


def _rotate_halves(x: Tensor, cos_sin: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """Apply the rotary embedding to x [T, heads, E], with Hugging Face's order of pairs (i, i + E/2)."""
    cos, sin = (table[positions, None] for table in cos_sin)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


# -- loss --------------------------------------------------------------------------------------------------------------


def logits(x: Tensor, head: Tensor) -> Tensor:
    """Return logits [M, V] of x [M, D] in the dtype of x. The product with the head [V, D] has the head's dtype."""
    return F.linear(x.to(head.dtype), head).to(x.dtype)


def draft_overlap(outs: Tensor, teacher: Tensor, at: Tensor, head: Tensor, known: Tensor) -> Iterator[Tensor]:
    """Yield 1 - TV of the draft tokens, chunk by chunk. TV is the total variation distance between p and q. See
    `draft_loss` for arguments."""
    rows = max(1, LOGITS // len(head))
    for out, entries in zip(outs.split(rows), at.split(rows), strict=True):
        p, q = (torch.softmax(logits(x, w), dim=-1) for x, w in ((teacher[entries], known), (out, head)))
        yield torch.minimum(p, q).sum(-1)


def draft_loss(
    outs: Tensor,
    weights: Tensor,
    teacher: Tensor,
    at: Tensor,
    head: Tensor,
    known: Tensor,
    check_stop: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the losses of M draft tokens, and 1 - TV of each draft token [M]. TV is the total
    variation distance between p and q.

    outs: [M, D] outputs of the drafter. head: [V, D] current output head of the target, which maps `outs` to logits.
    weights: [M] weight of each loss. teacher: [T, D] last hidden states of the target. known: [V, D] output head of the
    target version that computed `teacher`. at: [M] index in `teacher` of the entry whose distribution p each draft
    token should have. `check_stop` is called for each chunk, and may raise.

    The gradient with respect to `outs` is computed together with the loss, and draft tokens of the same entry share p.
    Therefore most logits are computed only once, and no logit is kept after its chunk.
    """
    total, gradient, overlap = outs.new_zeros(()), torch.empty_like(outs), torch.empty_like(weights)
    for part in at.argsort().split(max(1, LOGITS // len(head))):
        check_stop()
        entries, which = at[part].unique_consecutive(return_inverse=True)
        p = torch.softmax(logits(teacher[entries], known), dim=-1)[which]
        with torch.enable_grad():
            out = outs[part].detach().requires_grad_()
            log_q = torch.log_softmax(logits(out, head), dim=-1)
            loss = weights[part] @ -(p * log_q).sum(-1)
        (gradient[part],) = torch.autograd.grad(loss, out)
        overlap[part] = torch.minimum(p, log_q.detach().exp()).sum(-1)  # 1 - TV
        total += loss.detach()
    return total + ((outs - outs.detach()) * gradient).sum(), overlap
