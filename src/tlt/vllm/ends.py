"""Embedding and head of a model that vLLM decodes with. tlt's learned drafter reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.models.head import Head
from tlt.models.hugging_face import empty_model, names_of_ends
from tlt.models.product import Product


class Ends(Decoder):
    """Decoder without layers: it has the embedding, the head and the rotary table of the model. vLLM computes the
    passes."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_options(config), dtype, device)
        self.cuda_graphs = False  # vLLM captures its own passes, and drafts run between them
        self._config = config

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy the embedding and the head from all weights, given by their names in transformers' model."""
        model = empty_model(self._config)
        names = [f"{name}.weight" for name in names_of_ends(model)]
        first, last = (state[name] for name in (names[0], names[-1] if names[-1] in state else names[0]))
        self.embedding = first.detach().to(self.device, self.dtype, copy=True)
        tied = last.data_ptr() == first.data_ptr() or torch.equal(last, first)
        weight = self.embedding if tied else last.detach().to(self.device, self.dtype, copy=True)
        model.get_output_embeddings().weight = nn.Parameter(weight, requires_grad=False)
        self.head = Head(model).scaled(weight)
        self.to_logits, self.version = Product(self.head, shared=True), version
