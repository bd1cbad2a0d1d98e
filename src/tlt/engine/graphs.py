"""Target passes with padded shapes, which a CUDA device replays as CUDA graphs.

A pass over few tokens takes as long as the host needs to start its kernels. For SmolLM2-135M on an H100 that is 13 ms,
of which the device computes for 3 ms. Replayed, the pass takes 4 ms. A CUDA graph has fixed shapes and addresses. So
the number of rows, and of positions that they attend to, is padded to a few sizes (bucketed graphs: arXiv 2511.16665,
section 5).

Shapes: B rows, N new tokens per row, D hidden size, F size of a token's features (hidden states kept for the drafter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.padded import padded_plan
from tlt.attention.slots import SlotAttention, SlotPlan
from tlt.cuda_graph import Addresses, Replayed, rounded_up
from tlt.host import to_device
from tlt.models.decoder import Decoder

_LEAST_TOKENS = 512  # least number of positions in a graph; reading masked keys costs less than capturing more graphs

Forward = Callable[[Tensor, Tensor, SlotPlan], tuple[Tensor, ...]]
"""Function (tokens [B, N], positions [B, N], attention plan) -> hidden states [B, N, D], and also features [B, N, F] if
they are kept"""


class Shape(NamedTuple):
    rows: int
    new: int
    """number of new tokens of each row"""
    seen: int
    """number of positions that each row attends to"""


class GraphedPasses:
    """CUDA graphs of target passes over the first slots of the cache, one for each padded shape. They are captured
    again if the cache is resized. A pass overwrites the hidden states that the previous pass of its shape returned."""

    def __init__(self, slots: SlotAttention, target: Decoder) -> None:
        self.slots, self.target = slots, target
        self.passes: dict[Shape, PaddedPass] = {}
        self._addresses = Addresses()

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, lengths: Sequence[int], forward: Forward) -> tuple[Tensor, ...]:
        """Run a pass over the new tokens [B, N], which are in host memory, of the first B slots, which have `lengths`
        committed positions."""
        if self._addresses.have_changed(self.slots.memory[0], self.target.head):
            self.passes = {}
        shape = self._shape(len(lengths), tokens.shape[1], max(lengths))
        if shape not in self.passes:
            self.passes[shape] = PaddedPass(shape, self.slots, self.target.device)
        return self.passes[shape](tokens, lengths, forward)

    def _shape(self, rows: int, new: int, longest: int) -> Shape:
        assert longest + new <= self.slots.tokens, "the cache must resize before a pass"
        seen = max(_LEAST_TOKENS, rounded_up(longest + new, 4))
        return Shape(min(rounded_up(rows), self.slots.slots), new, min(seen, self.slots.tokens))


class PaddedPass:
    """CUDA graph of target passes of one padded shape."""

    def __init__(self, shape: Shape, slots: SlotAttention, device: torch.device) -> None:
        self.shape, self.slots = shape, slots
        self.inputs = torch.zeros(shape.rows * (shape.new + 1), dtype=torch.long, device=device)
        tokens, self.lengths = self.inputs.split([shape.rows * shape.new, shape.rows])
        self.tokens = tokens.view(shape.rows, shape.new)
        self.replayed = Replayed(device)

    def __call__(self, tokens: Tensor, lengths: Sequence[int], forward: Forward) -> tuple[Tensor, ...]:
        rows = len(lengths)
        more = self.shape.rows - rows
        padded = np.concatenate([tokens.flatten(), [0] * more * self.shape.new, lengths, [-1] * more])
        self.inputs.copy_(to_device(self.inputs.device, padded.astype(np.int64))[0])
        hidden, *features = self.replayed(lambda: self._compute(forward))
        return hidden[:rows], *[kept[:rows].clone() for kept in features]  # features are kept for some rounds

    def _compute(self, forward: Forward) -> tuple[Tensor, ...]:
        plan = padded_plan(self.slots, self.lengths, self.shape.seen, self.shape.new)
        assert plan.positions is not None, "the plan of a target pass has positions"
        return forward(self.tokens, plan.positions, plan)
