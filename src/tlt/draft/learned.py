"""Learned drafter in the engine: an `EagleLayer` with the drafter protocol, for all rows at once.

The keys and values of a single layer depend on an entry's own input alone, not on attention. So the cache of a row can
be rebuilt exactly from its feature window at any time, in one batched pass: after rounds without this drafter, after a
swap, after a preemption.

So a slot of the cache holds the window and one round's draft tokens. The draft tokens follow the committed entries, as
the target's draft nodes follow its committed tokens.

Shapes: B rows, n nodes of a level a row, M entries, D hidden, H query heads, K key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.attention.backend import Entries, HeadShape
from tlt.attention.choose import attention_for
from tlt.draft.drafter import Candidates, Level, Sources
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureView
from tlt.models.decoder import Decoder, RMSNorm, rotate_, to_pairs
from tlt.models.product import Product
from tlt.sampling import log_law
from tlt.types import MOST_GUESSES, Request

_TABLE = 1 << 23  # elements up to which the contribution of every token's embedding is precomputed


class EagleDrafter:
    name = "eagle"

    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        self.options = layer.options
        self.acceptance_rate = layer.acceptance_rate
        self.target = target  # its embedding is read at every use, because it changes with its version
        self.load(layer)

    @torch.no_grad()
    def load(self, layer: EagleLayer) -> None:
        """Load the layer's weights as a few products: fused, with the norms' weights multiplied in. `begin` must
        follow."""
        o, target = self.options, self.target
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        state = {name: t.detach().to(target.device, wide) for name, t in layer.state_dict().items()}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {n: RMSNorm(state[n + ".weight"], o.rms_norm_eps) for n in norms if n + ".weight" in state}

        def normed(name: str, weight: Tensor) -> Tensor:
            """Fold the norm's own weight into `weight` [D, ...], which then applies to the norm's `unit`."""
            return self.norms[name].weight[:, None] * weight

        q, k = (to_pairs(state[f"{x}_proj.weight"], o.head_dim) for x in "qk")
        qkv, fc = torch.cat([q, k, state["v_proj.weight"]]).t(), state["fc.weight"].t()
        # contributions of the embedding and the hidden states to the first product: [residual of eagle1 | q | k | v]
        if o.kind == "eagle3":
            embedding, features = qkv.split(o.hidden_size)
            parts = normed("input_layernorm", embedding), normed("hidden_norm", features)
        else:
            parts = torch.cat([fc, fc @ qkv], dim=1).split(o.hidden_size)
        gate_up = torch.cat([state["gate_proj.weight"], state["up_proj.weight"]]).t()
        matrices = (*parts, fc, state["o_proj.weight"].t(), normed("post_attention_layernorm", gate_up))
        self.vocabulary = None if layer.vocabulary is None else layer.vocabulary.to(target.device)
        self.from_embedding, self.from_features, self.fc, self.out, self.gate_up, self.down = (
            Product(weight.t().to(target.dtype)) for weight in (*matrices, state["down_proj.weight"].t())
        )

    @torch.no_grad()
    def begin(self, window: FeatureView | None) -> None:
        assert window is not None, "the learned drafter needs the target's hidden states"
        assert window.layout == self.options.layout, "the window must have this drafter's layout"
        o, target = self.options, self.target
        self.window = window
        shape = HeadShape(1, o.num_heads, o.num_kv_heads, o.head_dim, target.dtype, target.device)
        self.attention = attention_for(shape)
        self.ready: list[int] = []  # entries below this one are in the cache
        small = o.vocab_size * self.from_embedding.weight.shape[1] <= _TABLE
        self.table = self._contribution(target.embedding) if small else None
        self.to_logits = target.to_logits if self.vocabulary is None else Product(target.head[self.vocabulary])

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.ready.append(0)
        if len(self.ready) > self.attention.slots:
            self.attention.resize(max(8, 2 * self.attention.slots), self.window.capacity)

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...  # the window has the entries

    def close(self, row: int, last: int) -> None:
        if row != last:
            self.attention.copy(last, row, self.window.capacity)
        self.attention.wipe(last, 0)  # the next row must not find values that are not finite
        self.ready[row] = self.ready[last]
        self.ready.pop()

    @torch.inference_mode()
    def predict(self, level: Level) -> Candidates:
        self.hidden = self._first(level.alive[:, 0]) if level.depth == 0 else self._deeper(level)  # [B * n, D]
        normed = self.norms["norm"](self.hidden) if "norm" in self.norms else self.hidden
        logits = self.to_logits(normed).view(*level.tokens.shape, -1)
        log_q = log_law(logits, level.law)[0]
        if level.depth == 0 and self.blind:  # rows without hidden states get no proposal
            log_q[self._tensor(np.array(self.blind))] = -torch.inf
        return Candidates(None if self.vocabulary is None else self.vocabulary.expand_as(log_q), log_q)

    # -- the roots, from the target's hidden states --------------------------------------------------------------------

    def _first(self, alive: np.ndarray) -> Tensor:
        """Write the window's entries that the cache lacks, and attend from each row's last entry. Rows without a draft
        are written later."""
        window, starts, lengths = self.window, self.window.starts, self.window.lengths
        todo: list[tuple[int, int]] = []
        last: list[int] = []
        for row, (start, length, wanted) in enumerate(zip(starts, lengths, alive.tolist(), strict=True)):
            # always include the last entry, for its query; a row without entries gets an empty one
            low = max(min(start, length - 1), min(self.ready[row], length - 1), 0) if wanted else max(length - 1, 0)
            todo += [(row, p) for p in range(low, max(length, 1))]
            last.append(len(todo) - 1)
            self.ready[row] = length if wanted else min(self.ready[row], length - 1)
        self.blind = [row for row, start in enumerate(starts) if start >= lengths[row]]
        rows, entries = np.array(todo).T
        at, positions = self._tensor(np.stack([rows * window.capacity + entries % window.capacity, entries]))
        g = window.features.flatten(0, 1).index_select(0, at)
        g = (
            self.fc(g[:, : 3 * self.options.hidden_size])
            if self.options.kind == "eagle3"
            else g[:, -self.options.hidden_size :]
        )
        q, kv, residual = self._project(window.tokens.view(-1).index_select(0, at), g, self.target.cis(positions))
        held = [max(length, 1) for length in lengths]
        starts = [min(start, count - 1) for start, count in zip(starts, held, strict=True)]
        caught_up = len(todo) == len(last)
        self.plan = self.attention.plan_draft(held, starts, None if caught_up else Entries(rows, entries))
        guesses = np.minimum(np.add.outer(held, range(MOST_GUESSES)), self.options.max_positions - 1)
        self.cis = self.target.cis(self._tensor(guesses))  # [B, depth, 1, E/2]
        if not caught_up:
            at_last = self._tensor(np.array(last))
            q, residual = q[at_last], residual[at_last]
        return self._attend(q, kv, residual)

    # -- deeper levels, from its own output ----------------------------------------------------------------------------

    def _deeper(self, level: Level) -> Tensor:
        B, n = level.tokens.shape
        g, cis = self.hidden, self.cis[:, level.depth - 1]
        parents = None
        if n > 1 or len(g) > B:
            parents = self._tensor(level.parents)
            g = g[self._tensor((level.parents + np.arange(B)[:, None] * (len(g) // B)).ravel())]
            cis = cis.repeat_interleave(n, dim=0)
        q, kv, residual = self._project(self._tensor(level.tokens.ravel()), g, cis)
        self.plan = self.attention.deeper(self.plan, n, parents)
        return self._attend(q, kv, residual)

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.target.device)

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"].unit(embedded) if self.options.kind == "eagle3" else embedded
        return self.from_embedding(normed)

    def _project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map M tokens and the states before them to queries [M, H, E], keys and values [M, 2, K, E], residual [M,
        D]."""
        o = self.options
        if self.table is not None:
            embedded = F.embedding(tokens, self.table)
        else:
            embedded = self._contribution(F.embedding(tokens, self.target.embedding))
        if o.kind == "eagle3":
            residual, qkv = g, self.from_features(self.norms["hidden_norm"].unit(g), embedded)
        else:
            both = self.from_features(g, embedded)
            residual, qkv = both[:, : o.hidden_size], both[:, o.hidden_size :]
        heads = qkv.view(len(g), -1, o.head_dim)
        rotate_(heads[:, : o.num_heads + o.num_kv_heads], cis)
        return heads[:, : o.num_heads], heads[:, o.num_heads :].view(-1, 2, o.num_kv_heads, o.head_dim), residual

    def _attend(self, query: Tensor, kv: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output [B * n, D] for queries [B * n, H, E]; `kv` [M, 2, K, E] goes into the cache."""
        mixed = self.attention.attend(self.plan, 0, query, kv[:, 0], kv[:, 1])
        x = self.out(mixed, residual)
        gate, up = self.gate_up(self.norms["post_attention_layernorm"].unit(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), x)


def make(sources: Sources) -> EagleDrafter:
    assert sources.layer, "the learned drafter needs weights"
    return EagleDrafter(sources.layer, sources.target)
