"""Copies between the host and the device."""

from __future__ import annotations

import numpy as np
import torch

from tlt.host import to_device, to_host


def test_arrays_return_as_they_were_sent() -> None:
    sent = np.array([1, 2**62, -3]), np.array([], dtype=np.int64), np.array([7])
    received = to_device(torch.device("cpu"), *sent)
    assert [tensor.dtype for tensor in received] == [torch.int64] * 3
    assert [tensor.tolist() for tensor in received] == [array.tolist() for array in sent]
    assert [array.tolist() for array in to_host(*received)] == [array.tolist() for array in sent]
