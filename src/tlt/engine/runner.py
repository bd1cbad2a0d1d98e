"""One target pass: trees in, the target's sample at every node out; and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.draft.features import FeatureWindow
from tlt.draft.tree import TreeBatch
from tlt.engine.kv_cache import KVCache
from tlt.engine.noise import NoiseWindow
from tlt.models.decoder import Decoder
from tlt.sampling import Law, log_law, rank
from tlt.types import SamplingParams


class Sampled(NamedTuple):
    """The target's token at each node [B][N] and its two log-probs; see `Response`."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    full_logprobs: list[list[float]]
    features: Tensor | None = None
    """[B, N, F], if a feature window wants them"""


def law_of(params: Sequence[SamplingParams], device: torch.device) -> Law:
    return Law(
        torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
        torch.tensor([p.top_k for p in params], device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
        restricted=any(p.top_k > 0 or p.top_p < 1 for p in params),
        tempered=any(p.temperature != 1 for p in params),
    )


class Runner:
    def __init__(self, target: Decoder, cache: KVCache, prefill_tokens: int) -> None:
        self.target, self.cache, self.prefill_tokens = target, cache, prefill_tokens
        self.window: FeatureWindow | None = None  # what is computed for its rows is kept there

    def prefill(self, first: int, contexts: Sequence[Sequence[int]]) -> None:
        """Fill slots first.. with the keys and values of all tokens but the last of each context (the root of its
        first round)."""
        start = 0
        while start < len(contexts):
            stop, longest = start + 1, len(contexts[start])
            while (
                stop < len(contexts) and (stop + 1 - start) * max(longest, len(contexts[stop])) <= self.prefill_tokens
            ):
                longest = max(longest, len(contexts[stop]))
                stop += 1
            self._prefill_rows(first + start, contexts[start:stop])
            start = stop

    def _prefill_rows(self, first: int, contexts: Sequence[Sequence[int]]) -> None:
        longest = max(len(c) for c in contexts) - 1
        chunk = max(1, self.prefill_tokens // len(contexts))
        for lo in range(0, longest, chunk):
            width = min(chunk, longest - lo)
            part = [list(c[lo : min(lo + width, len(c) - 1)]) for c in contexts]
            tokens = self._tensor([p + [0] * (width - len(p)) for p in part])
            depths = torch.arange(width, device=tokens.device).expand_as(tokens)
            _, features = self._pass(first, tokens, [lo] * len(contexts), depths, None)
            if self.window is not None and features is not None:
                self._keep(self.window, features, first, lo, contexts)

    def _keep(
        self, window: FeatureWindow, features: Tensor, first: int, low: int, contexts: Sequence[Sequence[int]]
    ) -> None:
        """Of a prefilled chunk [rows, width, F], what is among each row's last `window` entries."""
        places = [
            (row, p)
            for row, context in enumerate(contexts)
            for p in range(max(low, len(context) - 1 - window.window), min(low + features.shape[1], len(context) - 1))
        ]
        for row, context in enumerate(contexts):
            window.first[first + row] = max(0, len(context) - 1 - window.window)
        if places:
            rows, positions = zip(*places, strict=True)
            at = features[list(rows), [p - low for p in positions]]
            window.write([first + row for row in rows], positions, at, [contexts[row][p + 1] for row, p in places])

    def verify(self, trees: TreeBatch, lengths: Sequence[int], noise: NoiseWindow, times: Tensor, law: Law) -> Sampled:
        """Slots 0..: one pass over all trees; the target's sample at each node, under the noise of that node's
        position."""
        device = self.target.device
        hidden, features = self._pass(0, trees.tokens, lengths, trees.depths, trees.visible)
        log_p, log_full = log_law(self.target.logits(hidden), law)
        rows = torch.arange(len(lengths), device=device)[:, None]
        noise_here = noise.at(rows, times[:, None] + trees.depths)
        greedy = law.temperature == 0
        if bool(greedy.any()):
            noise_here = noise_here.masked_fill(greedy[:, None, None], 0.0)
        token = rank(log_p, noise_here).picks
        logprob = log_p.gather(-1, token).masked_fill(greedy[:, None, None], 0.0)
        tokens, logprobs, full = (x.squeeze(-1).tolist() for x in (token, logprob, log_full.gather(-1, token)))
        return Sampled(tokens, logprobs, full, features)

    def _pass(
        self, first: int, tokens: Tensor, lengths: Sequence[int], depths: Tensor, visible: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, N, D], and the features [B, N, F] that the window wants."""
        layout = self.cache.store.layout(first, lengths, visible, tokens.shape[1])
        positions = self._tensor(lengths)[:, None] + depths
        attend = partial(self.cache.store.attend, layout)
        if self.window is None:
            return self.target.forward(tokens, positions, attend), None
        taps: dict[int, Any] = dict.fromkeys(self.window.layout.taps)
        hidden = self.target.forward(tokens, positions, attend, taps)
        tapped = [taps[layer].view_as(hidden) for layer in self.window.layout.taps]
        return hidden, torch.cat([*tapped, hidden], dim=-1) if tapped else hidden

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.target.device)
