"""Passes of policy and reference model over micro-batches, and their progress.

If the engine has a fused decoder for the model, a forward pass uses its operations, so that its log-probs have the bits
of the rollout's. Each operation sums in the engine's order: products have one kernel per weight, and attention has
rounded numbers of keys and full blocks of queries. In bfloat16, hidden states between layers are bfloat16 too.

Shapes: M tokens in a pass, T target tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tlt.attention.sequences import Segment, SequenceAttention
from tlt.attention.slot_memory import HeadShape
from tlt.config import ConfigError, RolloutConfig, TrainConfig
from tlt.files import first_line
from tlt.models.decoder import Decoder, RMSNorm, from_pairs, rotate, to_pairs
from tlt.models.families import decoder_options, is_fused
from tlt.models.product import Product, by_rows
from tlt.rl.batching import MicroBatch, Packer
from tlt.rl.logprobs import Forward, TransformersForward, token_logprobs
from tlt.rl.losses import Objective
from tlt.rl.parallel import ProcessGroup
from tlt.rl.shared_prefix import share_prefixes
from tlt.types import TrainBatch

BACKWARD_PASSES = 3  # forward and backward pass together take as long as this number of forward passes


class _Part(NamedTuple):
    """Rows of a fused weight that belong to one linear layer of the policy."""

    weight: Tensor
    bias: Tensor | None
    head_dim: int | None
    """size of the heads whose rows are in pairs (`to_pairs`); None if the rows are in the policy's order"""


class _Linear(torch.autograd.Function):
    """A product of the engine. Its gradient goes to the policy's parameters."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, product: Product, parts: Sequence[_Part], *parameters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.product, ctx.parts = product, parts
        out = product(x, residual)
        return out.clone() if out._is_view() else out  # of a few rows; logits are overwritten, which a view forbids

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,), (gradient,) = ctx.saved_tensors, gradients
        of_weight, of_bias = gradient.t() @ x, gradient.sum(0)
        found: list[Tensor | None] = []
        low = 0
        for weight, bias, head_dim in ctx.parts:
            for parameter, whole in ((weight, of_weight), *(((bias, of_bias),) if bias is not None else ())):
                own = whole[low : low + len(weight)]
                found.append((own if head_dim is None else from_pairs(own, head_dim)).to(parameter.dtype))
            low += len(weight)
        residual = gradient if ctx.needs_input_grad[1] else None
        return (gradient @ ctx.product.weight, residual, None, None, *found)


def _linear(x: Tensor, residual: Tensor | None, product: Product, parts: Sequence[_Part]) -> Tensor:
    parameters = chain.from_iterable((part.weight,) if part.bias is None else part[:2] for part in parts)
    return _Linear.apply(x, residual, product, parts, *parameters)


def can_follow(model: Any, dtype: torch.dtype) -> bool:
    """Return whether `EngineForward` supports a model whose engine computes in `dtype`.

    Adapters are separate products here, but merged into one weight in the engine. In float64 transformers' own code is
    used, so that gradients can be compared with other trainers'."""
    adapted = any(".lora_" in name for name, _ in model.named_parameters())
    narrow = dtype in (torch.float32, torch.bfloat16)
    return model.device.type == "cpu" and narrow and not adapted and is_fused(model.config)


class EngineForward:
    """Forward pass of a policy with the operations of the engine's fused decoder, and with gradients."""

    def __init__(self, model: Any, dtype: torch.dtype, checkpoints: bool) -> None:
        """`dtype`: dtype of the engine's weights. `checkpoints`: whether the backward pass computes the activations of
        each layer again, to save memory."""
        self.model, self.checkpoints = model, checkpoints
        self.decoder = Decoder(decoder_options(model.config), dtype, model.device)
        self.shape = HeadShape.of(self.decoder.options, dtype, model.device)
        self.parameters = dict(model.named_parameters())
        self._loaded: list[tuple[int, int]] = []

    def hidden(self, micro: MicroBatch) -> Tensor:
        """Return the hidden states [T, D] that predict the targets."""
        self._follow()
        tokens, positions = micro.input_ids.flatten(), micro.position_ids.flatten()
        attend = SequenceAttention(_segments(micro), self.shape)
        x = self.model.get_input_embeddings()(tokens).to(self.decoder.dtype)
        cis = self.decoder.cis(positions)
        for index in range(self.decoder.options.num_layers):
            layer = partial(self._layer, index, attend, cis)
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        hidden = self._norm(self.decoder.norm, "model.norm.weight", x)
        return micro.predicting(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [T, V] for hidden states [T, D]."""
        head = self.parameters.get("lm_head.weight", self.parameters["model.embed_tokens.weight"])
        return _linear(hidden, None, self.decoder.to_logits, [_Part(head, None, None)])

    def _follow(self) -> None:
        """Pack the policy's weights again, if they have changed."""
        now = [(p.data_ptr(), p._version) for p in self.parameters.values()]
        if now != self._loaded:
            self.decoder.load(self.model.state_dict(), self.decoder.version + 1)
            self._loaded = now

    def _layer(self, index: int, attend: SequenceAttention, cis: Tensor, x: Tensor) -> Tensor:
        o, layer, own = self.decoder.options, self.decoder.layers[index], f"model.layers.{index}."
        heads, split = o.num_heads + o.num_kv_heads, (o.num_heads + o.num_kv_heads) * o.head_dim
        qkv = _linear(self._norm(layer.input_norm, own + "input_layernorm.weight", x), None, layer.qkv, self._qkv(own))
        qk, value = qkv[:, :split].view(-1, heads, o.head_dim), qkv[:, split:].view(-1, o.num_kv_heads, o.head_dim)
        if layer.qk_norm is not None:
            qk = self._qk_norm(layer.qk_norm, own, qk)
        qk = rotate(qk, cis)
        mixed = attend(qk[:, : o.num_heads], qk[:, o.num_heads :], value)
        x = _linear(mixed, x, layer.out, [self._part(own + "self_attn.o_proj")])
        h = self._norm(layer.post_norm, own + "post_attention_layernorm.weight", x)
        gate_up = [self._part(own + f"mlp.{name}_proj") for name in ("gate", "up")]
        gate, up = _linear(h, None, layer.gate_up, gate_up).chunk(2, dim=-1)
        return _linear(by_rows(F.silu, gate) * up, x, layer.down, [self._part(own + "mlp.down_proj")])

    def _part(self, name: str, head_dim: int | None = None) -> _Part:
        return _Part(self.parameters[name + ".weight"], self.parameters.get(name + ".bias"), head_dim)

    def _qkv(self, layer: str) -> list[_Part]:
        size = self.decoder.options.head_dim
        return [self._part(layer + f"self_attn.{x}_proj", None if x == "v" else size) for x in "qkv"]

    def _norm(self, norm: RMSNorm, name: str, x: Tensor) -> Tensor:
        return norm.of(x, self.parameters[name].to(self.decoder.dtype))

    def _qk_norm(self, norm: RMSNorm, layer: str, qk: Tensor) -> Tensor:
        o = self.decoder.options
        q, k = (self.parameters[layer + f"self_attn.{x}_norm.weight"].to(self.decoder.dtype) for x in "qk")
        q, k = (to_pairs(x, o.head_dim) for x in (q, k))
        return norm.of(qk, torch.cat([q.expand(o.num_heads, -1), k.expand(o.num_kv_heads, -1)]))


def _segments(micro: MicroBatch) -> list[Segment]:
    """Return the prompts and responses of a micro-batch as segments of its tokens."""
    if micro.row is None:
        return [Segment(range(0), 0, micro.input_ids.shape[1])]
    found, end = list[Segment](), 0
    for prompt, responses in micro.row.groups:
        before = range(end, end + prompt)
        found.append(Segment(range(0), end, end := end + prompt))
        found += [Segment(before, end, end := end + own) for own in responses]
    return found


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Use PyTorch's deterministic algorithms inside the context, if `enabled`.

    Without these algorithms, CUDA sums the gradient of attention in an order that varies. Raises ConfigError if an
    operation has no deterministic algorithm."""
    settings: Any = torch.utils.deterministic
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = settings.fill_uninitialized_memory
    if enabled:
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # filling memory takes time and only helps to find bugs
    try:
        yield
    except RuntimeError as error:
        if not enabled or "deterministic implementation" not in str(error):
            raise
        raise ConfigError(
            f"a gradient cannot be added up in a fixed order on CUDA ({first_line(error)}): set train.deterministic = "
            "false; two runs may then differ in rounding"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        settings.fill_uninitialized_memory = fills


class Passes:
    """Forward passes of the policy and the reference model."""

    def __init__(
        self,
        model: Any,
        reference: Any,
        config: TrainConfig,
        rollout: RolloutConfig,
        device: torch.device,
        autocast: bool,
    ) -> None:
        self.model, self.reference, self.config, self.device = model, reference, config, device
        self.temperature = rollout.temperature
        self.forwards = {id(one): self.forward_of(one, autocast) for one in (model, reference) if one}
        self.objective = Objective(config, rollout)
        shares = all(share_prefixes(model) for model in (self.model, self.reference) if model)
        self.packer = Packer(config.micro_batch_tokens, device, shares)
        self.progress = UpdateProgress()

    def logprobs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the log-prob and the entropy of each target token of a micro-batch, [T] each."""
        return token_logprobs(self.forwards[id(model)], micro, self.temperature)

    def forward_of(self, model: Any, autocast: bool) -> Forward:
        """Return the forward pass of the policy or the reference model, by the engine's operations if possible."""
        dtype = torch.bfloat16 if autocast else model.dtype
        if can_follow(model, dtype):
            return EngineForward(model, dtype, self.config.gradient_checkpointing)
        return TransformersForward(model, autocast)

    def micro_batches(
        self, models: Sequence[Any], batch: TrainBatch, members: Sequence[int], group: ProcessGroup | None = None
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of the responses `members`, each for a pass through all `models`."""
        for layout in self.packer.plan(batch, members):
            micro = self.packer.pack(batch, layout)
            yield micro
            tokens = sum(batch.lengths(micro.sequences))
            self.progress.add(tokens * (BACKWARD_PASSES if torch.is_grad_enabled() else len(models)))

    def carried(self, batch: TrainBatch) -> dict[int, Tensor]:
        """Return the old log-probs of responses kept from an earlier step, as response index -> log-probs."""
        return {i: self.widened(of_one) for i, of_one in batch.old_logprobs.items()}

    def widened(self, logprobs: Sequence[float]) -> Tensor:
        """Return log-probs as a float32 tensor, or as float64 if the model is float64."""
        dtype = torch.float64 if self.model.dtype == torch.float64 else torch.float32
        return torch.tensor(logprobs, dtype=dtype, device=self.device)


class UpdateProgress:
    """Share of an update that is done, from 0 to 1. Other threads may read `done`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.done, self._each = 0.0, 0.0  # share of the update that is done; share that one token's forward pass adds

    def expect(self, tokens: int, end: float) -> None:
        """Let `done` grow to `end` while this number of tokens goes through the model."""
        self._each = (end - self.done) / max(1, tokens)

    def add(self, tokens: int) -> None:
        self.done += tokens * self._each
