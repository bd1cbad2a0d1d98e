"""Two matrices estimated from a sample of training data: one that whitens the inputs of the drafter's layer `fc`, and
weights of `fc` that predict the next hidden state best.

Shapes: N entries (token positions), I inputs of fc, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest

_RIDGE = 1e-3  # fraction of the mean second moment that is added to the diagonal in the regression
_FLOOR = 0.1  # the same for the whitening; larger, because other prompts have directions that the sample lacks


class Moments:
    """Second moments of a sample, summed over its entries in float64: `inputs` [I, I] of fc's inputs with themselves,
    and `following` [D, I] of the next hidden states with the inputs.

    `embedding` [V, D] is the target's embedding. Products are computed in `dtype`.
    """

    def __init__(self, layer: EagleLayer, embedding: Tensor, dtype: torch.dtype, sample: Iterable[Harvest]) -> None:
        size, out = layer.fc.in_features, layer.fc.out_features
        self.inputs = torch.zeros(size, size, dtype=torch.float64, device=embedding.device)
        self.following = torch.zeros(out, size, dtype=torch.float64, device=embedding.device)
        self.entries = 0
        for item in sample:
            x = fc_inputs(layer, embedding, dtype, item)
            self.inputs += x.T @ x
            self.following += item.features[1:, -out:].to(x).T @ x[:-1]
            self.entries += len(x)

    def next_hidden(self) -> Tensor:
        """Return the matrix [D, I] from inputs to the next entry's hidden state, by ridge regression."""
        return torch.linalg.solve(self._raised(_RIDGE), self.following, left=False)

    def whitening(self) -> Tensor:
        """Return a symmetric matrix [I, I]. Inputs [N, I] times this matrix have second moments of about 1."""
        values, vectors = torch.linalg.eigh(self._raised(_FLOOR) / self.entries)
        return (vectors * values.rsqrt()) @ vectors.T

    def _raised(self, share: float) -> Tensor:
        mean = self.inputs.diagonal().mean()
        return self.inputs + share * mean * torch.eye(len(self.inputs)).to(self.inputs)


def fc_inputs(layer: EagleLayer, embedding: Tensor, dtype: torch.dtype, item: Harvest) -> Tensor:
    """Return the inputs [N, I] of the drafter's layer `fc` at each entry of an item of training data, in `dtype`."""
    features = item.features.to(embedding.device, dtype)
    if layer.options.kind == "eagle3":
        return features[:, : layer.fc.in_features]
    embedded = F.embedding(item.tokens.to(embedding.device), embedding).to(dtype)
    return torch.cat([embedded, features[:, -layer.options.hidden_size :]], dim=-1)
