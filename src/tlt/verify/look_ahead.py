"""Look-ahead modes of `tlt verify`: an older target decodes the step's own requests first. Its tokens serve as
drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from tlt.cluster.coordinator import Coordinator
from tlt.cluster.remote import ClusterRollout
from tlt.config import EngineConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.engine.engine import Engine
from tlt.loop import Trainable
from tlt.models.decoder import Decoder
from tlt.spelling import Detokenizer
from tlt.types import Request, Response, RolloutStats

_MOVED = 0.02  # standard deviation of the relative noise on weights before the first update


class OlderTarget:
    """Target with the weights of the previous step, whose tokens serve as look-ahead drafts. In the first step it has
    the weights of this step plus a little noise.

    It decodes a request once per step, for all modes."""

    def __init__(self, target: Decoder, config: EngineConfig, detokenize: Detokenizer) -> None:
        self.target = target.empty()
        self.target.cuda_graphs = target.cuda_graphs
        self.config, self.detokenize = config, detokenize
        self.store = AheadStore()
        self._weights: dict[int, Mapping[str, Tensor]] = {}
        self._version = self._decoded = -1  # versions of the policy: now, and when the store was filled

    def sync(self, policy: Trainable, version: int) -> None:
        """Save a copy of the policy's weights of this version, unless it is saved already. Every mode of a step syncs
        the same two versions: before and after the update."""
        self._version = version
        if version not in self._weights:
            self._weights[version] = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
            self._weights.pop(version - 2, None)

    def tokens_of(self, requests: Sequence[Request]) -> list[Ahead]:
        """Return the older target's tokens for these requests. Only requests without saved tokens are decoded."""
        if self._version != self._decoded:
            older = self._weights.get(self._version - 1) or _moved(self._weights[self._version])
            self.target.load(older, max(0, self._version - 1))  # a negative version means no weights
            self.store, self._decoded = AheadStore(), self._version
        engine = Engine(self.target, self.config, detokenize=self.detokenize, store=self.store)
        engine.look_ahead(request for request in requests if self.store.get(request) is None)
        while engine.looks_ahead:
            engine.round()
        return [ahead for request in requests if (ahead := self.store.get(request))]


def _moved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights with relative Gaussian noise of 2 %. Tied tensors stay equal, because the noise depends on the
    shape alone."""
    moved = {}
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        moved[name] = tensor * (1 + _MOVED * noise.to(tensor))
    return moved


class LookAheadRollout(ClusterRollout):
    """Rollout that has the older target's tokens as look-ahead drafts before it decodes."""

    def __init__(self, coordinator: Coordinator, older: OlderTarget) -> None:
        super().__init__(coordinator)
        self.older = older

    def sync(self, policy: Trainable, version: int) -> None:
        super().sync(policy, version)
        self.older.sync(policy, version)

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
    ) -> tuple[list[Response], RolloutStats]:
        self.coordinator.idle.ahead.store.put(self.older.tokens_of(requests))
        return super().generate(requests, on_response, coming)
