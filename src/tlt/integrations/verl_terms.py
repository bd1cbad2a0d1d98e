"""What verl asks of a rollout server: the law, the seeds, and what cannot be honoured, refused by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tlt.integrations import UnsupportedError
from tlt.sampling import request_seed
from tlt.types import SamplingParams

TESTED = ((0, 9), (0, 9))
"""the first and the last minor version of verl that the tests were run with"""


def refuse(rollout: Any) -> None:
    """Raises UnsupportedError for a section `actor_rollout_ref.rollout` that cannot be honoured."""
    for asked, what, remedy in (
        (rollout.tensor_model_parallel_size != 1, "tensor_model_parallel_size", "set it to 1"),
        (rollout.data_parallel_size != 1, "data_parallel_size", "set it to 1: each replica is an engine by itself"),
        (rollout.pipeline_model_parallel_size != 1, "pipeline_model_parallel_size", "set it to 1"),
        (rollout.ignore_eos, "ignore_eos", "set it to False"),
        (rollout.repetition_penalty != 1.0, "repetition_penalty", "set it to 1.0"),
        (rollout.quantization, "quantization", "leave it out"),
        (rollout.enable_rollout_routing_replay, "enable_rollout_routing_replay", "set it to False"),
        (
            rollout.mtp and rollout.mtp.enable_rollout,
            "mtp.enable_rollout",
            "set it to False: tlt has drafters of its own",
        ),
        (rollout.disaggregation.enabled, "disaggregation", "set it to False"),
        (rollout.dtype == "float16", "dtype = float16", "set it to bfloat16"),
    ):
        if asked:
            raise UnsupportedError(f"tlt inside verl does not do rollout.{what}: {remedy}")
    unknown = set(rollout.custom or {}) - {"speculation", "engine", "folder"}
    if unknown:
        raise UnsupportedError(
            f"rollout.custom has {sorted(unknown)}: tlt reads `speculation`, `engine` and `folder` of it"
        )


def law_of(
    asked: Mapping[str, Any], rollout: Any, prompt_tokens: int, stops: Sequence[int], longest: int
) -> SamplingParams:
    """Of one call of `generate`. A response gets what is left of the longest that prompt and response may be, unless
    the call says how much, and never more than fits into the `longest` sequence that the model is good for. Raises
    ValueError for a prompt that leaves no room."""
    known = {"temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "logprobs", "repetition_penalty"}
    if unknown := set(asked) - known:
        raise UnsupportedError(
            f"tlt inside verl does not do the sampling parameter {sorted(unknown)[0]!r}: leave it out"
        )
    if asked.get("repetition_penalty", 1.0) != 1.0:
        raise UnsupportedError("tlt inside verl does not do repetition_penalty: set it to 1.0")
    longest = min(longest, rollout.max_model_len or longest)
    if prompt_tokens >= longest:
        raise ValueError(
            f"a prompt of {prompt_tokens} tokens leaves no room for a response: the model, or "
            f"rollout.max_model_len, is good for {longest}: lower data.max_prompt_length, or filter long prompts out"
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
    """verl's request ids are random. A seed is made of what is not: the run's seed, the server, the step of the
    weights, the prompt, and how often it came since; so the same calls in another order get the same responses."""

    def __init__(self, seed: int, replica: int) -> None:
        self._seed, self._domain = seed, f"verl {replica}"
        self._step, self._asked = 0, Counter[int]()

    def step(self, number: int) -> None:
        """The weights are those of this step. verl says so again where it brings the same ones back, and what was asked
        before still counts."""
        if number != self._step:
            self._asked.clear()
        self._step = number

    def next(self, prompt: int) -> tuple[int, int]:
        """(how often this prompt came before, seed)."""
        index = self._asked[prompt]
        self._asked[prompt] += 1
        return index, request_seed(self._seed, self._domain, prompt, self._step, index)
