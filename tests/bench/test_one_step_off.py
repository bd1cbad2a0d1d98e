"""A step trains on responses that were decoded during the previous update."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from one_step_off import OneStepOff

from tlt.types import Prompt, Request, Response, RolloutStats, SamplingParams


class Decoding:
    """Rollout that records the requests it decodes."""

    def __init__(self) -> None:
        self.coordinator = SimpleNamespace(idle=SimpleNamespace(early=SimpleNamespace(most=4)))
        self.log: list[tuple[list[int], Any]] = []

    def generate(self, requests: Sequence[Request], on_response: Any, coming: Any = (), early: Any = None) -> Any:
        self.log.append(([request.seed for request in requests], early))
        responses = [Response(request, [7, 8, 9], [], [-1.0, 0.0, -2.0], "stop") for request in requests]
        for response in responses:
            on_response(response)
        return responses, RolloutStats()


def test_a_step_returns_responses_decoded_before_the_last_update() -> None:
    steps = [[Request(Prompt(step, "", (1,)), 0, 0, seed=step, sampling=SamplingParams())] for step in range(3)]
    decoding: Any = Decoding()
    rollout, heard = OneStepOff(decoding), list[Response]()
    for step, requests in enumerate(steps):
        early: Any = f"groups of step {step}"
        responses, _ = rollout.generate(requests, heard.append, iter(steps[step + 1 :]), early)
        assert [response.request.seed for response in responses] == [step]
        assert heard.pop(0) is responses[0]
        assert responses[0].old_logprobs == [-1.0, 0.0, -2.0]
    assert heard == []
    assert decoding.log == [([0], None), ([1], "groups of step 0"), ([2], "groups of step 1")]
