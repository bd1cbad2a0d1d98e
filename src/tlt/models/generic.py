"""Target model of any family: transformers' own model with the engine's attention.

The attention function is registered with transformers, so it serves every model whose layers use that registry. Norms,
rotary embeddings, experts, and scalings of embeddings and logits are the family's own code. Linear layers are replaced
by `Product` (product.py), as in the fused decoder.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from tlt.files import errors_as
from tlt.models.decoder import Attend, Decoder, overwrite
from tlt.models.families import DecoderOptions
from tlt.models.hugging_face import Head
from tlt.models.model_folder import ModelError
from tlt.models.packed import EXPERTS, pack, products_in
from tlt.models.product import Product

_NAME = "tlt_engine"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")
_REMEDY = "try engine.backend = 'vllm', or give another model"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    engine_attends: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Call the engine's attention for a layer of transformers. Return its output [B, N, H, E], for `query` [B, H, N, E]
    and for `key` and `value` [B, K, N, E] of the new tokens.

    Raises ValueError for an argument that the engine does not support."""
    if engine_attends is None:
        raise ValueError("the model's layers do not pass the arguments of a forward pass to their attention")
    if attention_mask is not None:  # transformers makes none here, because the engine has its own
        raise ValueError("the model computes a mask of its own")
    if names := [name for name in _UNSUPPORTED if settings.get(name) is not None]:
        raise ValueError(f"the model's attention uses {names[0]}")
    rows, heads, new, size = query.shape
    if value.shape[-1] != size:
        raise ValueError(f"the model's values have {value.shape[-1]} dimensions per head, but its queries have {size}")
    if scaling is not None and scaling != size**-0.5:
        query = query * (scaling * size**0.5)
    query, key, value = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    layer: Any = module.layer_idx
    return engine_attends(layer, query, key, value, sliding_window).view(rows, new, heads, size), None


_TRIED = """
afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo gemma gemma3_text glm glm4 glm4_moe gpt-sw3 gpt2 gpt_neox granite granitemoe granitemoeshared
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna lfm2 llama mellum
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe
opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2
"""
TRIED = frozenset(_TRIED.split())
"""transformers model types that pass `make families` (bench/families.py)"""

AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, lambda *arguments, **settings: None)


class GenericDecoder(Decoder):
    """Target model of the engine, for families that the fused decoder does not support. It runs transformers' own
    model."""

    def __init__(self, options: DecoderOptions, dtype: torch.dtype, device: torch.device, config: Any) -> None:
        super().__init__(options, dtype, device)
        # experts, and rotary embeddings that depend on the longest position, are chosen on the host
        ropes = str(getattr(config, "rope_parameters", None))
        self.can_be_captured = not (
            any("expert" in field for field in config.to_dict()) or "dynamic" in ropes or "longrope" in ropes
        )
        self.config = copy.deepcopy(config)
        self.config._attn_implementation = _NAME

    def empty(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> GenericDecoder:
        return GenericDecoder(self.options, dtype or self.dtype, device or self.device, self.config)

    @property
    def products(self) -> list[Product]:
        return products_in(self.model)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        kind = self.config.model_type
        undecodable = partial(errors_as, ModelError, f"tlt's engine does not decode models of type {kind}", _REMEDY)
        with undecodable(), no_init_weights(), self.device:
            model = self._without_weights()
        with errors_as(ModelError, f"the weights of this {kind} do not fit its config.json", "fetch or save it again"):
            model.load_state_dict(state)
        model.eval().requires_grad_(False)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        with undecodable():
            pack(model)
        if self.version >= 0 and self.cuda_graphs and self.can_be_captured:  # graphs have the addresses of its tensors
            self._overwrite(model)
            self.version = version
            return
        self._packed = model
        self.model, self.own_head, self.embedding = model.base_model, Head(model), embedding
        with undecodable():
            if self.version < 0:
                self._check_layers()
            self.head = self.own_head.scaled(head)
        self.to_logits = Product(self.head, shared=True)
        self.version = version

    def _overwrite(self, model: Any) -> None:
        """Copy the weights of another packed model into the tensors of the present one."""
        for old, new in zip(products_in(self._packed), products_in(model), strict=True):
            overwrite(old, new)
        for kind in ("parameters", "buffers"):
            for old, new in zip(getattr(self._packed, kind)(), getattr(model, kind)(), strict=True):
                old.copy_(new)
        self.head.copy_(self.own_head.scaled(model.get_output_embeddings().weight))
        overwrite(self.to_logits, Product(self.head, shared=True))

    def _without_weights(self) -> Any:
        implementation = {"experts_implementation": EXPERTS} if self.device.type == "cpu" else {}
        try:
            return AutoModelForCausalLM.from_config(self.config, dtype=self.dtype, **implementation)
        except KeyError as error:  # Falcon, for example, picks its layers by the name of the attention
            if error.args != (_NAME,):
                raise
            raise ValueError("the model's layers support only their own attention") from None

    def _check_layers(self) -> None:
        """Run two tokens through the model. Raise ValueError if the model has state other than keys and values, if the
        sizes of its queries or keys differ from config.json, or if its sliding window is empty or not passed on."""
        o, layers, windows = self.options, list[int](), 0

        def watch(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
            sizes = [list(x.shape[1:]) for x in (query, key)]
            named = [[o.num_heads, o.head_dim], [o.num_kv_heads, o.head_dim]]
            if sizes != named:
                raise ValueError(
                    f"the model's queries and keys have [heads, dimensions] {sizes}, but config.json has {named}"
                )
            if window is not None and window < 1:
                raise ValueError(f"layer {layer} has sliding_window = {window}, and so no token to attend to")
            nonlocal windows
            layers.append(layer)
            windows += window is not None
            return query.flatten(1)

        tokens = torch.arange(2, device=self.device)[None]
        self.forward(tokens, tokens, watch)
        if sorted(layers) != list(range(o.num_layers)):
            raise ValueError(
                f"each of the model's {o.num_layers} layers must call attention once, but they made {len(layers)} "
                "calls; layers with other state than keys and values, such as Mamba's, make none"
            )
        width = getattr(self.config, "sliding_window", None)
        sliding = (getattr(self.config, "layer_types", None) or ["sliding_attention"]).count("sliding_attention")
        if width and width < o.max_positions and windows < sliding:
            raise ValueError("the model's attention does not pass on its sliding window")

    @torch.inference_mode()
    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, taps: dict[int, Any] | None = None) -> Tensor:
        inputs = {"input_ids": tokens, "position_ids": positions, "engine_attends": attend}
        found = self.model(**inputs, use_cache=False, output_hidden_states=bool(taps))
        if taps:
            taps.update({layer: found.hidden_states[layer].flatten(0, 1) for layer in taps})
        return found.last_hidden_state

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return self.own_head(hidden)
