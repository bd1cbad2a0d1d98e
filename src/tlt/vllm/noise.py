"""Shared-noise sampling on the logits of another engine, so that its greedy decoding draws the tokens of tlt's engine.

An engine that decodes greedily takes the argmax of each row of logits. This module replaces a row by log p + g: p is
the sampling distribution of the request, and g the noise for its seed and position. The argmax is the sample that tlt's
own engine draws. When a draft is verified, each row has the noise of its own position, so greedy verification accepts
exactly the tokens that sampling from p would draw.

This module does not import vLLM. Shapes: R rows of logits, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tlt.sampling import SamplingTensors, gumbel_noise, has_kernel, sampling_log_probs
from tlt.types import Row

KEY = "tlt"
"""key of tlt's entry in vLLM's `SamplingParams.extra_args`"""
_LEAST_TOKENS = 256  # initial size of the log-prob buffer, in tokens of a response


@dataclass(frozen=True)
class Draw:
    """Sampling parameters and seed that are sent with a request."""

    key: int | None
    """Key under which the log-probs are fetched. A request gets a new key each time it is added to vLLM. If None, the
    log-probs are not kept."""
    seed: int
    """64-bit seed of the noise"""
    prompt_tokens: int
    """Number of prompt tokens before the response. If another engine began the response, vLLM's prompt is longer,
    because it includes the response tokens so far."""
    temperature: float
    top_k: int
    top_p: float
    prompt_id: int = 0
    """id of the prompt; a suffix draft uses other responses to it"""
    index: int = 0
    """number of the response among those to its prompt"""
    epoch: int = 0
    turn: int = 0
    """position in the response of the first token of an episode's current turn"""
    ahead: bool = False
    """whether the tokens are a draft for a later rollout"""
    show_distribution: bool = False
    """whether to keep the log-probs of the whole vocabulary at the request's last row of logits, to compare two
    models"""

    @classmethod
    def of_row(cls, key: int, row: Row) -> Draw:
        """Return what vLLM needs to know of a row that it decodes from now on."""
        request, params, prompt = row.request, row.request.sampling, row.request.prompt
        return cls(
            key,
            request.seed,
            len(prompt.token_ids),
            params.temperature,
            params.top_k,
            params.top_p,
            prompt_id=prompt.prompt_id,
            index=request.index,
            epoch=request.epoch,
            turn=row.turn,
            ahead=row.ahead,
        )

    def as_extra(self) -> dict[str, Any]:
        """Return the value for `SamplingParams.extra_args`."""
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Draw | None:
        """Return the `Draw` in a request's `extra_args`; None if they have none. Raises ValueError for invalid
        fields."""
        given = (extra or {}).get(KEY)
        if not given:
            return None
        try:
            draw = cls(**given)
        except TypeError as error:
            raise ValueError(f"extra_args['{KEY}'] has wrong fields ({error}): make it with Draw.as_extra()") from None
        if not 0 <= draw.seed < 2**64 or draw.prompt_tokens < 1 or draw.temperature < 0 or not 0 < draw.top_p <= 1:
            raise ValueError(
                f"extra_args['{KEY}'] needs 0 <= seed < 2**64, prompt_tokens >= 1, temperature >= 0 and "
                f"0 < top_p <= 1, not {draw}"
            )
        return draw

    @classmethod
    def of_params(cls, params: Any) -> Draw | None:
        """Return the `Draw` in a request's `SamplingParams`; None if they have none. Raises ValueError for an invalid
        `Draw`, or for a `Draw` with a `SamplingParams.temperature` other than 0."""
        draw = cls.of(params.extra_args)
        if draw and params.temperature != 0:
            raise ValueError(
                f"SamplingParams.temperature must be 0, not {params.temperature}: tlt's sample is the argmax of scores "
                f"with noise, and the temperature of the distribution is in extra_args['{KEY}'] ({draw.temperature})"
            )
        return draw


class NoiseTable:
    """Table of the requests in an engine's slots: their sampling parameters, and two log-probs of each sampled token:
    under the distribution that was sampled from, and under softmax(logits / temperature)."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.draws: dict[int, Draw] = {}
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)
        self._starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self._ours = torch.zeros(slots, dtype=torch.bool, device=device)
        self._temperature = torch.ones(slots, dtype=torch.float64, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.int64, device=device)
        self._top_p = torch.ones(slots, dtype=torch.float64, device=device)
        # [S, T, 2]; tokens sampled outside a response (inside its prompt or after its end) are written to index T - 1
        self._logprobs = torch.zeros(slots, _LEAST_TOKENS, 2, device=device)
        self._left: dict[int, Tensor] = {}  # log-probs by key, of requests without a slot
        self._distribution: Tensor | None = None
        self._has_kernel = has_kernel(device)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, slot: int, draw: Draw | None, longest: int) -> bool:
        """Put a request into a slot, and remove the slot's previous request. If `draw` is None, the request's logits
        stay unchanged. Return whether `draw` is given.

        `longest` is the maximum length of the prompt with its response, in tokens.
        """
        self.leave(slot)
        self._ours[slot] = draw is not None
        if draw is None:
            return False
        before = self._take_over(draw.key)
        self.draws[slot] = draw
        self._seeds[slot] = draw.seed - 2**64 if draw.seed >= 2**63 else draw.seed
        self._starts[slot] = draw.prompt_tokens
        self._temperature[slot] = draw.temperature
        self._top_k[slot] = draw.top_k
        self._top_p[slot] = draw.top_p
        slots, tokens, _ = self._logprobs.shape
        most_tokens = longest - draw.prompt_tokens
        if most_tokens + 1 > tokens:
            more = max(most_tokens + 1, 2 * tokens) - tokens
            self._logprobs = torch.cat([self._logprobs, self._logprobs.new_zeros(slots, more, 2)], dim=1)
        self._logprobs[slot, : len(before)] = before  # not empty if the request was preempted
        return True

    def _take_over(self, key: int | None) -> Tensor:
        """Return the log-probs [T, 2] of this key from before a preemption; empty if there are none.

        A slot that still has the key loses the key but keeps the noise. The noise is kept, because the slot may hold a
        live request that was submitted with the same key.
        """
        if key is None:
            return self._logprobs.new_zeros(0, 2)
        for other in [held for held, own in self.draws.items() if own.key == key]:
            self._left[key] = self._logprobs[other].clone()
            self.draws[other] = replace(self.draws[other], key=None)
        return self._left.pop(key, self._logprobs.new_zeros(0, 2))

    def leave(self, slot: int) -> None:
        """Free a slot. `take` can still return the log-probs of its request."""
        if draw := self.draws.pop(slot, None):
            if draw.key is not None:
                self._left[draw.key] = self._logprobs[slot].clone()
            self._ours[slot] = False

    def take(self, wanted: Mapping[int, tuple[int, int]]) -> dict[int, list[list[float]]]:
        """Return log-probs [tokens, 2] by key, and free the slots. `wanted` has the half-open range of response tokens
        for each key. Each request can be taken once."""
        slots = {draw.key: slot for slot, draw in self.draws.items()}
        found = {}
        for key, (first, end) in wanted.items():
            if key in slots:
                self.leave(slots[key])
            drawn = self._left.pop(key, self._logprobs.new_zeros(0, 2))  # empty if it never ran
            found[key] = drawn[first:end].tolist()
        return found

    def forget(self) -> None:
        """Drop the log-probs of requests that left their slot and were not taken."""
        self._left.clear()

    def take_distribution(self) -> Tensor:
        """Return the log-probs that `apply` kept for the request with `show_distribution`: [V], float32, in host
        memory. They can be taken once."""
        assert self._distribution is not None, "no request had show_distribution set"
        distribution, self._distribution = self._distribution, None
        return distribution.cpu()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, noise: Tensor | None = None) -> Tensor:
        """Replace logits [R, V] by scores with noise, in place, and store the log-probs of each row's argmax.

        `slots` [R] are the slots of the rows' requests. `positions` [R] are the positions of the input tokens in the
        sequence of prompt and response. `noise` is the rows' noise [R, V], if it is known. Rows of requests without a
        `Draw` are not changed.
        """
        if not self.draws:
            return logits
        times = positions + 1 - self._starts[slots]
        log_p, full, noisy = self._write_scores(logits, slots, times, noise)
        token = logits.argmax(dim=-1, keepdim=True)
        logprob = log_p.gather(-1, token)
        logprob = logprob.masked_fill(~noisy[:, None], 0.0)
        last = self._logprobs.shape[1] - 1
        inside = torch.where((times >= 0) & (times < last), times, last)
        self._logprobs[slots, inside] = torch.cat([logprob, full.gather(-1, token)], dim=-1).float()
        shown = any(draw.show_distribution for draw in self.draws.values())
        for row, slot in enumerate(slots.tolist() if shown else ()):
            if slot in self.draws and self.draws[slot].show_distribution:
                self._distribution = full[row].float()
        return logits

    def _write_scores(
        self, logits: Tensor, slots: Tensor, times: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Replace the logits of requests with a `Draw` by log p + noise, in place. `times` [R] are the positions in the
        response. Rows with temperature 0 get log p without noise. Rows of other requests do not change. Return log p
        and the log-softmax of logits / temperature, both [R, V], and a mask [R] of the rows with a temperature above
        0."""
        draws = self.draws.values()
        sampling = SamplingTensors(
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            restricted=any(draw.top_k or draw.top_p < 1 for draw in draws),
            tempered=any(draw.temperature != 1 for draw in draws),
        )
        log_p, full = sampling_log_probs(logits, sampling)
        noisy = sampling.temperature > 0
        given = self._seeds[slots], times.clamp(min=0), self._ours[slots], noisy
        if noise is not None:
            add_noise(logits, log_p, noise, *given[2:])
        elif self._has_kernel:
            from tlt import sampling_kernel

            sampling_kernel.write_scores(logits, log_p, *given)
        else:
            write_scores(logits, log_p, *given)
        return log_p, full, noisy


def write_scores(logits: Tensor, log_p: Tensor, seeds: Tensor, times: Tensor, ours: Tensor, noisy: Tensor) -> None:
    """Write log p + g(seed, time) into `logits` [R, V], for the rows in the mask `ours` [R].

    Rows outside the mask `noisy` [R] get log p alone. `log_p` is [R, V]. `seeds` and `times`, the positions in the
    response, are [R].
    """
    add_noise(logits, log_p, gumbel_noise(seeds, times, logits.shape[-1]), ours, noisy)


def add_noise(logits: Tensor, log_p: Tensor, noise: Tensor, ours: Tensor, noisy: Tensor) -> None:
    """Write log p + noise into `logits`. Shapes and masks are those of `write_scores`."""
    noise = noise.masked_fill(~noisy[:, None], 0.0)
    logits.copy_(torch.where(ours[:, None], (log_p + noise).to(logits.dtype), logits))
