"""Weights and forward pass of a learned drafter in the engine: an `EagleLayer`, fused into a few matrix products.

Shapes: M tokens, D hidden size, H query heads, K key-value heads, E head size, F size of a token's hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.draft.eagle import EagleLayer
from tlt.models.decoder import Decoder, RMSNorm, overwrite, rotate_, to_pairs
from tlt.models.product import Product
from tlt.sampling import SamplingTensors, sampling_log_probs

_TABLE = 1 << 23  # maximum number of elements of `table`, which has each token's contribution to the first product


class FusedLayer:
    """Fused weights of an `EagleLayer`. The weights of all norms except the output norm are multiplied into its
    matrices."""

    @torch.no_grad()
    def __init__(self, layer: EagleLayer, target: Decoder) -> None:
        """Fuse the weights. Call `begin` before use."""
        self.options = o = layer.options
        self.target = target  # the embedding is read at every use, because it changes with the target's version
        wide = torch.float64 if target.dtype == torch.float64 else torch.float32
        state = {name: t.detach().to(target.device, wide) for name, t in layer.state_dict().items()}
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
        self.norms = {n: RMSNorm(state[n + ".weight"], o.rms_norm_eps) for n in norms if n + ".weight" in state}

        def normed(name: str, weight: Tensor) -> Tensor:
            """Return `weight` [D, ...] times the weight of the norm `name`, for use on the norm's `unit`."""
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
        self.table: Tensor | None = None
        self.to_logits: Product | None = None
        self.vocabulary = None if layer.vocabulary is None else layer.vocabulary.to(target.device)
        self.from_embedding, self.from_features, self.fc, self.out, self.gate_up, self.down = (
            Product(weight.t().to(target.dtype)) for weight in (*matrices, state["down_proj.weight"].t())
        )

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the tensors that depend on the target's current weights. They keep their addresses, which CUDA graphs
        have."""
        target = self.target
        if self.options.vocab_size * self.from_embedding.shape[0] <= _TABLE:
            table = self._contribution(target.embedding)
            self.table = table if self.table is None else self.table.copy_(table)
        if self.vocabulary is None:
            self.to_logits = target.to_logits
        elif self.to_logits is None:
            self.to_logits = Product(target.head[self.vocabulary])
        else:
            overwrite(self.to_logits, Product(target.head[self.vocabulary]))

    def inputs(self, features: Tensor) -> Tensor:
        """Map the target's hidden states [M, F] to the fused states [M, D] that `project` reads."""
        D = self.options.hidden_size
        return self.fc(features[:, : 3 * D]) if self.options.kind == "eagle3" else features[:, -D:]

    def _contribution(self, embedded: Tensor) -> Tensor:
        normed = self.norms["input_layernorm"].unit(embedded) if self.options.kind == "eagle3" else embedded
        return self.from_embedding(normed)

    def project(self, tokens: Tensor, g: Tensor, cis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map M tokens, with the fused states `g` [M, D] of the tokens before them, to queries [M, H, E], keys and
        values [M, 2, K, E] and the residual stream [M, D]."""
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

    def output(self, mixed: Tensor, residual: Tensor) -> Tensor:
        """Return the layer's output [M, D] for the attention output `mixed` [M, H * E]."""
        x = self.out(mixed, residual)
        gate, up = self.gate_up(self.norms["post_attention_layernorm"].unit(x)).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up), x)

    def log_q(self, hidden: Tensor, sampling: SamplingTensors) -> Tensor:
        """Return log q [B, V] for the layer's outputs [B, D], over the V tokens that the drafter can propose."""
        normed = self.norms["norm"](hidden) if "norm" in self.norms else hidden
        assert self.to_logits, "call begin first"
        return sampling_log_probs(self.to_logits(normed), sampling)[0]
