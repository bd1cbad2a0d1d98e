"""Compares training the drafter on packed sequences and on padded batches of the same harvest.

    python bench/packing.py recipes/longtail.toml [--seconds 30] [--json FILE]

A pass over the harvest is done in three ways, in turn: in packs of up to 512 entries, in which sequences follow each
other; in padded batches of sequences sorted by length, of up to 512 entries with padding (the fair baseline); and in
padded batches in random order, as data comes. That the losses are of the same entries is checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.config import load_config
from tlt.draft import trainer
from tlt.draft.buffer import Harvest
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.trainer import DrafterTrainer
from tlt.draft.unroll import Pack, _rotate_halves, bundles, pack
from tlt.drafting import Workbench, harvest
from tlt.metrics import provenance, write_json
from tlt.progress import shown

PACK = 512  # entries of a micro-batch; a recipe may have smaller ones, so that workers come back sooner
WAYS = ("packed", "padded, sorted by length", "padded, in random order")


class Padded(DrafterTrainer):
    """Trains on padded batches: R rows of N entries, the length of the longest sequence. One pass is over R x N
    entries, with attention row by row, as in other padded trainers. Padding is computed, and left out of the loss."""

    def _columns(self, layer: EagleLayer, batch: Pack, steps: int, roots: Tensor | None = None) -> list[Tensor]:
        return unroll_padded(self, layer, batch._replace(features=batch.features.to(self.dtype)), steps)


def pad(items: Sequence[Harvest], device: torch.device) -> Pack:
    """Pad items to the longest one. Padding stands behind each sequence, in segment -1, and does not count."""
    longest = max(len(item.tokens) for item in items)
    parts = []
    for row, item in enumerate(items):
        one, n = pack([item], device), longest - len(item.tokens)
        parts.append(
            Pack(
                torch.cat([one.tokens, one.tokens.new_zeros(n)]),
                torch.cat([one.features, one.features.new_zeros(n, one.features.shape[1])]),
                torch.cat([one.positions, one.positions.new_zeros(n)]),
                torch.cat([one.segments + row, one.segments.new_full((n,), -1)]),
                torch.cat([one.counted, one.counted.new_zeros(n)]),
                one.version,
            )
        )
    columns = [torch.cat(column) for column in list(zip(*parts, strict=True))[:5]]
    return Pack(*columns, version=parts[0].version)


def unroll_padded(trainer: DrafterTrainer, layer: EagleLayer, batch: Pack, steps: int) -> list[Tensor]:
    """`unroll` of tlt.draft.unroll for padded rows: [R, N, ...], causal within a row."""
    o, starts = layer.options, (batch.segments >= 0).nonzero().squeeze(1)
    rows = int(batch.segments[starts[-1]]) + 1
    N = len(batch.tokens) // rows
    share, place = o.num_heads // o.num_kv_heads, torch.arange(N)
    apart = place[:, None] - place
    bias = torch.zeros(N, N, dtype=batch.features.dtype).masked_fill_((apart < 0) | (apart >= o.window), -torch.inf)
    g, keys, values, out = layer.fuse(batch.features), [], [], []
    tokens = batch.tokens.view(rows, N)
    embedding = trainer.target.embedding.to(trainer.dtype)
    for t in range(steps):
        x, residual = layer.inputs(F.embedding(tokens.roll(-t, dims=1).flatten(), embedding), g)
        at = (batch.positions + t).clamp(max=len(trainer.cos_sin[0]) - 1)
        query, key = (
            _rotate_halves(p(x).view(rows * N, -1, o.head_dim), trainer.cos_sin, at)
            for p in (layer.q_proj, layer.k_proj)
        )
        keys.append(key.view(rows, N, o.num_kv_heads, o.head_dim).transpose(1, 2))
        values.append(layer.v_proj(x).view(rows, N, o.num_kv_heads, o.head_dim).transpose(1, 2))
        query = query.view(rows, N, o.num_kv_heads, share, o.head_dim).permute(0, 2, 3, 1, 4) * o.head_dim**-0.5
        true = query @ keys[0].transpose(2, 3)[:, :, None] + bias
        own = [(query * k[:, :, None]).sum(-1, keepdim=True) for k in keys[1:]]
        weights = torch.softmax(torch.cat([true, *own], dim=-1), dim=-1)
        mixed = weights[..., :N] @ values[0][:, :, None]
        for s, v in enumerate(values[1:]):
            mixed = mixed + weights[..., N + s, None] * v[:, :, None]
        g = layer.mlp(residual + layer.o_proj(mixed.permute(0, 3, 1, 2, 4).reshape(rows * N, -1)))
        out.append(layer.finish(g))
    return out


def padded_bundles(items: Sequence[Harvest], tokens: int) -> list[list[Harvest]]:
    """Group consecutive items into batches of up to `tokens` entries, padding counted."""
    batches: list[list[Harvest]] = [[]]
    for item in items:
        longest = max(len(other.tokens) for other in [*batches[-1], item])
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(item)
    return batches


def batches_of(way: str, items: list[Harvest], tokens: int, device: torch.device) -> list[Pack]:
    order = list(items)
    random.Random(0).shuffle(order)
    if way == "packed":
        return [pack(held, device) for held in bundles(order, tokens)]
    if way == "padded, sorted by length":
        order.sort(key=lambda item: len(item.tokens))
    return [pad(held, device) for held in padded_bundles(order, tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--tokens", type=int, default=6_000, help="of harvest")
    parser.add_argument("--seconds", type=float, default=30.0, help="after which no further pass begins")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trainer._EVERY = 1  # chains from all entries: every fourth entry would be another one in each way
    bench = Workbench.of(load_config(arguments.recipe))
    drafter = bench.config.speculation
    config = drafter.training.model_copy(update={"micro_batch_tokens": PACK, "unroll": 3})
    layer = EagleLayer(eagle_options(bench.target.options, drafter.kind, drafter.window))
    with shown():
        items = harvest(bench, layer, arguments.tokens).items
    ways = {way: batches_of(way, items, config.micro_batch_tokens, bench.target.device) for way in WAYS}
    trainers = {way: (DrafterTrainer if way == "packed" else Padded)(layer, bench.target, config) for way in WAYS}
    check(ways, trainers)
    facts = measure(trainers, ways, arguments.seconds)
    entries = sum(len(item.tokens) for item in items)
    results: dict[str, Any] = {}
    for way, seconds in facts.items():
        results[way] = {
            "micro_batches": len(ways[way]),
            "entries_computed": sum(len(batch.tokens) for batch in ways[way]),
            "seconds_a_pass": seconds,
            "sequences_per_second": len(items) / seconds,
            "tokens_per_second": entries / seconds,
        }
        print(
            f"{way}: {len(items) / seconds:.1f} sequences/s, {entries / seconds:.0f} tokens/s; "
            f"packing gains {seconds / facts['packed']:.2f}x"
        )
    gains = {way: seconds / facts["packed"] for way, seconds in facts.items()}
    lengths = sorted(len(item.tokens) for item in items)
    shape = {"sequences": len(items), "entries": entries, "median": statistics.median(lengths), "longest": lengths[-1]}
    if arguments.json:
        write_json(arguments.json, {"ways": results, "packing_gains": gains, "harvest": shape, **provenance()})


def check(ways: dict[str, list[Pack]], trainers: dict[str, DrafterTrainer]) -> None:
    """Check that judging the same entries gives the same numbers in all ways."""
    sums = []
    for way, batches in ways.items():
        parts = [trainers[way].judge([trainers[way].layer], batch) for batch in batches]
        sums.append([sum(column) for column in zip(*((*found, count) for [found], count in parts), strict=True)])
    assert all(abs(a - b) <= 1e-3 * abs(a) for other in sums[1:] for a, b in zip(sums[0], other, strict=True)), sums


def measure(trainers: dict[str, DrafterTrainer], ways: dict[str, list[Pack]], seconds: float) -> dict[str, float]:
    """Seconds of a pass in each way: the median of as many passes as there is time for, at least one. The ways take
    turns after each twentieth of a pass, so that what else the machine does slows all of them."""
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for way, batches in ways.items():
        trainers[way].step(batches[0])
    began = time.perf_counter()
    while not taken["packed"] or time.perf_counter() - began < seconds:
        spent = dict.fromkeys(ways, 0.0)
        for part in range(20):
            for way, batches in ways.items():
                start = time.perf_counter()
                for batch in batches[len(batches) * part // 20 : len(batches) * (part + 1) // 20]:
                    trainers[way].reach = float(trainers[way].config.unroll)  # train all guesses, right or not
                    trainers[way].step(batch)
                spent[way] += time.perf_counter() - start
        for way in ways:
            taken[way].append(spent[way])
    return {way: statistics.median(passes) for way, passes in taken.items()}


if __name__ == "__main__":
    main()
