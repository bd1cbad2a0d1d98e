"""Target passes with padded shapes, which a CUDA device replays as CUDA graphs.

A pass over few tokens takes as long as the host needs to start its kernels. For SmolLM2-135M on an H100 that is 13 ms,
of which the device computes for 3 ms. Replayed, the pass takes 4 ms. A CUDA graph has fixed shapes and addresses. So
the number of rows is padded to a few sizes (bucketed graphs: arXiv 2511.16665, section 5). The rows' lengths are read
on the device.

Shapes: B rows, N new tokens per row, D hidden size, F size of a token's features (hidden states kept for the drafter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.slots import SlotAttention
from tlt.cuda_graph import Addresses, Replayed, rounded_up
from tlt.host import to_device
from tlt.models.decoder import Decoder

Forward = Callable[[Tensor, Tensor, Any, Sequence[Tensor]], tuple[Tensor, ...]]
"""Function (tokens [B, N], positions [B, N], attention plan, draws) -> result of `Runner._pass`"""


class Shape(NamedTuple):
    rows: int
    new: int
    """number of new tokens of each row"""


class GraphedPasses:
    """CUDA graphs of target passes over the first slots of the cache, one for each padded shape. They are captured
    again if the cache is resized. A pass overwrites the hidden states that the previous pass of its shape returned."""

    def __init__(self, slots: SlotAttention, target: Decoder) -> None:
        self.slots, self.target = slots, target
        self.passes: dict[Shape, PaddedPass] = {}
        self._addresses = Addresses()

    @torch.inference_mode()
    def __call__(
        self, tokens: Tensor, lengths: Sequence[int], draws: Sequence[Tensor], forward: Forward
    ) -> tuple[Tensor, ...]:
        """Run a pass over the new tokens [B, N], which are in host memory, of the first B slots, which have `lengths`
        committed positions. `draws` are tensors [B], which are copied for `forward`."""
        if self._addresses.have_changed(self.slots.memory[0], self.target.head):
            self.passes = {}
        (rows, new), slots = tokens.shape, self.slots
        assert max(lengths) + new <= slots.tokens, "the cache must resize before a pass"
        shape = Shape(min(rounded_up(rows), slots.slots), new)
        if shape not in self.passes:
            self.passes[shape] = PaddedPass(shape, slots, self.target.device, draws)
        return self.passes[shape](tokens, lengths, draws, forward)


class PaddedPass:
    """CUDA graph of target passes of one padded shape."""

    def __init__(self, shape: Shape, slots: SlotAttention, device: torch.device, draws: Sequence[Tensor]) -> None:
        self.shape, self.slots = shape, slots
        self.inputs = torch.zeros(shape.rows * (shape.new + 1), dtype=torch.long, device=device)
        tokens, self.lengths = self.inputs.split([shape.rows * shape.new, shape.rows])
        self.tokens = tokens.view(shape.rows, shape.new)
        self.draws = [one.new_zeros(shape.rows) for one in draws]
        self.replayed = Replayed(device)

    def __call__(
        self, tokens: Tensor, lengths: Sequence[int], draws: Sequence[Tensor], forward: Forward
    ) -> tuple[Tensor, ...]:
        rows = len(lengths)
        padded = np.zeros(len(self.inputs), dtype=np.int64)
        padded[: tokens.numel()] = tokens.numpy().ravel()
        ends = padded[self.tokens.numel() :]
        ends[:rows], ends[rows:] = lengths, -1
        self.inputs.copy_(to_device(self.inputs.device, padded)[0])
        for fixed, given in zip(self.draws, draws, strict=True):
            fixed[:rows] = given
        hidden, *features = self.replayed(lambda: self._compute(forward))
        return hidden[:rows], *[kept[:rows].clone() for kept in features]  # features are kept for some rounds

    def _compute(self, forward: Forward) -> tuple[Tensor, ...]:
        plan = self.slots.fixed_plan(self.lengths, self.shape.new)
        positions = self.lengths.clamp(min=0)[:, None] + torch.arange(self.shape.new, device=self.lengths.device)
        return forward(self.tokens, positions, plan, self.draws)
