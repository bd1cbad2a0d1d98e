"""The initial weights of training: regression against NumPy's, and whitened inputs by their moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from twin import Model, make_layer, make_model

from tlt.config import DrafterTrainConfig
from tlt.draft.eagle import Kind
from tlt.draft.features import Harvest
from tlt.spot.trainer import DrafterTrainer
from tlt.spot.unroll import pack, unroll
from tlt.spot.whitening import Moments

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def harvests(kind: Kind, lengths: tuple[int, ...] = (40, 1, 90, 25, 60)) -> list[Harvest]:
    """Return hidden states that follow from earlier ones with some noise."""
    generator = torch.Generator().manual_seed(3)
    items = []
    for start, n in enumerate(lengths):
        features = torch.randn(n, 64 if kind == "eagle3" else 16, dtype=torch.float64, generator=generator).cumsum(0)
        items.append(Harvest(0, start, 0, torch.randint(11, (n,), generator=generator), features))
    return items


def rows(model: Model, kind: Kind, items: list[Harvest]) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs of fc at each entry, and the hidden state of the next one (NaN at the end of an item)."""
    embedding, x, y = model.decoder.embedding.numpy(), [], []
    for item in items:
        for i, token in enumerate(item.tokens.tolist()):
            features = item.features[i].numpy()
            x.append(features[:48] if kind == "eagle3" else np.concatenate([embedding[token], features]))
            last = i + 1 == len(item.tokens)
            y.append(np.full(16, math.nan) if last else item.features[i + 1, -16:].numpy())
    return np.array(x), np.array(y)


def test_a_random_drafter_begins_with_the_best_linear_map(model: Model) -> None:
    """NumPy's least squares, with the ridge as 32 more rows. The other parts of the layer add nothing in any column."""
    items = harvests("eagle1")
    made = DrafterTrainer(make_layer(model.decoder, "eagle1", 8), model.decoder, DrafterTrainConfig())
    made.prepare(items, from_scratch=True)
    x, y = rows(model, "eagle1", items)
    known = ~np.isnan(y[:, 0])
    ridge = math.sqrt(1e-3 * (x**2).sum() / 32)
    # what has no next entry is among the inputs, and adds to the ridge
    more = np.concatenate([x[known], x[~known], ridge * np.eye(32)])
    wanted = np.concatenate([y[known], np.zeros((len(more) - known.sum(), 16))])
    fc = np.linalg.lstsq(more, wanted, rcond=None)[0].T
    assert np.allclose(made.layer.fc.weight.detach().numpy(), fc, rtol=0, atol=1e-9)
    with torch.no_grad():
        first, second = unroll(made.layer, model.decoder.embedding, made.cos_sin, pack(items, CPU), 2)
    assert np.allclose(first.numpy(), x @ fc.T, rtol=0, atol=1e-9)
    embedded = model.decoder.embedding[items[0].tokens[1:]].numpy()
    chain = np.concatenate([embedded, first[: len(embedded)].numpy()], axis=1) @ fc.T
    assert np.allclose(second[: len(embedded)].numpy(), chain, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_white_inputs_have_unit_moments_except_for_the_floor(model: Model, kind: Kind) -> None:
    items = harvests(kind)
    layer = make_layer(model.decoder, kind, 8)
    whitening = Moments(layer, model.decoder.embedding, torch.float64, items).whitening().numpy()
    x, _ = rows(model, kind, items)
    moments = x.T @ x / len(x)
    raised = moments + 0.1 * np.trace(moments) / len(moments) * np.eye(len(moments))
    assert np.allclose(whitening @ raised @ whitening, np.eye(len(moments)), rtol=0, atol=1e-9)
    assert np.allclose(whitening, whitening.T, rtol=0, atol=1e-12)


def test_a_drafter_that_was_trained_keeps_its_weights(model: Model) -> None:
    for kind, from_scratch in (("eagle1", False), ("eagle3", True)):
        layer = make_layer(model.decoder, kind, 8)
        before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        made = DrafterTrainer(layer, model.decoder, DrafterTrainConfig())
        made.prepare(harvests(kind), from_scratch)
        assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
        assert not torch.equal(made.whitening, torch.eye(len(made.whitening)))
