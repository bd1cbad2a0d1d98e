"""Rewards: each response gets a number, or the name of why it has none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from tlt.config import Config
from tlt.rewards.isolated import IsolatedScore, Verdict, judge
from tlt.rewards.scores import Answer, RewardError, extract_answer, make_terms
from tlt.types import Prompt, Response

__all__ = ["Reward", "RewardError", "make_reward"]

Reward = Callable[[Sequence[Response]], None]
"""Sets `reward` and `scores` of each response, or leaves None there and sets `outcome`."""

_log = logging.getLogger(__name__)
_OURS = ("exact", "length")  # neither runs code of others nor can hang: no process of its own


def make_reward(config: Config, prompts: Sequence[Prompt]) -> Judges:
    """By the recipe's reward section, for these prompts. Raises RewardError."""
    names = {term.name for term in config.reward.all_terms}
    if names & {"exact", "math"}:
        for prompt in prompts:
            if prompt.data.get("answer") is None:
                raise RewardError(f"prompt {prompt.prompt_id} has no answer to compare with: set data.answer_column")
    if names <= set(_OURS):
        return Judges([partial(judge, make_terms(config))], config.reward.answer_marker)
    isolated = [IsolatedScore(config) for _ in range(config.reward.workers)]
    return Judges([one.judge for one in isolated], config.reward.answer_marker)


class Judges:
    """Responses go to the judges in turn, by their place in the list, so that one that remembers sees the same order
    again."""

    def __init__(self, judges: Sequence[Callable[[Prompt, Answer], Verdict]], marker: str) -> None:
        self.judges, self.marker = judges, marker
        self._told: set[str] = set()

    def __call__(self, responses: Sequence[Response]) -> None:
        turns = [responses[k :: len(self.judges)] for k in range(len(self.judges))]
        with ThreadPoolExecutor(len(self.judges)) as pool:
            list(pool.map(self._judge_all, self.judges, turns))

    def _judge_all(self, judge: Callable[[Prompt, Answer], Verdict], responses: Sequence[Response]) -> None:
        for response in responses:
            prompt = response.request.prompt
            answer = Answer(response.text, extract_answer(response.text, self.marker), len(response.token_ids))
            response.reward, response.outcome, detail, scores = judge(prompt, answer)
            response.scores = dict(scores)
            if response.outcome and response.outcome not in self._told:
                self._told.add(response.outcome)
                said = f"{' '.join(detail.split())[:200]}; prompt {prompt.prompt_id}, answer {answer.answer[:80]!r}"
                _log.warning(
                    "a response has no reward (%s: %s); more of these are counted only", response.outcome, said
                )
