"""A slow twin of the learned drafter, written from the papers' description alone: loops over entries and heads, no
cache, no batch. Its tensors go by their published names, so it reads what `save_drafter` writes.

    entry p:  g = fc [h_low; h_mid; h_high] (EAGLE-3) or the last hidden state (EAGLE-1) of token p,
              e = the target's embedding of token p + 1
    EAGLE-3:  u = [RMS_in(e); RMS_hid(g)] -> q, k, v; g' = g + attention; g'' = g' + MLP(RMS(g')); head(RMS_out(g''))
    EAGLE-1:  z = fc [e; g] -> q, k, v; z' = z + attention; z'' = z' + MLP(RMS(z')); head(z'')
    a guess:  the same with the output of the entry before in the place of g
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from small import widen
from tiny import qwen3
from torch import Tensor

from tlt.draft.eagle import EagleLayer, Kind, eagle_options, save_drafter
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options


@dataclass
class Entry:
    position: int
    embedded: Tensor
    """[D]"""
    g: Tensor
    """[D]"""


class Twin:
    """Learned drafter with `tensors` by their published names. `embedding`, `head` and `inv_freq` are the target's."""

    def __init__(
        self, layer: EagleLayer, embedding: Tensor, head: Tensor, inv_freq: Tensor, scaling: float = 1.0
    ) -> None:
        self.options, self.embedding, self.head = layer.options, embedding, head
        self.inv_freq, self.scaling = inv_freq.double(), scaling
        with TemporaryDirectory() as folder:
            save_drafter(layer, folder)
            self.tensors = {n: t.double() for n, t in load_file(Path(folder) / "model.safetensors").items()}
        self.three = layer.options.kind == "eagle3"
        self.layer = "midlayer." if self.three else "layers.0."

    def weight(self, name: str) -> Tensor:
        return self.tensors[self.layer + name + ".weight"]

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / math.sqrt(sum(v * v for v in x.tolist()) / len(x) + self.options.rms_norm_eps) * weight

    def rope(self, x: Tensor, position: int) -> Tensor:
        """Return [E] in Hugging Face's order: dimension i rotates with dimension i + E/2."""
        first, second = x.view(2, -1).tolist()  # numbers, because a loop over elements of a tensor is slow
        turned = []
        for a, b, frequency in zip(first, second, self.inv_freq.tolist(), strict=True):
            angle = position * frequency
            c, s = math.cos(angle) * self.scaling, math.sin(angle) * self.scaling
            turned.append((a * c - b * s, b * c + a * s))
        return torch.tensor(turned, dtype=torch.float64).T.reshape(-1)

    def fused(self, features: Tensor) -> Tensor:
        """Return g [D] from [F] = [h_low; h_mid; h_high; last] or [last]."""
        D = self.options.hidden_size
        return self.tensors["fc.weight"] @ features[: 3 * D] if self.three else features[-D:]

    def inputs(self, entry: Entry) -> tuple[Tensor, Tensor]:
        """Return the input of attention, and the residual stream."""
        if self.three:
            e = self.rms(entry.embedded, self.weight("input_layernorm"))
            return torch.cat([e, self.rms(entry.g, self.weight("hidden_norm"))]), entry.g
        z = self.tensors["fc.weight"] @ torch.cat([entry.embedded, entry.g])
        return z, z

    def head_of(self, x: Tensor, name: str, head: int) -> Tensor:
        E = self.options.head_dim
        return self.weight(f"self_attn.{name}_proj")[head * E : (head + 1) * E] @ x

    def output(self, entry: Entry, seen: Sequence[Entry]) -> Tensor:
        """Return [D] before the output norm. `seen` includes the entry itself."""
        o = self.options
        x, residual = self.inputs(entry)
        others = [(self.inputs(other)[0], other.position) for other in seen]
        mixed = []
        for head in range(o.num_heads):
            shared = head // (o.num_heads // o.num_kv_heads)
            q = self.rope(self.head_of(x, "q", head), entry.position)
            keys = [self.rope(self.head_of(u, "k", shared), position) for u, position in others]
            scores = [float(q @ k) / math.sqrt(o.head_dim) for k in keys]
            weights = [math.exp(s - max(scores)) for s in scores]
            values = [self.head_of(u, "v", shared) for u, _ in others]
            mixed.append(sum((w * v for w, v in zip(weights, values, strict=True)), torch.zeros(1)) / sum(weights))
        y = residual + self.weight("self_attn.o_proj") @ torch.cat(mixed)
        h = self.rms(y, self.weight("post_attention_layernorm"))
        gate, up = self.weight("mlp.gate_proj") @ h, self.weight("mlp.up_proj") @ h
        return y + self.weight("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up)

    def logits(self, output: Tensor) -> Tensor:
        return self.head @ (self.rms(output, self.tensors["norm.weight"]) if self.three else output)

    def true_entries(self, features: Tensor, next_tokens: Sequence[int], start: int) -> list[Entry]:
        """Return entries start, start + 1, ...: features [n, F], and the token after each."""
        return [Entry(start + i, self.embedding[token], self.fused(features[i])) for i, token in enumerate(next_tokens)]

    def chain(self, known: Sequence[Entry], guesses: Sequence[int]) -> list[Tensor]:
        """Return the outputs at the last known entry, and at each draft token after it. The window is applied here."""
        seen = list(known[-self.options.window :])
        outputs = [self.output(seen[-1], seen)]
        for token in guesses:
            seen.append(Entry(seen[-1].position + 1, self.embedding[token], outputs[-1]))
            outputs.append(self.output(seen[-1], seen))
        return outputs


# -- a target and drafters for it -------------------------------------------------------------------------------------


@dataclass
class Model:
    """Transformers' own model in float64, and the engine's decoder with the same weights."""

    hf: Any
    decoder: Decoder

    def twin(self, layer: EagleLayer) -> Twin:
        state, rotary = self.hf.state_dict(), self.hf.model.rotary_emb
        embedding, head = state["model.embed_tokens.weight"], state["lm_head.weight"]
        return Twin(layer, embedding, head, rotary.inv_freq, rotary.attention_scaling)

    @torch.no_grad()
    def features(self, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
        """Return [T, F]: transformers' hidden states at the taps, then the one after the final norm."""
        hidden = self.hf(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([*(hidden[tap][0] for tap in taps), hidden[-1][0]], dim=-1)


def make_model(seed: int = 0, vocab_size: int = 11, layers: int = 4, dtype: torch.dtype = torch.float64) -> Model:
    """Return a random Qwen3 whose distribution depends strongly on the context."""
    sizes = {"vocab_size": vocab_size, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    model = qwen3(seed, **sizes)
    _sharpen(model)
    widen(model)
    decoder = Decoder(decoder_options(model.config), dtype, torch.device("cpu"))
    decoder.load(model.state_dict(), version=0)
    return Model(model, decoder)


def make_layer(decoder: Decoder, kind: Kind, window: int, seed: int = 0) -> EagleLayer:
    """Return a random layer with large weights, so that each of its inputs affects the output."""
    torch.manual_seed(seed)
    layer = EagleLayer(eagle_options(decoder.options, kind, window)).double()
    _sharpen(layer)
    return layer


@torch.no_grad()
def _sharpen(module: torch.nn.Module) -> None:
    for name, weight in module.named_parameters():
        if weight.dim() == 2:
            weight.normal_(0.0, (2.5 if "q_proj" in name or "k_proj" in name else 1.5) * weight.shape[1] ** -0.5)
        else:
            weight.uniform_(0.5, 1.5)
