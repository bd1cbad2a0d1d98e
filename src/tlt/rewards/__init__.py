"""Rewards: each response gets a number, or the name of why it has none."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Protocol

from tlt.config import Config
from tlt.config.registry import REWARDS
from tlt.rewards.isolated import IsolatedScore, Verdict, score
from tlt.rewards.pool import ScorePool
from tlt.rewards.scores import Answer, RewardError, Term, extract_answer, make_terms, sources_sha256
from tlt.types import Prompt, Response

__all__ = ["Reward", "RewardError", "make_reward", "refuse_unanswered", "sources_sha256"]

_log = logging.getLogger(__name__)


class Reward(Protocol):
    def submit(self, response: Response) -> None:
        """Begin to score a response that is there before the others of its step."""
        ...

    def __call__(self, responses: Sequence[Response]) -> None:
        """Sets `reward` and `scores` of each response, or leaves None there and sets `outcome`."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


def make_reward(config: Config, prompts: Sequence[Prompt], log: Path | None = None) -> Scored:
    """By the recipe's reward section, for these prompts; what it prints goes to the file `log`. Raises RewardError."""
    reward = config.reward
    names = {term.name for term in reward.all_terms}
    refuse_unanswered(config, prompts)
    if all(name in REWARDS and REWARDS[name].quick for name in names):  # no process of their own
        return Scored(AtOnce(make_terms(config)), reward.answer_marker, reward.answer_end)
    computing = reward.workers or max(1, (os.cpu_count() or 1) // 2)
    return Scored(ScorePool(partial(IsolatedScore, config, log), computing), reward.answer_marker, reward.answer_end)


def refuse_unanswered(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises RewardError for a prompt without the answer that a reward of ours compares with."""
    if not any(term.name in REWARDS and REWARDS[term.name].compares for term in config.reward.all_terms):
        return
    for prompt in prompts:
        if prompt.data.get("answer") is None:
            asked = " ".join(prompt.text.split())[:80]
            which = f"prompt {prompt.prompt_id} has no answer to compare with"
            raise RewardError(f"{which} ({asked!r}): set data.answer_column")


class Scorer(Protocol):
    """Who says what an answer is worth."""

    def submit(self, prompt: Prompt, answer: Answer) -> Future[Verdict]: ...

    def result(self, verdict: Future[Verdict]) -> Verdict:
        """Of what was submitted, once it is there. Raises RewardError where it will never be."""
        ...

    def close(self) -> None: ...


class AtOnce:
    """Functions of ours, which take no time and cannot hang."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms

    def submit(self, prompt: Prompt, answer: Answer) -> Future[Verdict]:
        verdict: Future[Verdict] = Future()
        verdict.set_result(score(self.terms, prompt, answer))
        return verdict

    def result(self, verdict: Future[Verdict]) -> Verdict:
        return verdict.result()

    def close(self) -> None: ...


class Scored:
    """A recipe's rewards, by functions of ours or by a pool of processes that run those of others."""

    def __init__(self, scorer: Scorer, marker: str, end: str = "") -> None:
        self.scorer, self.marker, self.end = scorer, marker, end
        self._told: set[str] = set()
        self._begun: dict[int, tuple[Response, Future[Verdict]]] = {}  # by id

    def submit(self, response: Response) -> None:
        verdict = self.scorer.submit(response.request.prompt, self._answer(response))
        self._begun[id(response)] = response, verdict

    def __call__(self, responses: Sequence[Response]) -> None:
        for response in responses:
            if id(response) not in self._begun:
                self.submit(response)
        for response in responses:
            self._set(response, self.scorer.result(self._begun[id(response)][1]))
        self._begun.clear()

    def close(self) -> None:
        self.scorer.close()

    def _answer(self, response: Response) -> Answer:
        answer = extract_answer(response.text, self.marker, self.end)
        ids = tuple(response.token_ids)
        return Answer(response.text, answer, len(ids), ids, response.finish_reason)

    def _set(self, response: Response, verdict: Verdict) -> None:
        response.reward, response.outcome, detail, scores = verdict
        response.scores = dict(scores)
        if response.outcome and response.outcome not in self._told:
            self._told.add(response.outcome)
            prompt, answer = response.request.prompt, self._answer(response).answer
            said = f"{' '.join(detail.split())[:200]}; prompt {prompt.prompt_id}, answer {answer[:80]!r}"
            _log.warning("a response has no reward (%s: %s); more of these are counted only", response.outcome, said)
