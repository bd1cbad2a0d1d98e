"""Training of the learned drafter on the harvest, a short step at a time.

Unrolled as at inference (training-time test, EAGLE-3, arXiv 2503.01840): column 0 reads the target's features; column
t reads the layer's own output of column t - 1 in their place, and attends the true entries up to its root and its own
chain of guesses. The teacher is the target's full law, recomputed from its last hidden state with the head of that
version.

Sequences are packed one behind the other; attention stays inside each.
Shapes: T entries of a pack, D hidden, H query heads, K key-value heads, E head size, V vocabulary.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.config import DrafterTrainConfig
from tlt.draft.buffer import Harvest
from tlt.draft.eagle import EagleLayer
from tlt.models.decoder import Decoder

_MOMENTS = ("exp_avg", "exp_avg_sq")
_QUERIES = 128  # entries of a block of attention
_LOSS_ROWS = 1 << 22  # logits of a chunk of the loss: entries x vocabulary
_LATELY = 10  # steps that `reach` is a mean of, about


class Interrupted(Exception):
    """A step was asked to stop amid its work; it changed nothing."""


class Pack(NamedTuple):
    tokens: Tensor
    """[T] the token that follows each entry"""
    features: Tensor
    """[T, F]"""
    positions: Tensor
    """[T] true ones"""
    segments: Tensor
    """[T] which harvest an entry is of"""
    counted: Tensor
    """[T] bool: the entry's column 0 predicts a token of a response"""
    version: int
    """of the target that computed the features"""


def pack(items: Sequence[Harvest], device: torch.device) -> Pack:
    """All of one target version."""
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
    """One pass over the items in random order, `tokens` entries a pack, and at least one item."""
    order = list(items)
    rng.shuffle(order)
    for held in bundles(order, tokens):
        yield pack(held, device)


def bundles(items: Iterable[Harvest], tokens: int) -> Iterator[list[Harvest]]:
    """In this order, those that follow each other and are of one target version, up to `tokens` entries together."""
    held: list[Harvest] = []
    for item in items:
        full = sum(len(other.tokens) for other in held) + len(item.tokens) > tokens
        if held and (full or item.target_version != held[0].target_version):
            yield held
            held = []
        held.append(item)
    if held:
        yield held


# -- losses: log p and log q [M, V] -> [M] -------------------------------------------------------------------------


def cross_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    return -(log_p.exp() * log_q).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Shared-noise draft and target agree with a chance of at least (1 - TV) / (1 + TV) (arXiv 2408.07978)."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL where the laws are far apart, total variation where they are close (the LK loss of speculators)."""
    distance = total_variation(log_p, log_q)
    weight = torch.exp(-3.0 * (1 - distance.detach()))
    return weight * (log_p.exp() * (log_p - log_q)).sum(-1) + (1 - weight) * distance


def agreement(log_p: Tensor, log_q: Tensor, likeliest: int = 8) -> Tensor:
    """1 - the chance that argmax(log p + g) = argmax(log q + g): for each v, 1 / sum_u max(p_u / p_v, q_u / q_v); over
    the target's `likeliest` tokens v."""
    top_p, ids = log_p.topk(min(likeliest, log_p.shape[-1]), dim=-1)
    ratio_p = log_p[:, None] - top_p[..., None]
    ratio_q = log_q[:, None] - log_q.gather(-1, ids)[..., None]
    return 1 - torch.maximum(ratio_p, ratio_q).logsumexp(-1).neg().exp().sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": cross_entropy,
    "total_variation": total_variation,
    "hybrid": hybrid,
    "agreement": agreement,
}


# -- the unrolled pass ---------------------------------------------------------------------------------------------


def unroll(
    layer: EagleLayer, embedding: Tensor, cos_sin: tuple[Tensor, Tensor], batch: Pack, steps: int
) -> Iterator[Tensor]:
    """Columns 0 .. steps - 1: what the head takes at every entry, [T, D] each. Entry i of column t predicts the token
    t + 2 behind token i; at the end of a sequence its input is some other token, and its output means nothing.

    `cos_sin` [positions, E] each, of the target's rotary embedding in Hugging Face's order.
    """
    o, T = layer.options, len(batch.tokens)
    share = o.num_heads // o.num_kv_heads
    blocks = _blocks(batch, o.window)
    g = layer.fuse(batch.features)
    keys: list[Tensor] = []  # of each column, [K, T, E]
    values: list[Tensor] = []
    for t in range(steps):
        x, residual = layer.inputs(F.embedding(batch.tokens.roll(-t), embedding), g)
        at = (batch.positions + t).clamp(max=len(cos_sin[0]) - 1)
        query, key = (_rotate_halves(p(x).view(T, -1, o.head_dim), cos_sin, at) for p in (layer.q_proj, layer.k_proj))
        keys.append(key.transpose(0, 1))
        values.append(layer.v_proj(x).view(T, o.num_kv_heads, o.head_dim).transpose(0, 1))
        query = query.view(T, o.num_kv_heads, share, o.head_dim).permute(1, 2, 0, 3) * o.head_dim**-0.5
        mixed = torch.cat([_attend(query, keys, values, block) for block in blocks], dim=2)
        g = layer.mlp(residual + layer.o_proj(mixed.permute(2, 0, 1, 3).reshape(T, -1)))
        yield layer.finish(g)


class _Block(NamedTuple):
    """Entries [low, high) as queries, and the entries [first, high) that some of them see."""

    first: int
    low: int
    high: int
    bias: Tensor
    """[high - low, high - first] 0 where one sees the other, else -inf"""


def _blocks(batch: Pack, window: int) -> list[_Block]:
    """Of a pack of many short sequences, or of a long causal one, most pairs of entries see nothing of each other: so
    attention goes block by block, of some whole sequences or of a part of one, over no more than it sees."""
    place = torch.arange(len(batch.tokens), device=batch.tokens.device)
    blocks = []
    for first, low, high in _cuts(torch.unique_consecutive(batch.segments, return_counts=True)[1].tolist()):
        first = max(first, low - window + 1)
        apart = place[low:high, None] - place[first:high]
        seen = (apart >= 0) & (apart < window)
        seen &= batch.segments[low:high, None] == batch.segments[first:high]
        bias = torch.zeros(seen.shape, dtype=batch.features.dtype, device=place.device)
        blocks.append(_Block(first, low, high, bias.masked_fill_(~seen, -torch.inf)))
    return blocks


def _cuts(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first, low, high) of the blocks of sequences of these lengths, up to `_QUERIES` entries each."""
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


def _attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], block: _Block) -> Tensor:
    """The block's queries, of [K, share, T, E], over the true entries (column 0) and each over its own chain of guesses
    (the later columns)."""
    first, low, high, bias = block
    query = query[:, :, low:high]
    true = query @ keys[0][:, None, first:high].transpose(2, 3) + bias  # [K, share, high - low, high - first]
    own = [(query * k[:, None, low:high]).sum(-1, keepdim=True) for k in keys[1:]]
    seen, chain = torch.softmax(torch.cat([true, *own], dim=-1), dim=-1).split([high - first, len(own)], dim=-1)
    mixed = seen @ values[0][:, None, first:high]
    for weight, v in zip(chain.unbind(-1), values[1:], strict=True):
        mixed = mixed + weight[..., None] * v[:, None, low:high]
    return mixed


def _rotate_halves(x: Tensor, cos_sin: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """[T, heads, E] in Hugging Face's order of pairs (i, i + E/2)."""
    cos, sin = (table[positions, None] for table in cos_sin)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-right, left], dim=-1) * sin


class DrafterTrainer:
    """Owns the trainable layer in float32 or wider, and its optimizer. The target's embedding and head are read from
    the decoder at every step, so they are always those of its present version; the teacher's head is that of the
    version which computed the harvest, kept by `target_moved`."""

    def __init__(self, layer: EagleLayer, target: Decoder, config: DrafterTrainConfig, seed: int = 0) -> None:
        self.layer, self.target, self.config = layer, target, config
        self.dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        layer.to(target.device, self.dtype)
        self.optimizer = torch.optim.AdamW(
            layer.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.rng = random.Random(seed)
        self.heads = {target.version: target.head}
        self.steps = 0.0
        """a fraction where replicas were averaged"""
        self.reach = float(config.unroll)
        """guesses that a chain got right lately, of those it was trained on"""
        self.rate_scale = 1.0
        """the caller's schedule: a factor on the learning rate"""
        cis = target.cis(torch.arange(target.options.max_positions, device=target.device))[:, 0].repeat(1, 2)
        self.cos_sin = (cis.real.to(self.dtype), cis.imag.to(self.dtype))

    def target_moved(self, held: Collection[int]) -> None:
        """To be called after the decoder took new weights: keep the heads of the versions that are `held` in harvest.
        (`Decoder.load` makes new tensors, so an old head stays what it was.)"""
        self.heads = {version: head for version, head in self.heads.items() if version in held}
        self.heads[self.target.version] = self.target.head

    @property
    def columns(self) -> int:
        """How many guesses in a row are trained: one more than chains get right, as those behind a wrong one are of no
        use yet and cost as much; up to `unroll`."""
        return min(self.config.unroll, math.ceil(self.reach) + 1)

    def loss(self, batch: Pack, stop: Callable[[], bool] = lambda: False) -> tuple[Tensor, list[float]]:
        """The mean loss over the columns, weighted by `decay`; and the mean of 1 - TV of each column. Raises
        Interrupted here, or in `backward`, where `stop` says so at the next column."""

        def look(gradient: Tensor | None = None) -> None:
            if stop():
                raise Interrupted

        total, weight, overlaps = torch.zeros((), dtype=self.dtype, device=batch.tokens.device), 0.0, []
        columns, teacher = self._columns(self.layer, batch, self.columns)
        for t, out in enumerate(columns):
            look()
            if out.requires_grad:
                out.register_hook(look)
            ahead = 1 + t
            inside = batch.segments[ahead:] == batch.segments[:-ahead]
            where = (inside & batch.counted[t : len(batch.counted) - 1]).nonzero().squeeze(1)
            if len(where) == 0:
                overlaps.append(float("nan"))
                continue
            loss, overlap = self._chunked(out[where], teacher[where + ahead], batch.version)
            total = total + self.config.decay**t * loss.mean()
            weight += self.config.decay**t
            overlaps.append(overlap.mean().item())
        return total / max(weight, 1e-9), overlaps

    @torch.no_grad()
    def judge(
        self, layer: EagleLayer, batch: Pack, stop: Callable[[], bool] = lambda: False
    ) -> tuple[float, float, int]:
        """What a chain of `unroll` guesses from an entry commits, and how often its first guess is right, summed over
        entries; and how many there are: those whose whole chain is within their sequence.

        1 - TV is about the chance that a guess is right (section 2 of the design: 0.90 where it is 0.88), and a guess
        counts only behind right ones: so speculation lives on the products along the columns. Raises Interrupted where
        `stop` says so at the next column.
        """
        deepest = self.config.unroll
        inside = batch.segments[deepest:] == batch.segments[:-deepest]
        where = (inside & batch.counted[: len(inside)]).nonzero().squeeze(1)
        columns, teacher = self._columns(layer, batch, deepest)
        overlaps = []
        for t, out in enumerate(columns):
            if stop():
                raise Interrupted
            overlaps.append(self._chunked(out[where], teacher[where + 1 + t], batch.version)[1])
        reached = torch.stack(overlaps).cumprod(0)
        return len(where) + reached.sum().item(), reached[0].sum().item(), len(where)

    def _columns(self, layer: EagleLayer, batch: Pack, steps: int) -> tuple[Iterable[Tensor], Tensor]:
        """What the head takes, [T, D]: of the drafter in each column, and of the target."""
        batch = batch._replace(features=batch.features.to(self.dtype))
        columns = unroll(layer, self.target.embedding.to(self.dtype), self.cos_sin, batch, steps)
        return columns, batch.features[:, -layer.options.hidden_size :]

    def _chunked(self, out: Tensor, teacher: Tensor, version: int) -> tuple[Tensor, Tensor]:
        """Loss and overlap of M entries [M], a chunk at a time, so that no [M, V] tensor outlives its chunk."""
        head, known = self.target.head.to(self.dtype), self.heads[version].to(self.dtype)

        def chunk(out: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
            log_p = torch.log_softmax(F.linear(teacher, known), dim=-1)
            log_q = torch.log_softmax(F.linear(out, head), dim=-1)
            return LOSSES[self.config.loss](log_p, log_q), 1 - total_variation(log_p, log_q.detach())

        rows = max(1, _LOSS_ROWS // len(head))
        if len(out) <= rows:
            return chunk(out, teacher)
        parts = [
            checkpoint(chunk, out[i : i + rows], teacher[i : i + rows], use_reentrant=False)
            for i in range(0, len(out), rows)
        ]
        loss, overlap = (torch.cat(x) for x in zip(*parts, strict=True))
        return loss, overlap

    def step(self, batch: Pack, stop: Callable[[], bool] = lambda: False) -> list[float]:
        """One optimizer step, none where the gradient is not finite; returns the mean of 1 - TV of each column, before
        it. Raises Interrupted within a column's time where `stop` says so."""
        rate = self.config.learning_rate * self.rate_scale * min(1.0, (self.steps + 1) / self.config.warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss, overlaps = self.loss(batch, stop)
        if all(math.isnan(overlap) for overlap in overlaps):
            return overlaps
        loss.backward()
        right = sum(accumulate((x for x in overlaps if not math.isnan(x)), mul))
        self.reach += (right - self.reach) / _LATELY
        norm = torch.nn.utils.clip_grad_norm_(self.layer.parameters(), self.config.max_grad_norm)
        if norm.isfinite():  # one bad batch must not end the drafter
            self.optimizer.step()
            self.steps += 1
        return overlaps

    def state(self) -> dict[str, Tensor]:
        """All that a step changes: the weights, both moments of Adam, the number of steps, `reach`; not copies."""
        numbers = {"steps": self.steps, "reach": self.reach}
        tensors = {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
        for name, parameter in self.layer.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            tensors[f"weight.{name}"] = parameter.detach()
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(parameter))
        return tensors

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another trainer's `state`, or from a mean of several."""
        self.steps, self.reach = float(state["steps"]), float(state["reach"])
        for name, parameter in self.layer.named_parameters():
            parameter.copy_(state[f"weight.{name}"])
            moments = {m: state[f"{m}.{name}"].to(parameter.device, parameter.dtype, copy=True) for m in _MOMENTS}
            self.optimizer.state[parameter] = {"step": torch.tensor(self.steps), **moments}

    def epoch(self, items: Iterable[Harvest]) -> Iterator[list[float]]:
        """One pass over the harvest; gives what `step` gives, so that a caller may stop in between."""
        for batch in packs(items, self.config.micro_batch_tokens, self.target.device, self.rng):
            yield self.step(batch)
