"""Shared-noise sampling of another engine's logits: what makes its greedy decoding ours.

An engine that decodes greedily takes the argmax of each row of logits. Here a row becomes log p + g, with p the
request's law and g the noise of its seed and position, so the argmax is the sample that our own engine draws. Where a
draft is verified every row has the noise of its own position, so greedy verification keeps what p would have drawn.

No vLLM here: rows, slots and positions are all it takes. Shapes: R rows of logits, S slots, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tlt.sampling import Law, gumbel_noise, log_law

KEY = "tlt"
"""of our entry in vLLM's `SamplingParams.extra_args`"""
CHAINS = "chains"
_LEAST_TOKENS = 256  # of a response, that there is room for from the start


@dataclass(frozen=True)
class Draw:
    """How a request's tokens are drawn, as it travels with the request."""

    key: int | None
    """what was drawn is asked for by it, another one each time that a request is given to the engine; None: nobody
    asks, and nothing is kept"""
    seed: int
    """64 bits"""
    prompt_tokens: int
    """tokens before the response begins; a request that goes on elsewhere brings part of its response in its prompt"""
    temperature: float
    top_k: int
    top_p: float
    show_law: bool = False
    """keep the whole law of its last row, for a comparison of two models"""

    def as_extra(self, chains: Sequence[bytes] = ()) -> dict[str, Any]:
        """For `SamplingParams.extra_args`. `chains`: what is known of the response, see `look_ahead`."""
        return {KEY: asdict(self) | {CHAINS: list(chains)}}

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Draw | None:
        """From what `as_extra` gave; None where there is nothing of ours. Raises ValueError."""
        given = {name: value for name, value in ((extra or {}).get(KEY) or {}).items() if name != CHAINS}
        if not given:
            return None
        try:
            draw = cls(**given)
        except TypeError as error:
            raise ValueError(f"extra_args['{KEY}'] is not as tlt writes it: {error}") from None
        if not 0 <= draw.seed < 2**64 or draw.prompt_tokens < 1 or draw.temperature < 0 or not 0 < draw.top_p <= 1:
            raise ValueError(f"extra_args['{KEY}'] is out of range: {draw}")
        return draw

    @classmethod
    def of_params(cls, params: Any) -> Draw | None:
        """Of a request's whole `SamplingParams`. Raises ValueError."""
        draw = cls.of(params.extra_args)
        if draw and params.temperature != 0:
            raise ValueError(
                f"extra_args['{KEY}'] has the temperature ({draw.temperature}); that of SamplingParams must be 0, as "
                "the noise is added to the logits and the greatest one is the sample"
            )
        return draw


class Drawn(NamedTuple):
    """What was drawn for a request."""

    logprobs: list[list[float]]
    """of each token that was asked for: under the law, under the softmax"""
    drafted: int
    """tokens that were proposed to it, and in how many passes; where that is counted"""
    drafts: int


class NoiseTable:
    """The draws of the requests in an engine's slots, and both log-probs of every token that was drawn."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.draws: dict[int, Draw] = {}
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._ours = torch.zeros(slots, dtype=torch.bool, device=device)
        self._temperature = torch.ones(slots, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self._top_p = torch.ones(slots, dtype=torch.float64, device=device)
        # [S, T, 2]; what is drawn outside a response, behind its end or amid a prompt, goes to the last place
        self._logprobs = torch.zeros(slots, _LEAST_TOKENS, 2, device=device)
        self._drafts: dict[int, list[int]] = {}  # by slot
        self._left: dict[int, tuple[Tensor, list[int]]] = {}  # by key, of requests that left their slot
        self._law: Tensor | None = None
        self._write = score_writer(device)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, slot: int, draw: Draw | None, most_tokens: int) -> bool:
        """A request takes a slot, whoever had it before; its response may have `most_tokens`. Whether it is ours."""
        self.leave(slot)
        self._ours[slot] = draw is not None
        if draw is None:
            return False
        before, self._drafts[slot] = self._take_over(draw.key)
        self.draws[slot] = draw
        self._seeds[slot] = draw.seed - 2**64 if draw.seed >= 2**63 else draw.seed
        self._starts[slot] = draw.prompt_tokens
        self._temperature[slot] = draw.temperature
        self._top_k[slot] = draw.top_k
        self._top_p[slot] = draw.top_p
        slots, tokens, _ = self._logprobs.shape
        if most_tokens + 1 > tokens:
            more = max(most_tokens + 1, 2 * tokens) - tokens
            self._logprobs = torch.cat([self._logprobs, self._logprobs.new_zeros(slots, more, 2)], dim=1)
        self._logprobs[slot, : len(before)] = before  # it was preempted, and goes on
        return True

    def _take_over(self, key: int | None) -> tuple[Tensor, list[int]]:
        """What was kept of a request that was preempted. Its old slot keeps the noise: should it live, it is another
        request, with a key that is not its own, and its tokens must be right all the same."""
        nothing = self._logprobs.new_zeros(0, 2), [0, 0]
        if key is None:
            return nothing
        for other in [held for held, own in self.draws.items() if own.key == key]:
            self._left[key] = self._logprobs[other].clone(), self._drafts[other]
            self.draws[other], self._drafts[other] = replace(self.draws[other], key=None), [0, 0]
        return self._left.pop(key, nothing)

    def leave(self, slot: int) -> None:
        """The slot is free; what was drawn in it can still be asked for."""
        if draw := self.draws.pop(slot, None):
            drafts = self._drafts.pop(slot)
            if draw.key is not None:
                self._left[draw.key] = self._logprobs[slot].clone(), drafts
            self._ours[slot] = False

    def drafted(self, slot: int, tokens: int) -> None:
        """A pass over the request was given so many."""
        if tokens and slot in self._drafts:
            self._drafts[slot][0] += tokens
            self._drafts[slot][1] += 1

    def take(self, wanted: Mapping[int, tuple[int, int]]) -> dict[int, Drawn]:
        """By key, of the tokens from .. to of its response. It is asked for once, as it leaves."""
        slots = {draw.key: slot for slot, draw in self.draws.items()}
        found = {}
        for key, (first, end) in wanted.items():
            if key in slots:
                self.leave(slots[key])
            drawn, drafts = self._left.pop(key, (self._logprobs.new_zeros(0, 2), [0, 0]))  # none: it was never run
            found[key] = Drawn(drawn[first:end].tolist(), *drafts)
        return found

    def forget(self) -> None:
        """What was drawn for requests that left and that nobody asked about."""
        self._left.clear()

    def take_law(self) -> Tensor:
        """[V] log-probs, in float32 and host memory, of the request that was to show them."""
        assert self._law is not None, "no request was to show its law"
        law, self._law = self._law, None
        return law.cpu()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """Logits [R, V] become noisy scores, in place. Each row belongs to the request in its slot [R]; its input token
        stands at its position [R] of the whole sequence, and the token that is drawn comes next. Rows of requests that
        are not ours stay as they are."""
        if not self.draws:
            return logits
        times = positions + 1 - self._starts[slots]
        log_p, full, noisy = self._write_scores(logits, slots, times)
        token = logits.argmax(dim=-1, keepdim=True)
        logprob = log_p.gather(-1, token)
        logprob = logprob.masked_fill(~noisy[:, None], 0.0)
        last = self._logprobs.shape[1] - 1
        inside = torch.where((times >= 0) & (times < last), times, last)
        self._logprobs[slots, inside] = torch.cat([logprob, full.gather(-1, token)], dim=-1).float()
        shown = any(draw.show_law for draw in self.draws.values())
        for row, slot in enumerate(slots.tolist() if shown else ()):
            if slot in self.draws and self.draws[slot].show_law:
                self._law = full[row].float()
        return logits

    def guess(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """As `apply`, of a drafter's logits in float32 or wider: it guesses what the target will draw there. Nothing is
        kept of it."""
        if self.draws:
            self._write_scores(logits, slots, positions + 1 - self._starts[slots])
        return logits

    def _write_scores(self, logits: Tensor, slots: Tensor, times: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """In place; log p and the log-softmax of the logits [R, V], and which rows have noise [R]."""
        draws = self.draws.values()
        law = Law(
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            restricted=any(draw.top_k or draw.top_p < 1 for draw in draws),
            tempered=any(draw.temperature != 1 for draw in draws),
        )
        log_p, full = log_law(logits, law)
        noisy = law.temperature > 0
        self._write(logits, log_p, self._seeds[slots], times.clamp(min=0), self._ours[slots], noisy)
        return log_p, full, noisy


WriteScores = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]


def score_writer(device: torch.device) -> WriteScores:
    """On a GPU one kernel, where Triton is there."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return write_scores
    from tlt.vllm import kernel

    return kernel.write_scores


def write_scores(logits: Tensor, log_p: Tensor, seeds: Tensor, times: Tensor, ours: Tensor, noisy: Tensor) -> None:
    """`logits` [R, V] become log p + g(seed, time) in the rows that are `ours` [R], log p where those are not `noisy`
    [R]; `log_p` [R, V]."""
    noise = gumbel_noise(seeds, times, logits.shape[-1]).masked_fill(~noisy[:, None], 0.0)
    logits.copy_(torch.where(ours[:, None], (log_p + noise).to(logits.dtype), logits))
