"""Recipes, responses and verdicts of the tests in this folder, without heavy imports."""

from __future__ import annotations

import os
import time
from typing import Any

from tlt.config import Config, RewardTerm, parse_config
from tlt.rewards.answers import Answer
from tlt.rewards.isolated import IsolatedScore, Verdict
from tlt.types import Prompt, Request, Response, SamplingParams

PROMPT = Prompt(5, "the question", (1,), {"answer": "7", "task": "sums"})


def recipe(reward: dict[str, Any], **data: Any) -> Config:
    """Return a recipe with this section [reward]. Fields of a term are moved to [[reward.terms]]."""
    fields = RewardTerm.model_fields.keys() & reward.keys()
    if not fields <= {"name"}:
        term = {name: reward[name] for name in fields}
        reward = {name: reward[name] for name in reward.keys() - fields} | {"terms": [term]}
    data = data if "tasks" in data else {"path": "-"} | data
    return parse_config({"model": {"path": "-"}, "data": data, "reward": reward})


def config(name: str = "tiny_rewards:trouble", **reward: Any) -> Config:
    return recipe({"name": name, "timeout_seconds": 20.0} | reward)


def responses(*texts: str) -> list[Response]:
    request = Request(PROMPT, 0, 0, 0, SamplingParams())
    return [Response(request, [1] * max(1, len(text)), [], [], "stop", text) for text in texts]


def answer(text: str) -> Answer:
    return Answer(text, text, max(1, len(text)))


def judged(isolated: IsolatedScore, text: str = "") -> Verdict:
    return isolated.score_all([(PROMPT, answer(text))])[0]


def is_gone(pid: int) -> bool:
    """Return whether a process ends within ten seconds."""
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
