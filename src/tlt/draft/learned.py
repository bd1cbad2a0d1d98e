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
from tlt.models.decoder import Decoder, RMSNorm, rotate_
from tlt.sampling import log_law
from tlt.types import Request

_GUESSES = 64  # cache entries for one round's own guesses
_TABLE = 1 << 23  # what every token's embedding contributes is computed ahead where the vocabulary allows


class EagleDrafter:
    name = "eagle"

    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        self.options = layer.options
        self.published = layer.published
        self.target = target  # its embedding and head are read at every use: they are always those of its version
        self.load(layer)

    @torch.no_grad()
    def load(self, layer: EagleLayer) -> None:
        """Take the weights: fused and transposed copies, attention's scale folded in. `begin` follows."""
        o, target = self.options, self.target
        state = {name: t.detach().to(target.device, target.dtype) for name, t in layer.state_dict().items()}
        q, k = (_pairs(state[f"{x}_proj.weight"], o.head_dim) for x in "qk")
        qkv = torch.cat([q * o.head_dim**-0.5, k, state["v_proj.weight"]]).t().contiguous()
        fc = state["fc.weight"].t().contiguous()
        # what the embedding and the features [D, ...] contribute to the first product of the layer, apart
        self.from_embedding, self.from_features = (qkv if o.kind == "eagle3" else fc).split(o.hidden_size)
        self.qkv, self.fc = qkv, fc
        self.out = state["o_proj.weight"].t().contiguous()
        self.gate_up = torch.cat([state["gate_proj.weight"], state["up_proj.weight"]]).t().contiguous()
        self.down = state["down_proj.weight"].t().contiguous()
        self.bias_dtype = np.float64 if target.dtype == torch.float64 else np.float32
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {n: RMSNorm(state[n + ".weight"], o.rms_norm_eps) for n in norms if n + ".weight" in state}

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
        """How much of the ring is attended, and what of it each row may see: `seen` [B, 1, C], 0 at its entries and
        -inf elsewhere; None where every row sees all."""
        capacity, longest = self.window.capacity, max(lengths)
        self.ring_used, self.guesses = min(capacity, longest), 0
        self.seen = None
        if max(starts) > 0 or min(lengths) < longest:
            low, high = np.array(starts), np.array(lengths)
            place = np.arange(self.ring_used)
            entry = place + (high[:, None] - 1 - place) // capacity * capacity  # the newest that lies at each place
            inside = (entry >= low[:, None]) & (entry < high[:, None])
            self.seen = np.where(inside, 0.0, -np.inf).astype(self.bias_dtype)[:, None]
        self.bias = self.seen
        depths = torch.arange(1, _GUESSES + 1, device=self.target.device)
        last = self._tensor(np.array(lengths) - 1)[:, None]
        self.cis = self.target.cis((last + depths).clamp_(max=self.options.max_positions - 1))  # [B, depth, 1, E/2]

    # -- below: what the drafter said itself ---------------------------------------------------------------------------

    def _deeper(self, level: Level) -> Tensor:
        B, n = level.tokens.shape
        assert self.guesses + n <= _GUESSES, "the configuration keeps trees within the cache"
        g, cis = self.hidden, self.cis[:, level.depth - 1]
        if n > 1 or len(g) > B:
            g = g[self._tensor((level.parents + np.arange(B)[:, None] * (len(g) // B)).ravel())]
            cis = cis.repeat_interleave(n, dim=0)
        q, kv, residual = self._project(self._tensor(level.tokens.ravel()), g, cis)
        # the newest guesses stand first, so that all of them and the ring are one slice
        columns = slice(_GUESSES - self.guesses - n, _GUESSES - self.guesses)
        self.kv[:, :B, :, columns] = kv.view(B, n, *kv.shape[1:]).permute(2, 0, 3, 1, 4)
        self._guess(level.parents)
        return self._attend(q, residual, n)

    def _guess(self, parents: np.ndarray) -> None:
        """A level of n more guesses a row: each sees itself and what its parent sees."""
        (B, n), before = parents.shape, self.guesses
        self.guesses += n
        if n == 1 and self.bias is None:
            return
        bias = np.zeros((B, n, self.guesses + self.ring_used), dtype=self.bias_dtype)
        bias[:, :, :n] = np.where(np.eye(n, dtype=bool), 0.0, -np.inf)
        if self.bias is not None:
            bias[:, :, n : self.guesses] = self.bias[np.arange(B)[:, None], parents, :before]
        if self.seen is not None:
            bias[:, :, self.guesses :] = self.seen
        self.bias = bias

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.target.device)

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"](embedded) if self.options.kind == "eagle3" else embedded
        return normed @ self.from_embedding

    def _project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """M tokens and the features before them -> queries [M, H, E], keys and values [M, 2, K, E], residual [M, D]."""
        o = self.options
        if self.table is not None:
            embedded = self.table[tokens]
        else:
            embedded = self._contribution(F.embedding(tokens, self.target.embedding))
        if o.kind == "eagle3":
            residual, qkv = g, torch.addmm(embedded, self.norms["hidden_norm"](g), self.from_features)
        else:
            residual = torch.addmm(embedded, g, self.from_features)
            qkv = residual @ self.qkv
        qkv = qkv.view(len(tokens), -1, o.head_dim)
        rotate_(qkv[:, : o.num_heads + o.num_kv_heads], cis)
        return qkv[:, : o.num_heads], qkv[:, o.num_heads :].view(-1, 2, o.num_kv_heads, o.head_dim), residual

    def _attend(self, query: Tensor, residual: Tensor, n: int) -> Tensor:
        """query [B * n, H, E] over all guesses and the ring, as `bias` allows -> the layer's output [B * n, D]."""
        o, B, T = self.options, len(query) // n, self.guesses + self.ring_used
        share = o.num_heads // o.num_kv_heads
        if n > 1:
            query = query.view(B, n, o.num_kv_heads, share, o.head_dim).permute(0, 2, 3, 1, 4)
        folded = query.reshape(B * o.num_kv_heads, share * n, o.head_dim)
        first = _GUESSES - self.guesses
        keys, values = self.kv[:, :B, :, first : first + T].flatten(1, 2)
        scores = torch.bmm(folded, keys.transpose(1, 2))
        if self.bias is not None:
            by_node = scores.view(B, o.num_kv_heads, share, n, T)
            by_node += self._tensor(self.bias).to(scores.dtype)[:, None, None]
        wide = torch.float32 if self.target.dtype == torch.bfloat16 else None
        mixed = torch.bmm(torch.softmax(scores, dim=-1, dtype=wide).to(values.dtype), values)
        if n > 1:
            mixed = mixed.view(B, o.num_kv_heads, share, n, o.head_dim).permute(0, 3, 1, 2, 4)
        x = torch.addmm(residual, mixed.reshape(B * n, -1), self.out)
        gate, up = (self.norms["post_attention_layernorm"](x) @ self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)


def _pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Heads of [heads * E, D] from Hugging Face's halves to the pairs that `rotate` wants."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
