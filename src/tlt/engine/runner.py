"""Target passes: prefill, and verification, which samples the token that follows each new token.

A CUDA device replays passes as CUDA graphs. A graph has fixed shapes, so the number of rows is padded to a few sizes
(bucketed graphs: arXiv 2511.16665, section 5). The rows' lengths are read on the device. For SmolLM2-135M on an H100 a
pass over few tokens then takes 4 ms instead of 13 ms.

Shapes: B rows, N new tokens per row, D hidden size, F size of a token's features (hidden states kept for the drafter).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tlt.attention.slots import SlotAttention
from tlt.cuda_graph import Addresses, Replayed, rounded_up
from tlt.draft.features import FeatureWindow
from tlt.draft.strategy import Strategy
from tlt.engine.kv_cache import KVCache
from tlt.engine.noise_window import NoiseWindow
from tlt.engine.sampling_table import BatchSampling
from tlt.models.decoder import Attend, Decoder
from tlt.models.device import to_device, to_host
from tlt.sampling import SamplingTensors, gumbel_topk, has_kernel, sampling_log_probs

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


_CACHE_BYTES = 1 << 21  # log-probs are computed in parts of this size, which fit the cache of a CPU core


class NewTokens(NamedTuple):
    """New tokens of a target pass, N for each of B rows. Shorter rows are padded at their end."""

    tokens: Tensor
    """[B, N] in host memory"""
    real: Tensor | None = None
    """[M] flat indices b * N + n of the tokens to compute, which are not padding; None: all are computed"""

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device, least: int = 1) -> NewTokens:
        """Return the tokens of all rows, padded to the longest row and to at least `least` tokens. On a CPU, padding is
        not computed."""
        counts = [len(row) for row in rows]
        width = max(least, *counts)
        padded = torch.from_numpy(np.array([[*row, *[0] * (width - len(row))] for row in rows]))
        if device.type != "cpu" or min(counts) == width:
            return cls(padded)
        real = np.arange(width) < np.array(counts)[:, None]
        return cls(padded, torch.from_numpy(np.flatnonzero(real)))

    def pick(self, x: Tensor) -> Tensor:
        """Return the M entries of `x` [B * N, ...] that are computed."""
        return x if self.real is None else x.index_select(0, self.real)

    def pad(self, x: Tensor) -> Tensor:
        """Return `x` [M, ...] as [B, N, ...], with zeros for padding."""
        if self.real is not None:
            x = x.new_zeros(self.tokens.numel(), *x.shape[1:]).index_copy_(0, self.real, x)
        return x.view(*self.tokens.shape, *x.shape[1:])


class Sampled(NamedTuple):
    """Tokens [B][N] that the target samples after each new token, and their two log-probs: see `Response`."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    full_logprobs: list[list[float]]
    finite: list[bool]
    """[B] whether all values of a row are finite"""
    features: Tensor | None = None
    """[B, N, F] hidden states for the feature window; None if there is no window"""
    computed: int = 0
    """number of tokens that the pass computed, padding included"""


class Runner:
    """Target passes over the key-value cache. A prefill writes the hidden states of the rows' last tokens to `window`.
    `prefill_tokens`: maximum number of tokens in a pass of a prefill, padding included."""

    def __init__(self, target: Decoder, cache: KVCache, window: FeatureWindow | None, prefill_tokens: int) -> None:
        self.target, self.cache, self.window, self.prefill_tokens = target, cache, window, prefill_tokens
        self.graphs = None
        if target.cuda_graphs and target.can_be_captured:
            self.graphs = GraphedPasses(cache.store, target)
        self.has_kernels = target.dtype != torch.float64 and has_kernel(target.device)

    def prefill(self, first: int, contexts: Sequence[Sequence[int]], known: Sequence[int] | None = None) -> list[bool]:
        """Compute the keys and values of each context, in the slots from `first` on. The last token of a context is not
        included, because it is the root of the row's first draft. `known` has for each context the number of
        tokens whose keys and values its slot already has (default: 0). Return for each row whether its hidden states
        are finite."""
        known = known or [0] * len(contexts)
        new = [len(context) - have for context, have in zip(contexts, known, strict=True)]
        start, finite = 0, []
        while start < len(contexts):
            stop, longest = start + 1, new[start]
            while stop < len(contexts) and (stop + 1 - start) * max(longest, new[stop]) <= self.prefill_tokens:
                longest = max(longest, new[stop])
                stop += 1
            finite += self._prefill_rows(first + start, contexts[start:stop], longest - 1)
            start = stop
        return finite

    def _prefill_rows(self, first: int, contexts: Sequence[Sequence[int]], longest: int) -> list[bool]:
        """Compute the keys and values of the last `longest` tokens of each context, not counting its final token.
        Shorter contexts are padded at their end. Return for each row whether its hidden states are finite."""
        starts = [max(0, len(c) - 1 - longest) for c in contexts]
        chunk = max(1, self.prefill_tokens // len(contexts))
        total = torch.zeros(len(contexts), device=self.target.device)
        for lo in range(0, longest, chunk):
            width = min(chunk, longest - lo)
            lows = [start + lo for start in starts]
            part = [list(c[low : min(low + width, len(c) - 1)]) for c, low in zip(contexts, lows, strict=True)]
            tokens = torch.tensor([p + [0] * (width - len(p)) for p in part])
            hidden, *features = self._pass(first, NewTokens(tokens), lows)
            total = total + hidden.sum((1, 2))  # finite if all terms are finite
            if self.window is not None:
                self._keep(self.window, features[0], first, lows, contexts)
        return np.isfinite(to_host(total)[0]).tolist()

    def _keep(
        self,
        window: FeatureWindow,
        features: Tensor,
        first: int,
        lows: Sequence[int],
        contexts: Sequence[Sequence[int]],
    ) -> None:
        """Write the hidden states of a prefilled chunk, `features` [rows, width, F], to the feature window. Only the
        last `window.window` entries of a context are written. `lows`: position of each row's first token in the
        chunk."""
        places = [
            (row, p)
            for row, context in enumerate(contexts)
            for p in range(
                max(lows[row], len(context) - 1 - window.window), min(lows[row] + features.shape[1], len(context) - 1)
            )
        ]
        for row, context in enumerate(contexts):
            window.first[first + row] = max(window.first[first + row], len(context) - 1 - window.window)
        if places:
            rows, positions = zip(*places, strict=True)
            row, offset = self._tensor([rows, [p - lows[r] for r, p in places]])
            following = [contexts[r][p + 1] for r, p in places]
            window.write([first + r for r in rows], positions, features[row, offset], following)

    def noise_depth(self, strategy: Strategy, noise: NoiseWindow, sampling: SamplingTensors) -> int:
        """Return the number of positions after the next one whose noise a round needs, or -1 if it needs none. Kernels
        make the noise of the target's tokens, so only drafts need it then."""
        if self.has_kernels and not sampling.restricted:
            return strategy.depth - 1
        return max(strategy.depth, min(strategy.ahead, noise.width - 1))

    def verify(
        self, new: NewTokens, lengths: Sequence[int], noise: NoiseWindow, times: Tensor, batch: BatchSampling
    ) -> Sampled:
        """Run one target pass over the roots and drafts of all rows. Sample the token that follows each of them, with
        the Gumbel noise of that token's position in its response. `times` [B]: number of tokens that each response has
        so far, which is the position of the token after the root. In plain decoding without prefill, the host waits for
        the device only here."""
        if self.graphs or self.has_kernels:
            new = new._replace(real=None)  # passes of a few shapes are replayed, padding included
        sampling, draws = batch.sampling, ()
        if self.has_kernels:
            draws = batch.seeds, times, sampling.temperature
        hidden, *features = self._pass(0, new, lengths, self.graphs, draws)
        found = features.pop() if draws else None
        if found is None:
            found = new.pad(self._sampled(hidden, new, noise, times, sampling))
        elif sampling.restricted:  # other rows keep the bits of the kernels
            some = ((sampling.top_k > 0) | (sampling.top_p < 1))[:, None, None]
            found = torch.where(some, new.pad(self._sampled(hidden, new, noise, times, sampling)), found)
        (host,) = to_host(found)
        tokens, logprobs, full = host[..., 0].astype(np.int64), host[..., 1], host[..., 2]
        finite = np.logical_and.reduce(np.isfinite(full), axis=1).tolist()
        computed = new.tokens.numel() if new.real is None else len(new.real)
        lists = tokens.tolist(), logprobs.tolist(), full.tolist()
        return Sampled(*lists, finite, new.pad(features[0].flatten(0, 1)) if features else None, computed)

    def _sampled(
        self, hidden: Tensor, new: NewTokens, noise: NoiseWindow, times: Tensor, sampling: SamplingTensors
    ) -> Tensor:
        """Return what `_sample` finds [M, 3] for hidden states [B, N, D], or [1, M, D] with `new.real`."""
        logits = self.target.logits(hidden).flatten(0, 1)  # [M, V]
        place = torch.arange(len(times), device=self.target.device)[:, None].expand(new.tokens.shape)
        rows, positions = (new.pick(x.flatten()) for x in (place, self._following(times, new)))
        return torch.cat(
            [
                _sample(logits[part], noise.at(rows[part], positions[part]), sampling.of(rows[part]))
                for part in _parts(logits)
            ]
        )

    def _pass(
        self,
        first: int,
        new: NewTokens,
        lengths: Sequence[int],
        graphs: GraphedPasses | None = None,
        draws: Sequence[Tensor] = (),
    ) -> tuple[Tensor, ...]:
        """Run a target pass. Return hidden states [B, N, D], and also features [B, N, F] if there is a feature window.
        With `new.real` the shapes are [1, M, D] and [1, M, F]. With `draws`, sampled tokens and their log-probs
        [B, N, 3] follow: see `sampling_kernel.sample`, whose other arguments they are."""
        self.cache.note_pass(first, lengths, new.tokens, self.target.version)
        if graphs is not None:
            return graphs(new.tokens, lengths, draws, self._forward)
        plan = self.cache.store.plan(first, lengths, new.tokens.shape[1])
        tokens, positions = new.tokens.to(self.target.device), self._following(self._tensor(lengths), new)
        if new.real is None:
            return self._forward(tokens, positions, plan, draws)
        tokens, positions = (new.pick(x.flatten())[None] for x in (tokens, positions))
        return self._forward(tokens, positions, plan, draws, new)

    def _forward(
        self, tokens: Tensor, positions: Tensor, plan: Any, draws: Sequence[Tensor], packed: NewTokens | None = None
    ) -> tuple[Tensor, ...]:
        """Compute the result of `_pass`. If `packed` is given, tokens and positions are [1, M], without its padding."""
        # padding may be beyond the last position
        positions = positions.clamp(max=self.target.options.max_positions - 1)
        attend: Attend = partial(self.cache.store.attend, plan)
        if packed:
            attend = _with_padding(attend, packed)
        taps: dict[int, Any] = dict.fromkeys(self.window.layout.taps if self.window else ())
        hidden = self.target.forward(tokens, positions, attend, taps)
        found = [hidden]
        if self.window is not None:
            tapped = [taps[layer].view_as(hidden) for layer in self.window.layout.taps]
            found.append(torch.cat([*tapped, hidden], dim=-1) if tapped else hidden)
        if draws:
            from tlt.sampling_kernel import sample

            found.append(sample(self.target.logits(hidden).flatten(0, 1), *draws).view(*tokens.shape, -1))
        return tuple(found)

    def _following(self, starts: Tensor, new: NewTokens) -> Tensor:
        """Return [B, N]: the numbers from `starts[b]` on, one for each new token of row b."""
        return starts[:, None] + torch.arange(new.tokens.shape[1], device=self.target.device)

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, device=self.target.device)


def _with_padding(attend: Attend, new: NewTokens) -> Attend:
    """Return an attention for the M tokens that are not padding. It calls `attend` with all B * N tokens."""

    def packed(layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        query, key, value = (new.pad(x).flatten(0, 1) for x in (query, key, value))
        return new.pick(attend(layer, query, key, value, window))

    return packed


def _parts(logits: Tensor) -> list[slice]:
    """Cut the rows of `logits` [M, V] into parts that fit a CPU core's cache. Other devices get one part."""
    count, vocab_size = logits.shape
    size = max(1, _CACHE_BYTES // (4 * vocab_size)) if logits.device.type == "cpu" else count
    return [slice(low, low + size) for low in range(0, count, size)]


def _sample(logits: Tensor, noise: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the token sampled from each row of logits, and its two log-probs, [M, 3] in float64. `logits` and `noise`
    are [M, V]."""
    log_p, log_full = sampling_log_probs(logits, sampling)
    token = gumbel_topk(log_p, noise).picks
    logprob = log_p.gather(-1, token)
    if sampling.greedy:
        logprob = logprob.masked_fill((sampling.temperature == 0)[:, None], 0.0)
    return torch.cat([token.double(), logprob.double(), log_full.gather(-1, token).double()], dim=-1)
