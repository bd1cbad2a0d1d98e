"""Translation of verl's options into sampling parameters and seeds. Unsupported options are refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.integrations import UnsupportedError
from tlt.sampling import request_seed
from tlt.types import SamplingParams

TESTED = ((0, 9), (0, 9))
"""first and last tested version (major, minor) of verl"""


def refuse(rollout: Any) -> None:
    """Raise UnsupportedError if `actor_rollout_ref.rollout` sets an option that tlt does not support."""
    custom = rollout.custom or {}
    for asked, what, remedy in (
        (rollout.tensor_model_parallel_size != 1, "tensor_model_parallel_size", "set it to 1"),
        (rollout.data_parallel_size != 1, "data_parallel_size", "set it to 1, because each replica is one engine"),
        (rollout.pipeline_model_parallel_size != 1, "pipeline_model_parallel_size", "set it to 1"),
        (rollout.ignore_eos, "ignore_eos", "set it to False"),
        (rollout.repetition_penalty != 1.0, "repetition_penalty", "set it to 1.0"),
        (rollout.quantization, "quantization", "leave it out"),
        (rollout.enable_rollout_routing_replay, "enable_rollout_routing_replay", "set it to False"),
        (
            rollout.mtp and rollout.mtp.enable_rollout,
            "mtp.enable_rollout",
            "set it to False, because tlt has its own drafters",
        ),
        (rollout.disaggregation.enabled, "disaggregation", "set it to False"),
        (rollout.dtype == "float16", "dtype = float16", "set it to bfloat16"),
        ((custom.get("engine") or {}).get("backend", "tlt") != "tlt", "custom.engine.backend", "leave it out"),
    ):
        if asked:
            raise UnsupportedError(f"tlt does not support verl's rollout.{what}: {remedy}")
    unknown = set(custom) - {"speculation", "engine", "folder"}
    if unknown:
        raise UnsupportedError(
            f"rollout.custom has unknown keys {sorted(unknown)}: use `speculation`, `engine` and `folder` only"
        )


def to_sampling_params(
    asked: Mapping[str, Any], rollout: Any, prompt_tokens: int, stops: Sequence[int], longest: int
) -> SamplingParams:
    """Return the sampling parameters of one `generate` call. `asked` are the call's parameters, and `stops` the end
    tokens.

    If the call sets no maximum, the response has at most rollout.response_length tokens, and prompt and response have
    together at most rollout.prompt_length + rollout.response_length. They never exceed `longest` tokens, the model's
    limit, or rollout.max_model_len. Raises ValueError for a prompt that leaves no room for a response, and
    UnsupportedError for a parameter that tlt does not support.
    """
    known = {"temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "logprobs", "repetition_penalty"}
    if unknown := set(asked) - known:
        raise UnsupportedError(f"tlt does not support verl's sampling parameter {sorted(unknown)[0]!r}: remove it")
    if asked.get("repetition_penalty", 1.0) != 1.0:
        raise UnsupportedError("tlt does not support verl's repetition_penalty: set it to 1.0")
    longest = min(longest, rollout.max_model_len or longest)
    if prompt_tokens >= longest:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens leaves no room for a response, because the model or "
            f"rollout.max_model_len allows {longest} tokens: lower data.max_prompt_length, or filter out long prompts"
        )
    left = rollout.prompt_length + rollout.response_length - prompt_tokens
    most = asked.get("max_tokens", asked.get("max_new_tokens", min(rollout.response_length, left)))
    return SamplingParams(
        temperature=float(asked.get("temperature", 1.0)),
        top_k=max(0, int(asked.get("top_k", -1))),
        top_p=float(asked.get("top_p", 1.0)),
        max_new_tokens=max(1, min(int(most), longest - prompt_tokens)),
        stop_token_ids=tuple(stops),
    )


class Seeds:
    """Seeds of requests. They do not depend on verl's random request ids.

    A seed depends on the run's seed, the server, the step of the weights, the prompt, and the number of earlier
    requests with that prompt at that step. So the same calls in another order get the same responses.
    """

    def __init__(self, seed: int, replica: int) -> None:
        self._seed, self._domain = seed, f"verl {replica}"
        self._step, self._asked = 0, Counter[int]()

    def step(self, number: int) -> None:
        """Set the step of the weights. If verl restores the weights of the same step, earlier requests still count."""
        if number != self._step:
            self._asked.clear()
        self._step = number

    def next(self, prompt: int) -> tuple[int, int]:
        """Return (number of earlier requests with this prompt at this step, seed of the new request)."""
        index = self._asked[prompt]
        self._asked[prompt] += 1
        return index, request_seed(self._seed, self._domain, prompt, self._step, index)
