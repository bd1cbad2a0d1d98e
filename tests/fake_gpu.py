"""A GPU without a GPU: tensors of a made-up device that have shapes and no numbers (torch's FakeTensorMode).

An operation on two devices raises. A copy to the host (`.item()`, `.tolist()`, `bool()`, `.numpy()`) raises too, except
through `tlt.models.device.to_host`, which is counted and returns made-up numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

import tlt.draft.chains
import tlt.engine.runner
import tlt.models.device
from tlt.draft.drafter import Candidates, Level
from tlt.draft.suffix import SuffixDrafter

NAME = "fakegpu"


@cache
def device() -> torch.device:
    """Return a device of a type that torch knows only by name."""
    register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if register is None:
        pytest.skip("this torch has no devices in Python")
    register(NAME)
    return torch.device(NAME, 0)


class _FromLists(TorchFunctionMode):
    """Mode in which torch.tensor accepts made-up devices. Only shape and type of the result are used."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        where = kwargs.get("device")
        if func is torch.tensor and where is not None and torch.device(where).type == NAME:
            del kwargs["device"]
            made = func(*args, **kwargs)
            return torch.empty(made.shape, dtype=made.dtype, device=where)
        return func(*args, **kwargs)


@dataclass
class Trips:
    """Counter of copies to the host."""

    count: int = 0


def _made_up(tensor: Tensor) -> np.ndarray:
    """Return token 1 everywhere, and finite falling scores."""
    shape = tuple(tensor.shape)
    if tensor.dtype == torch.int64:
        return np.ones(shape, dtype=np.int64)
    return np.broadcast_to(-np.arange(shape[-1], dtype=np.float64), shape).copy()


class HostSuffix(SuffixDrafter):
    """Suffix drafter that works on the host with real numbers, and returns tensors without numbers."""

    def predict(self, level: Level) -> Candidates:
        with unset_fake_temporarily():
            found = super().predict(level)
        assert found.ids is not None
        return found._replace(ids=torch.empty(found.ids.shape, dtype=torch.long), log_q=torch.empty(found.log_q.shape))


@contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[Trips]:
    device()
    trips = Trips()

    def to_host(*tensors: Tensor) -> list[np.ndarray]:
        assert all(tensor.device.type == tensors[0].device.type for tensor in tensors)
        trips.count += tensors[0].device.type == NAME
        return [_made_up(tensor) for tensor in tensors]

    for module in (tlt.models.device, tlt.draft.chains, tlt.engine.runner):
        patch.setattr(module, "to_host", to_host)
    patch.delenv("TLT_AUDIT", raising=False)  # the ledger reads what a pass is made of
    with FakeTensorMode(allow_non_fake_inputs=False), _FromLists():
        yield trips
