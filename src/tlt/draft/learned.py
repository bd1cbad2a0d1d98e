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
from tlt.models.decoder import Decoder, RMSNorm, rotate
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
        self.keys, self.values = self._empty(0), self._empty(0)
        self.ready: list[int] = []  # entries below this one are in the cache
        small = self.options.vocab_size * self.from_embedding.shape[1] <= _TABLE
        self.table = self._contribution(self.target.embedding) if small else None

    def _empty(self, rows: int) -> Tensor:
        o, target = self.options, self.target
        shape = (rows, o.num_kv_heads, _GUESSES + self.window.capacity, o.head_dim)
        return torch.zeros(shape, dtype=target.dtype, device=target.device)

    def open(self, request: Request, committed: Sequence[int]) -> None:
        self.ready.append(0)
        if len(self.ready) > len(self.keys):
            more = self._empty(max(8, len(self.keys)))
            self.keys, self.values = torch.cat([self.keys, more]), torch.cat([self.values, more])

    def commit(self, row: int, tokens: Sequence[int]) -> None: ...  # the window says what there is

    def close(self, row: int) -> None:
        last = len(self.ready) - 1
        if row != last:
            self.keys[row], self.values[row] = self.keys[last], self.values[last]
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
        rows, entries = torch.tensor(todo, device=window.device).unbind(1)
        places = entries % window.capacity
        g = window.features[rows, places]
        g = (
            g[:, : 3 * self.options.hidden_size] @ self.fc
            if self.options.kind == "eagle3"
            else g[:, -self.options.hidden_size :]
        )
        q, k, v, residual = self._project(window.tokens[rows, places], g, self.target.cis(entries))
        self.keys[rows, :, _GUESSES + places] = k
        self.values[rows, :, _GUESSES + places] = v
        self._see(np.array(starts), np.array(window.length))
        at = torch.tensor(last, device=window.device)
        self.bias = self.seen
        return self._attend(q[at], residual[at], self.bias)

    def _see(self, low: np.ndarray, high: np.ndarray) -> None:
        """seen [B, 1, C]: 0 at the ring's entries in use, -inf elsewhere; C is as far as any row has come."""
        capacity = self.window.capacity
        place = np.arange(min(capacity, high.max()))
        entry = place + (high[:, None] - 1 - place) // capacity * capacity  # the newest that lies at each place
        inside = (entry >= low[:, None]) & (entry < high[:, None])
        self.seen = np.where(inside, 0.0, -np.inf).astype(self.bias_dtype)[:, None]
        self.all_seen = bool(inside.all())
        self.guesses = 0
        depths = torch.arange(1, _GUESSES + 1, device=self.target.device)
        last = torch.from_numpy(high - 1).to(self.target.device)[:, None]
        self.cis = self.target.cis((last + depths).clamp(max=self.options.max_positions - 1))  # [B, depth, 1, E/2]

    # -- below: what the drafter said itself ---------------------------------------------------------------------------

    def _deeper(self, level: Level) -> Tensor:
        B, n = level.tokens.shape
        assert self.guesses + n <= _GUESSES, "the configuration keeps trees within the cache"
        device, rows = self.hidden.device, np.arange(B)[:, None]
        g = self.hidden
        if n > 1 or len(g) > B:
            g = g[torch.from_numpy((level.parents + rows * (len(g) // B)).ravel()).to(device)]
        cis = self.cis[:, level.depth - 1]
        tokens = torch.from_numpy(level.tokens.ravel()).to(device)
        q, k, v, residual = self._project(tokens, g, cis if n == 1 else cis.repeat_interleave(n, dim=0))
        # the newest guesses stand first, so that all of them and the ring are one slice
        columns = slice(_GUESSES - self.guesses - n, _GUESSES - self.guesses)
        self.keys[:B, :, columns] = k.view(B, n, *k.shape[1:]).transpose(1, 2)
        self.values[:B, :, columns] = v.view(B, n, *v.shape[1:]).transpose(1, 2)
        self.guesses += n
        bias = np.empty((B, n, self.guesses + self.seen.shape[-1]), dtype=self.bias_dtype)
        bias[:, :, :n] = np.where(np.eye(n, dtype=bool), 0.0, -np.inf)
        bias[:, :, n : self.guesses] = self.bias[rows, level.parents, : self.guesses - n]  # what the parent sees
        bias[:, :, self.guesses :] = self.seen
        self.bias = bias
        self.all_seen &= n == 1
        return self._attend(q, residual, bias)

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"](embedded) if self.options.kind == "eagle3" else embedded
        return normed @ self.from_embedding

    def _project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """M tokens and the features before them -> queries [M, H, E], keys and values [M, K, E], residual [M, D]."""
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
        heads = o.num_heads + o.num_kv_heads
        qkv = qkv.view(len(tokens), -1, o.head_dim)
        qk = rotate(qkv[:, :heads], cis)
        return qk[:, : o.num_heads], qk[:, o.num_heads :], qkv[:, heads:], residual

    def _attend(self, query: Tensor, residual: Tensor, bias: np.ndarray) -> Tensor:
        """query [B * n, H, E], bias [B, n, guesses + C] -> the layer's output [B * n, D]."""
        o, (B, n, T) = self.options, bias.shape
        share = o.num_heads // o.num_kv_heads
        folded = query.view(B, n, o.num_kv_heads, share, o.head_dim).permute(0, 2, 3, 1, 4)
        folded = folded.reshape(B * o.num_kv_heads, share * n, o.head_dim)
        columns = slice(_GUESSES - self.guesses, _GUESSES - self.guesses + T)
        keys, values = self.keys[:B, :, columns].flatten(0, 1), self.values[:B, :, columns].flatten(0, 1)
        scores = torch.bmm(folded, keys.transpose(1, 2)).view(B, o.num_kv_heads, share, n, T)
        if not self.all_seen:
            scores += torch.from_numpy(bias).to(scores.device, scores.dtype)[:, None, None]
        wide = torch.float32 if self.target.dtype == torch.bfloat16 else None
        weights = torch.softmax(scores, dim=-1, dtype=wide).to(values.dtype)
        mixed = torch.bmm(weights.view(B * o.num_kv_heads, share * n, T), values)
        mixed = mixed.view(B, o.num_kv_heads, share, n, o.head_dim).permute(0, 3, 1, 2, 4).reshape(B * n, -1)
        x = torch.addmm(residual, mixed, self.out)
        gate, up = (self.norms["post_attention_layernorm"](x) @ self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x, F.silu(gate).mul_(up), self.down)


def _pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Heads of [heads * E, D] from Hugging Face's halves to the pairs that `rotate` wants."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
