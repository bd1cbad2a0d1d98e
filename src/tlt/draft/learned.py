"""The learned drafter at work: an `EagleLayer` behind the drafter protocol, for all rows at once.

One layer has keys and values that depend on an entry's own input alone, never on what it attended. So the cache of a
row can be rebuilt from its feature window at any moment, in one batched pass, and is then what it would have been:
after rounds without this drafter, after a swap, after a preemption.

The cache is a ring a row: [guesses of this round | entry p at p modulo its size]; attention does not mind the order.
Shapes: B rows, n nodes of a level a row, M entries, D hidden, H query heads, K key-value heads, E head size,
S guesses, W window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.draft.drafter import Candidates, Level
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureWindow
from tlt.models.decoder import Decoder, RMSNorm, rotate_, to_pairs
from tlt.sampling import log_law
from tlt.types import Request

_GUESSES = 64  # cache entries for one round's own guesses
_TABLE = 1 << 23  # what every token's embedding contributes is computed ahead where the vocabulary allows


class EagleDrafter:
    name = "eagle"

    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        self.options = layer.options
        self.agreement = layer.agreement
        self.target = target  # its embedding and head are read at every use: they are always those of its version
        self.load(layer)

    @torch.no_grad()
    def load(self, layer: EagleLayer) -> None:
        """Take the weights, as few and flat products of them: fused, transposed, with attention's scale and the weights
        of norms folded in. `begin` follows."""
        o, target = self.options, self.target
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        state = {name: t.detach().to(target.device, wide) for name, t in layer.state_dict().items()}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {n: RMSNorm(state[n + ".weight"], o.rms_norm_eps) for n in norms if n + ".weight" in state}

        def normed(name: str, weight: Tensor) -> Tensor:
            """[D, ...]: what takes the norm's `unit` as `weight` would take all of it."""
            return self.norms[name].weight[:, None] * weight

        q, k = (to_pairs(state[f"{x}_proj.weight"], o.head_dim) for x in "qk")
        qkv, fc = torch.cat([q * o.head_dim**-0.5, k, state["v_proj.weight"]]).t(), state["fc.weight"].t()
        # what the embedding and the features contribute to the layer's first product: [residual of eagle1 | q | k | v]
        if o.kind == "eagle3":
            embedding, features = qkv.split(o.hidden_size)
            parts = normed("input_layernorm", embedding), normed("hidden_norm", features)
        else:
            parts = torch.cat([fc, fc @ qkv], dim=1).split(o.hidden_size)
        gate_up = torch.cat([state["gate_proj.weight"], state["up_proj.weight"]]).t()
        matrices = (*parts, fc, state["o_proj.weight"].t(), normed("post_attention_layernorm", gate_up))
        self.from_embedding, self.from_features, self.fc, self.out, self.gate_up, self.down = (
            weight.to(target.dtype).contiguous() for weight in (*matrices, state["down_proj.weight"].t())
        )
        self.bias_dtype = np.float64 if target.dtype == torch.float64 else np.float32

    @torch.no_grad()
    def begin(self, window: FeatureWindow | None) -> None:
        assert window is not None, "the engine keeps what the learned drafter reads"
        assert window.layout == self.options.layout, "and lays it out as this drafter asks"
        self.window = window
        self.kv = self._empty(0)  # [2, rows, K, entries, E]: keys and values
        self.ready: list[int] = []  # entries below this one are in the cache
        small = self.options.vocab_size * self.from_embedding.shape[1] <= _TABLE
        self.table = self._contribution(self.target.embedding) if small else None

    def _empty(self, rows: int) -> Tensor:
        o, target = self.options, self.target
        shape = (2, rows, o.num_kv_heads, _GUESSES + self.window.capacity, o.head_dim)
        return torch.zeros(shape, dtype=target.dtype, device=target.device)

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.ready.append(0)
        if len(self.ready) > self.kv.shape[1]:
            self.kv = torch.cat([self.kv, self._empty(max(8, self.kv.shape[1]))], dim=1)

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...  # the window says what there is

    def close(self, row: int) -> None:
        last = len(self.ready) - 1
        if row != last:
            self.kv[:, row] = self.kv[:, last]
            self.ready[row] = self.ready[last]
        self.ready.pop()

    @torch.inference_mode()
    def predict(self, level: Level) -> Candidates:
        self.hidden = self._first() if level.depth == 0 else self._deeper(level)  # [B * n, D]
        normed = self.norms["norm"](self.hidden) if "norm" in self.norms else self.hidden
        logits = F.linear(normed, self.target.head).view(*level.tokens.shape, -1)
        log_q = log_law(logits, level.law)[0]
        if level.depth == 0 and self.blind:  # nothing to draft from: nothing is proposed
            log_q[self.blind] = -torch.inf
        return Candidates(None, log_q)

    # -- the roots: what the target has computed -----------------------------------------------------------------------

    def _first(self) -> Tensor:
        """Catch up with the window, and attend from each row's last entry."""
        window = self.window
        starts = [window.start(row) for row in range(len(self.ready))]
        todo: list[tuple[int, int]] = []
        last: list[int] = []
        for row, (start, length) in enumerate(zip(starts, window.length, strict=True)):
            # the last entry always, for its query; a row that has none yet gets an empty one, which sees nothing
            low = max(min(start, length - 1), min(self.ready[row], length - 1), 0)
            todo += [(row, p) for p in range(low, max(length, 1))]
            last.append(len(todo) - 1)
        self.ready = list(window.length)
        self.blind = [row for row, start in enumerate(starts) if start >= window.length[row]]
        rows, entries = np.array(todo).T
        places = entries % window.capacity
        at = self._tensor(rows), self._tensor(places)
        g = window.features[at]
        g = (
            g[:, : 3 * self.options.hidden_size] @ self.fc
            if self.options.kind == "eagle3"
            else g[:, -self.options.hidden_size :]
        )
        q, kv, residual = self._project(window.tokens[at], g, self.target.cis(self._tensor(entries)))
        self.kv.view(-1, kv.shape[-1]).index_copy_(0, self._tensor(self._ring(rows, places)), kv.flatten(0, 2))
        self._see(starts, window.length)
        if len(todo) > len(last):
            ends = self._tensor(np.array(last))
            q, residual = q[ends], residual[ends]
        return self._attend(q, residual, 1)

    def _ring(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Where the keys and values [M, 2, K] of entries of the ring lie, among all of the cache."""
        _, held, heads, size, _ = self.kv.shape
        both, head = np.arange(2)[:, None], np.arange(heads)
        return (((both * held + rows[:, None, None]) * heads + head) * size + _GUESSES + places[:, None, None]).ravel()

    def _see(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """What of the cache is attended: its first `end` entries, less the room for guesses to come; and what of that
        each row may see: `bias` [B, 1, end], 0 or -inf, None where every row sees all."""
        B, capacity, longest = len(lengths), self.window.capacity, max(lengths)
        self.free, self.end = _GUESSES, _GUESSES + min(capacity, longest)
        self.live = self.kv[:, :B]
        self.keys, self.values = self.live.flatten(1, 2)[:, :, : self.end]  # [B * K, end, E]
        self.bias = self.bias_there = None
        if max(starts) > 0 or min(lengths) < longest:
            low, high = np.array(starts), np.array(lengths)
            place = np.arange(self.end - _GUESSES)
            entry = place + (high[:, None] - 1 - place) // capacity * capacity  # the newest that lies at each place
            bias = np.zeros((B, 1, self.end), dtype=self.bias_dtype)
            bias[:, 0, _GUESSES:][(entry < low[:, None]) | (entry >= high[:, None])] = -np.inf
            self._show(bias)
        depths = torch.arange(1, _GUESSES + 1, device=self.target.device)
        last = self._tensor(np.array(lengths) - 1)[:, None]
        self.cis = self.target.cis((last + depths).clamp_(max=self.options.max_positions - 1))  # [B, depth, 1, E/2]

    # -- below: what the drafter said itself ---------------------------------------------------------------------------

    def _deeper(self, level: Level) -> Tensor:
        B, n = level.tokens.shape
        assert n <= self.free, "the configuration keeps trees within the cache"
        g, cis = self.hidden, self.cis[:, level.depth - 1]
        if n > 1 or len(g) > B:
            g = g[self._tensor((level.parents + np.arange(B)[:, None] * (len(g) // B)).ravel())]
            cis = cis.repeat_interleave(n, dim=0)
        q, kv, residual = self._project(self._tensor(level.tokens.ravel()), g, cis)
        self.free -= n  # the newest guesses stand first, so that all of them and the ring are one slice
        self.live.narrow(3, self.free, n).copy_(kv.view(B, n, *kv.shape[1:]).permute(2, 0, 3, 1, 4))
        if n > 1 or (self.bias is not None and self.bias.shape[1] > 1):
            self._branch(level.parents)
        return self._attend(q, residual, n)

    def _branch(self, parents: np.ndarray) -> None:
        """The newest n guesses of a row [B, n] each see themselves and what their parent sees; in a chain, all before
        them."""
        B, n = parents.shape
        bias = np.zeros((B, n, self.end), dtype=self.bias_dtype)
        if self.bias is not None:
            bias[:] = self.bias[np.arange(B)[:, None], parents]
        bias[:, :, self.free : self.free + n] = np.where(np.eye(n, dtype=bool), 0.0, -np.inf)
        self._show(bias)

    def _show(self, bias: np.ndarray) -> None:
        self.bias, self.bias_there = bias, self._tensor(bias).to(self.target.dtype)[:, None, None]

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.target.device)

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"].unit(embedded) if self.options.kind == "eagle3" else embedded
        return normed @ self.from_embedding

    def _project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """M tokens and the features before them -> queries [M, H, E], keys and values [M, 2, K, E], residual [M, D]."""
        o = self.options
        if self.table is not None:
            embedded = F.embedding(tokens, self.table)
        else:
            embedded = self._contribution(F.embedding(tokens, self.target.embedding))
        if o.kind == "eagle3":
            residual, qkv = g, torch.addmm(embedded, self.norms["hidden_norm"].unit(g), self.from_features)
        else:
            both = torch.addmm(embedded, g, self.from_features)
            residual, qkv = both[:, : o.hidden_size], both[:, o.hidden_size :]
        heads = qkv.view(len(g), -1, o.head_dim)
        rotate_(heads[:, : o.num_heads + o.num_kv_heads], cis)
        return heads[:, : o.num_heads], heads[:, o.num_heads :].view(-1, 2, o.num_kv_heads, o.head_dim), residual

    def _attend(self, query: Tensor, residual: Tensor, n: int) -> Tensor:
        """query [B * n, H, E] over all guesses and the ring, as `bias` allows -> the layer's output [B * n, D]."""
        o, B = self.options, len(query) // n
        share = o.num_heads // o.num_kv_heads
        if n > 1:
            query = query.view(B, n, o.num_kv_heads, share, o.head_dim).permute(0, 2, 3, 1, 4)
        folded = query.reshape(B * o.num_kv_heads, share * n, o.head_dim)
        keys, values = self.keys[:, self.free :], self.values[:, self.free :]
        scores = torch.bmm(folded, keys.transpose(1, 2))
        if self.bias_there is not None:
            by_node = scores.view(B, o.num_kv_heads, share, n, -1)
            by_node += self.bias_there[..., self.free :]
        wide = torch.float32 if self.target.dtype == torch.bfloat16 else None
        mixed = torch.bmm(torch.softmax(scores, dim=-1, dtype=wide).to(values.dtype), values)
        if n > 1:
            mixed = mixed.view(B, o.num_kv_heads, share, n, o.head_dim).permute(0, 3, 1, 2, 4)
        x = torch.addmm(residual, mixed.reshape(B * n, -1), self.out)
        gate, up = (self.norms["post_attention_layernorm"].unit(x) @ self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)
