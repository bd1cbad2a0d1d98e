"""Translation of verl's settings and sampling parameters. It needs no verl."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tlt.integrations.verl_terms import Seeds, UnsupportedError, refuse, to_sampling_params


def rollout(**changes: Any) -> SimpleNamespace:
    """Return the fields of verl's RolloutConfig that tlt reads."""
    plain = {
        **dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"), 1),
        **{"ignore_eos": False, "repetition_penalty": 1.0, "enable_rollout_routing_replay": False},
        **{"mtp": SimpleNamespace(enable_rollout=False), "disaggregation": SimpleNamespace(enabled=False)},
        **{"dtype": "bfloat16", "prompt_length": 20, "response_length": 30},
        **dict.fromkeys(("quantization", "custom", "max_model_len")),
    }
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((f"{kind}_parallel_size", 2) for kind in ("tensor_model", "data", "pipeline_model")),
        *[("ignore_eos", True), ("repetition_penalty", 1.1), ("quantization", "fp8"), ("dtype", "float16")],
        *[("enable_rollout_routing_replay", True), ("mtp", SimpleNamespace(enable_rollout=True))],
        *[("disaggregation", SimpleNamespace(enabled=True)), ("custom", {"specualtion": {}})],
        ("custom", {"engine": {"backend": "vllm"}}),
    ],
)
def test_unsupported_options_are_refused_by_name(name: str, value: Any) -> None:
    refuse(rollout())
    refuse(rollout(custom={"speculation": {}, "engine": {}, "folder": "x"}))
    with pytest.raises(UnsupportedError, match=r"specualtion|custom\.engine\.backend" if name == "custom" else name):
        refuse(rollout(**{name: value}))


def test_sampling_parameters_are_verls_and_the_limit_is_the_remaining_length() -> None:
    asked = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    params = to_sampling_params(asked, rollout(), 12, [3, 4], 512)
    assert (params.temperature, params.top_p, params.top_k, params.stop_token_ids) == (0.7, 0.9, 0, (3, 4))
    assert params.max_new_tokens == 30, "a response's own bound"
    assert to_sampling_params({"top_k": 5}, rollout(), 45, [], 512).max_new_tokens == 5, "a later turn: 20 + 30 - 45"
    assert to_sampling_params({"top_k": 5}, rollout(), 45, [], 512).top_k == 5
    assert to_sampling_params({"max_tokens": 7}, rollout(), 45, [], 512).max_new_tokens == 7
    assert to_sampling_params({"max_new_tokens": 9}, rollout(), 45, [], 512).max_new_tokens == 9


def test_responses_fit_the_models_limit() -> None:
    assert to_sampling_params({}, rollout(), 12, [], 40).max_new_tokens == 28
    assert to_sampling_params({"max_tokens": 100}, rollout(), 12, [], 40).max_new_tokens == 28
    assert to_sampling_params({}, rollout(max_model_len=30), 12, [], 40).max_new_tokens == 18
    with pytest.raises(ValueError, match="a prompt of 40 tokens leaves no room"):
        to_sampling_params({}, rollout(), 40, [], 40)


@pytest.mark.parametrize("asked", [{"min_p": 0.1}, {"repetition_penalty": 1.2}, {"stop": ["x"]}])
def test_an_unsupported_sampling_parameter_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(asked))):
        to_sampling_params(asked, rollout(), 1, [], 512)


def test_seeds_do_not_depend_on_the_order_of_prompts_and_are_never_repeated() -> None:
    def drawn(order: list[int], replica: int = 0, step: int = 3) -> dict[tuple[int, int], int]:
        seeds = Seeds(1, replica)
        seeds.step(step)
        return {(prompt, index): seed for prompt in order for index, seed in [seeds.next(prompt)]}

    one = drawn([5, 5, 9, 5, 9])
    assert one == drawn([9, 5, 9, 5, 5])
    found = [*one.values(), *drawn([5, 5, 9], replica=1).values(), *drawn([5, 5, 9], step=4).values()]
    assert len(set(found)) == len(found)
    again = Seeds(1, 0)
    again.step(3)
    first = again.next(5)
    again.step(3)
    assert again.next(5) != first, "the same weights again, as after a validation"
    again.step(4)
    again.step(3)
    assert again.next(5) == first, "counted anew with each step"
