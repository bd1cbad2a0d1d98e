"""Averaging of replicas against arithmetic worked by hand in numpy, and what it is worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tlt.draft.average import Replica, average


def replica(seed: int, tokens: int, steps: float = 5.0) -> Replica:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"mean.a": (3, 2), "weight.a": (3, 2), "exp_avg.a": (3, 2), "exp_avg_sq.a": (3, 2), "weight.b": (4,)}
    tensors = {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in shapes.items()}
    return Replica(tensors | {"steps": torch.tensor(steps, dtype=torch.float64)}, tokens)


def test_four_replicas_are_weighed_by_their_tokens() -> None:
    tokens = (100, 0, 700, 200)
    replicas = [replica(i, n, steps=10 + i) for i, n in enumerate(tokens)]
    mean = average(replicas)
    assert mean.tokens == 1000
    assert mean.tensors.keys() == replicas[0].tensors.keys()
    for name, got in mean.tensors.items():
        parts = [r.tensors[name].numpy() for r in replicas]
        want = 0.1 * parts[0] + 0.7 * parts[2] + 0.2 * parts[3]
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-14)
    assert float(mean.tensors["steps"]) == pytest.approx(0.1 * 10 + 0.7 * 12 + 0.2 * 13)


def test_of_one_replica_nothing_changes() -> None:
    one = replica(0, 33)
    assert all(torch.equal(tensor, one.tensors[name]) for name, tensor in average([one]).tensors.items())


def test_where_nobody_trained_the_start_is_kept() -> None:
    assert average([replica(0, 0), replica(1, 0)]).tensors["weight.a"].equal(replica(0, 0).tensors["weight.a"])


def test_a_start_from_disk_may_be_less_exact() -> None:
    start = Replica({name: tensor.float() for name, tensor in replica(9, 0).tensors.items()}, 0)
    found = average([replica(0, 1), replica(1, 1)], start)
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float64}


@pytest.mark.parametrize(("count", "farther"), [(1, 1.0), (2, 2**0.5), (3, 1.5), (9, 1.5)])
def test_the_more_replicas_the_farther_from_the_start(count: int, farther: float) -> None:
    """By the square root of how many trained, and 1.5 times at most; moments and steps are the mean's."""
    start, replicas = replica(99, 0), [replica(i, 10) for i in range(count)]
    mean, found = average(replicas), average([*replicas, replica(77, 0)], start)
    for name, got in found.tensors.items():
        want = mean.tensors[name].numpy()
        if name.startswith(("weight.", "mean.")):
            want = start.tensors[name].numpy() + farther * (want - start.tensors[name].numpy())
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-12)


def test_the_only_one_that_trained_is_taken() -> None:
    trained = replica(1, 10)
    assert average([replica(0, 0), trained]) is trained
