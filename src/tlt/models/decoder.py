"""Fused decoder of the rollout: one forward pass for Llama, Mistral, Qwen2 and Qwen3, written for many small decode
steps.

The decoder has only weights and arithmetic. The function `attend` stores keys and values, and the engine forms batches.
Shapes: B rows, N new tokens per row, D hidden size, H query heads, K key-value heads, E head size, V vocabulary, F
feed-forward size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.attention.key_counts import rounded_up
from tlt.attention.slot_memory import HeadShape
from tlt.attention.slots import attention_for
from tlt.models.families import DecoderOptions
from tlt.models.model_folder import ModelError
from tlt.models.product import Product, by_rows

_EMBEDDING, _HEAD, _LAYER = "model.embed_tokens.weight", "lm_head.weight", "model.layers."
_RIGHT = 4  # number of text tokens in each verification pass of `text_logits`


class Attend(Protocol):
    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """Store the keys and values [B * N, K, E] of the new tokens in this layer. Return the attention output
        [B * N, H * E] of `query` [B * N, H, E].

        A query attends to all stored tokens of its row, or to the last `window` of them. Scores are scaled by E **
        -0.5."""
        ...


class RMSNorm:
    """RMS norm x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 or wider.

    It is computed as x / sqrt(norm(x)^2 + size * eps) * (sqrt(size) * weight), with the last bracket computed once.
    `hypot` would save two operations, but its bits depend on the number of rows, because PyTorch computes the last
    elements of a tensor one by one and not as vectors.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        wide = weight if weight.dtype == torch.float64 else weight.float()
        size = weight.shape[-1]
        self.weight = wide * size**0.5
        self.eps = eps
        self.fused = (
            weight.clone() if weight.is_cuda and weight.dim() == 1 else None
        )  # the CUDA kernel takes a 1-D weight only

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused is not None and self.fused.dtype == x.dtype:
            return F.rms_norm(x, self.fused.shape, self.fused, self.eps)
        scaled = self._unit(x).mul_(self.weight)
        return scaled.to(x.dtype) if x.dtype == torch.bfloat16 else scaled

    def of(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the norm of `x` with another weight, with the bits of a call and with gradients."""
        wide = x.float() if x.dtype == torch.bfloat16 else x
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        unit = wide / norm.square().add(x.shape[-1] * self.eps).sqrt()
        return (unit * (weight.to(wide.dtype) * weight.shape[-1] ** 0.5)).to(x.dtype)

    def unit(self, x: Tensor) -> Tensor:
        """Return x / sqrt(|x|^2 + size * eps): the norm without `self.weight` [size]. The caller folds the weight
        into the matrix of the next product."""
        return self._unit(x).to(x.dtype)

    def _unit(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype == torch.bfloat16 else x
        if x.is_cuda:  # one block of threads per row; in `vector_norm` the number of rows decides on the blocks
            return F.rms_norm(wide, x.shape[-1:], None, self.eps) * x.shape[-1] ** -0.5
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return wide / norm.square_().add_(x.shape[-1] * self.eps).sqrt_()


@dataclass
class Layer:
    input_norm: RMSNorm
    qkv: Product  # D -> (H + 2K) * E
    qk_norm: RMSNorm | None  # weight [H + K, E]
    out: Product  # H * E -> D
    post_norm: RMSNorm
    gate_up: Product  # D -> 2F
    down: Product  # F -> D


class Decoder:
    """Target model of the engine, as one fused forward pass. It has no weights until the first `load`. `load` is called
    again after every update of the policy.

    `version` is the version of the loaded weights, or -1 before the first `load`."""

    can_be_captured = True
    """whether a pass can be captured as a CUDA graph, because the host never waits for the device during it"""
    norm: RMSNorm
    to_logits: Product

    def __init__(self, options: DecoderOptions, dtype: torch.dtype, device: torch.device) -> None:
        self.options = options
        self.dtype = dtype
        self.device = device
        self.version = -1
        self.cuda_graphs = device.type == "cuda"  # whether passes and drafts are replayed as CUDA graphs
        self.layers: list[Layer] = []
        self.embedding = self.head = torch.empty(0, 0)
        self._cis = rotary_table(options, dtype, device)

    def empty(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Decoder:
        """Return another decoder with the same options and without weights (default: with the same dtype and
        device)."""
        return Decoder(self.options, dtype or self.dtype, device or self.device)

    @property
    def products(self) -> list[Product]:
        """Matrix products of all layers."""
        return [part for layer in self.layers for part in vars(layer).values() if isinstance(part, Product)]

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy all weights, given by their Hugging Face names, into the fused layout. Later calls write into the
        tensors of the first call, layer by layer, because CUDA graphs have their addresses.

        If a weight is missing or unknown, raise ModelError and keep the old weights. After any other error, also for
        a weight of a wrong shape, there are no weights (`version` is -1)."""
        loader = _Loader(state, self.options, self.dtype, self.device)
        self.version = -1
        for index in range(self.options.num_layers):
            layer = loader.layer(index)
            if index < len(self.layers):
                overwrite(self.layers[index], layer)
            else:
                self.layers.append(layer)
        embedding = loader.take(_EMBEDDING)
        head, norm = loader.head(embedding), loader.norm("model.norm.weight")
        if self.head.shape == head.shape and (self.head is self.embedding) == (head is embedding):
            self.embedding.copy_(embedding)
            self.head.copy_(head)
            overwrite(self.norm, norm)
            overwrite(self.to_logits, Product(head, shared=True))
        else:
            self.embedding = embedding.clone(memory_format=torch.contiguous_format)
            self.head = self.embedding if head is embedding else head.clone(memory_format=torch.contiguous_format)
            self.norm, self.to_logits = norm, Product(self.head, shared=True)
        self.version = version

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: dict[int, Any] | None = None) -> Tensor:
        """Return the hidden states [B, N, D] after the final norm, for `tokens` [B, N] at `positions` [B, N].

        `taps` asks for hidden states of other layers. Its keys are layer numbers, and each value is set to the hidden
        states [B * N, D] that enter the layer.
        """
        o = self.options
        heads, split = o.num_heads + o.num_kv_heads, (o.num_heads + o.num_kv_heads) * o.head_dim
        x = F.embedding(tokens.reshape(-1), self.embedding)  # [B * N, D] in all layers, for few operations
        cis = self.cis(positions.reshape(-1))
        for index, layer in enumerate(self.layers):
            if taps is not None and index in taps:
                taps[index] = x
            h = layer.input_norm(x)
            qkv = layer.qkv(h)
            qk, value = qkv[:, :split].view(-1, heads, o.head_dim), qkv[:, split:]
            if layer.qk_norm is not None:
                qk = layer.qk_norm(qk)
            qk = rotate(qk, cis)
            mixed = attend(
                index, qk[:, : o.num_heads], qk[:, o.num_heads :], value.view(-1, o.num_kv_heads, o.head_dim)
            )
            x = layer.out(mixed, x)
            gate, up = layer.gate_up(layer.post_norm(x)).chunk(2, dim=-1)
            x = layer.down(by_rows(F.silu, gate).mul_(up), x)
        return self.norm(x).view(*tokens.shape, -1)

    def cis(self, positions: Tensor) -> Tensor:
        """Return the rotary factors cos + i sin [M, 1, E/2] for positions [M], as `rotate` takes them."""
        return self._cis[positions]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden states [..., D], in the model's dtype."""
        return self.to_logits(hidden.reshape(-1, hidden.shape[-1])).view(*hidden.shape[:-1], len(self.head))

    @property
    def longest(self) -> int:
        return self.options.max_positions

    @property
    def teacher(self) -> Decoder:
        return self

    def text_logits(self, tokens: Tensor, with_drafts: bool = False) -> Tensor:
        """Decode a text [N] as the engine does, and return the logits at each token [N, V].

        The first pass prefills the text, or its first half if `with_drafts`. Each further pass verifies a few tokens as
        a draft. A pass ends with a wrong token, unless the text ends with it. The next pass overwrites the keys and
        values of this token."""
        tokens = tokens.to(self.device)
        store = attention_for(HeadShape.of(self.options, self.dtype, self.device))
        store.resize(1, rounded_up(len(tokens), store.key_counts))
        done, found = 0, list[Tensor]()
        while done < len(tokens):
            end = done + _RIGHT if done else max(1, len(tokens) // (1 + with_drafts))
            wrong = (tokens[end : end + 1] + 1) % self.options.vocab_size
            draft = torch.cat([tokens[done:end], wrong])[None]
            plan = store.plan(0, [done], draft.shape[1])
            positions = done + torch.arange(draft.shape[1], device=self.device)[None]
            hidden = self.forward(draft, positions, partial(store.attend, plan))
            found.append(self.logits(hidden)[0, : end - done])
            done = end
        return torch.cat(found)


def rotary_table(options: DecoderOptions, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the rotary factors cos + i sin of all positions, [max_positions, 1, E/2]. Angles are computed in float64
    for a float64 model, else in float32."""
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.outer(torch.arange(options.max_positions, dtype=angle_dtype), options.inv_freq.to(angle_dtype))
    return (torch.polar(torch.ones_like(angles), angles) * options.attention_scaling).unsqueeze(1).to(device)


def rotate(x: Tensor, cis: Tensor) -> Tensor:
    """Apply the rotary embedding to x [M, heads, E]: multiply its pairs (2i, 2i + 1), as complex numbers, by `cis`
    [M, 1, E/2]. bfloat16 is converted to float32 for this, because it has no complex type."""
    narrow = x.dtype == torch.bfloat16
    wide = x.float() if narrow else x
    pairs = torch.view_as_complex(wide.view(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(by_rows(torch.mul, pairs, cis)).view(x.shape)
    return turned.to(x.dtype) if narrow else turned


def rotate_(x: Tensor, cis: Tensor) -> None:
    """Apply `rotate` in place."""
    if x.dtype == torch.bfloat16:
        x.copy_(rotate(x, cis))
    else:
        torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(cis)


def overwrite(old: Any, new: Any) -> None:
    """Copy the tensors of `new`, such as a `Layer` or a `Product`, into those of `old`, which has the same shapes.
    Weights that oneDNN packed are replaced, because no CUDA graph has their addresses."""
    for name, value in vars(new).items():
        if isinstance(value, Tensor) and not value.is_mkldnn:
            getattr(old, name).copy_(value)
        elif isinstance(value, RMSNorm | Product):
            overwrite(getattr(old, name), value)
        else:
            setattr(old, name, value)


def weight_shapes(o: DecoderOptions) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its Hugging Face name, except the head's."""
    D, E, F_ = o.hidden_size, o.head_dim, o.intermediate_size
    q_size, kv_size = o.num_heads * E, o.num_kv_heads * E
    linear = (
        *(("self_attn.q_proj", q_size, D, o.qkv_bias), ("self_attn.o_proj", D, q_size, o.out_bias)),
        *((f"self_attn.{name}_proj", kv_size, D, o.qkv_bias) for name in "kv"),
        *((f"mlp.{name}_proj", F_, D, o.mlp_bias) for name in ("gate", "up")),
        ("mlp.down_proj", D, F_, o.mlp_bias),
    )
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    for name, outputs, inputs, has_bias in linear:
        layer[name + ".weight"] = outputs, inputs
        if has_bias:
            layer[name + ".bias"] = (outputs,)
    if o.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (E,) for name in "qk"}
    layers = {f"{_LAYER}{i}.{name}": shape for i in range(o.num_layers) for name, shape in layer.items()}
    return {_EMBEDDING: (o.vocab_size, D), "model.norm.weight": (D,), **layers}


class _Loader:
    """Reader of a model's weights by name. Raises ModelError if a weight is missing or unknown, or has a wrong
    shape."""

    def __init__(
        self, state: Mapping[str, Tensor], options: DecoderOptions, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.state, self.options, self.dtype, self.device = state, options, dtype, device
        self.shapes = weight_shapes(options)
        if not options.tied or _HEAD in state:
            self.shapes[_HEAD] = self.shapes[_EMBEDDING]
        if missing := [name for name in self.shapes if name not in state]:
            raise ModelError(f"the weights lack {missing[0]}: the checkpoint does not fit its config.json")
        # old Llama checkpoints carry rotary.inv_freq buffers, which config.json determines
        rest = sorted(k for k in state if k not in self.shapes and not k.endswith("rotary_emb.inv_freq"))
        if rest:
            raise ModelError(
                f"the weights hold {rest[0]}, a tensor that tlt's decoder does not use (and {len(rest) - 1} more): "
                "the checkpoint does not fit its config.json"
            )

    def take(self, name: str) -> Tensor:
        """Return a weight that may share memory with the policy. The caller must copy it."""
        tensor, shape = self.state[name], self.shapes[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{name} has shape {list(tensor.shape)}, but config.json asks for {list(shape)}")
        return tensor.detach().to(self.device, self.dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.take(name), self.options.rms_norm_eps)

    def head(self, embedding: Tensor) -> Tensor:
        """Return the weight of the head. If config.json ties it to the embedding, but the weights have a different
        head, that head is used, as in transformers.

        A tied head that equals the embedding is not stored a second time."""
        tied = self.options.tied
        both = [self.state[name] for name in (_HEAD, _EMBEDDING) if name in self.state] if tied else []
        if tied and both[0].data_ptr() == both[-1].data_ptr():  # `both` keeps them alive: freed memory could be reused
            return embedding
        head = self.take(_HEAD)
        return embedding if tied and torch.equal(head, embedding) else head

    def layer(self, index: int) -> Layer:
        o, own, mlp = self.options, f"{_LAYER}{index}.", f"{_LAYER}{index}.mlp."
        qk_norm = None
        if o.qk_norm:
            q, k = (to_pairs(self.take(own + f"self_attn.{n}_norm.weight"), o.head_dim) for n in "qk")
            weight = torch.cat([q.expand(o.num_heads, -1), k.expand(o.num_kv_heads, -1)])
            qk_norm = RMSNorm(weight, o.rms_norm_eps)
        return Layer(
            input_norm=self.norm(own + "input_layernorm.weight"),
            qkv=self._product(*(own + f"self_attn.{n}_proj" for n in "qkv")),
            qk_norm=qk_norm,
            out=self._product(own + "self_attn.o_proj"),
            post_norm=self.norm(own + "post_attention_layernorm.weight"),
            gate_up=self._product(mlp + "gate_proj", mlp + "up_proj"),
            down=self._product(mlp + "down_proj"),
        )

    def _product(self, *names: str) -> Product:
        """Return one product for the linear layers with these names."""
        weights = [self._in_pairs(name + ".weight") for name in names]
        has_bias = names[0] + ".bias" in self.shapes
        bias = torch.cat([self._in_pairs(name + ".bias") for name in names]) if has_bias else None
        return Product(torch.cat(weights) if len(weights) > 1 else weights[0], bias)

    def _in_pairs(self, name: str) -> Tensor:
        tensor = self.take(name)
        return to_pairs(tensor, self.options.head_dim) if "q_proj" in name or "k_proj" in name else tensor


def to_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Re-order the weights of query or key heads [heads * E, ...] from Hugging Face's halves (i, i + E/2) to pairs
    (2i, 2i + 1).

    `rotate` needs pairs. Queries and keys are re-ordered in the same way, so their dot products do not change."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape).contiguous()


def from_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Undo `to_pairs`."""
    pairs = weight.view(-1, head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape).contiguous()
