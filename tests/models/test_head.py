"""The head of a family, against the logits of the whole model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import families

from tlt.models.hugging_face import Head

TOKENS = torch.arange(9)[None]


def small(name: str, folder: Path) -> tuple[Any, Tensor]:
    """Return a model, and the hidden states [1, N, D] of a text after the final norm."""
    families.save_small(name, folder)
    model = families.policy_of(folder, torch.float64).model
    return model, model.base_model(TOKENS).last_hidden_state


@pytest.mark.parametrize("name", ["llama", "cohere", "granite", "nanochat", "phi", "gpt2"])
def test_head_computes_the_models_logits(name: str, tmp_path: Path) -> None:
    """The families have logit factors, a soft cap and a bias."""
    model, hidden = small(name, tmp_path)
    assert torch.allclose(Head(model)(hidden), model(TOKENS).logits)
    assert torch.allclose(Head(model)(hidden[0, 3]), model(TOKENS).logits[0, 3])
    assert Head(model)(hidden[0, :0]).shape == (0, model.config.vocab_size)  # a micro-batch may have no target


def test_it_follows_the_weights_and_has_their_gradients(tmp_path: Path) -> None:
    model, hidden = small("cohere", tmp_path)
    head, weight = Head(model), model.get_output_embeddings().weight
    before = head(hidden.detach())
    before.sum().backward()
    assert torch.allclose(weight.grad, model.config.logit_scale * hidden[0].sum(0).expand_as(weight))
    with torch.no_grad():
        weight.mul_(2)
    assert torch.allclose(head(hidden.detach()), 2 * before)
