"""Rewards of responses. Each response gets a number, or an outcome that names the reason why it has no reward."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tlt.config import Config
from tlt.config.registry import REWARDS
from tlt.rewards.answers import Answer, RewardError, extract_answer, is_blank, is_mathematics, right_answers
from tlt.rewards.isolated import IsolatedScore
from tlt.rewards.score_pool import ScorePool
from tlt.rewards.scores import Term, make_terms, score, sources_sha256
from tlt.rewards.verdicts import FaultLog, Verdict
from tlt.types import Prompt, Response

__all__ = ["Reward", "RewardError", "make_reward", "refuse_special_tokens", "refuse_unanswered", "sources_sha256"]


class Reward:
    """Reward of a run. This class is that of episodes. It does nothing, because the environment of an episode gives the
    reward after each turn."""

    def submit(self, response: Response) -> None:
        """Start scoring a response before the other responses of its step are finished."""

    def __call__(self, responses: Sequence[Response]) -> None:
        """Set `reward` and `scores` of each response. Wait until all are computed. If a response cannot be scored,
        leave its `reward` None and set its `outcome` to the reason."""

    def close(self) -> None:
        """End the processes that compute rewards."""


def make_reward(config: Config, prompts: Sequence[Prompt], log: Path | None = None) -> Reward:
    """Return the object that computes the recipe's reward. `prompts` are checked for the data that the reward needs.
    Output that reward functions print goes to the file `log`, or to the terminal if `log` is None. Raises
    RewardError."""
    reward = config.reward
    if reward.environment:
        return Reward()
    names = {term.name for term in reward.all_terms}
    refuse_unanswered(config, prompts)
    if all(name in REWARDS and REWARDS[name].quick for name in names):  # safe to run in this process
        return Scored(AtOnce(make_terms(config)), reward.answer_marker, reward.answer_end)
    start = partial(IsolatedScore, config, log, columns_of(prompts))
    return Scored(ScorePool(start), reward.answer_marker, reward.answer_end)


def columns_of(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of all data columns of the prompts. Add `ground_truth` if a prompt has a right answer."""
    found = dict.fromkeys(name for prompt in prompts for name in prompt.data)
    if any(prompt.ground_truth is not None for prompt in prompts):
        found["ground_truth"] = None
    return list(found)


def refuse_unanswered(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise RewardError if a built-in reward needs right answers, and the right answer of a prompt is missing. If the
    reward is `math`, also raise it for a right answer that cannot be read as mathematics."""
    names = {term.name for term in config.reward.all_terms}
    if not any(name in REWARDS and REWARDS[name].compares for name in names):
        return
    for prompt in prompts:
        asked = " ".join(prompt.text.split())[:80]
        golds = right_answers(prompt)
        if not golds or any(map(is_blank, golds)):
            columns = ", ".join(name for name in prompt.data if name != "answer")
            which = f"prompt {prompt.prompt_id} ({asked!r}) has no right answer: remove its row"
            raise RewardError(f"{which}, or set data.answer_column to one of its other columns ({columns or 'none'})")
        for gold in golds if "math" in names else ():
            if not is_mathematics(str(gold)):
                raise RewardError(
                    f"prompt {prompt.prompt_id} ({asked!r}): its answer {str(gold)[:80]!r} cannot be read as "
                    "mathematics: remove the row, write words as \\text{...}, or use reward.name = 'exact'"
                )


def refuse_special_tokens(config: Config, tokenizer: Any) -> None:
    """Raise RewardError if reward.answer_marker or reward.answer_end contains a special token, because special tokens
    are removed from the text of responses. Special tokens in data.prefill are allowed."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for name in ("answer_marker", "answer_end"):
        for token in special:
            if token in getattr(config.reward, name) and token not in config.data.prefill:
                raise RewardError(
                    f"reward.{name} contains the special token {token}, which is removed from the text that rewards "
                    'receive: use another text, or set "special": false for it in tokenizer.json and '
                    "tokenizer_config.json"
                )


class Scorer(Protocol):
    """Interface of objects that compute the `Verdict` of an answer: its reward, or the reason why it has none."""

    def submit(self, prompt: Prompt, answer: Answer, /) -> Future[Verdict]: ...

    def result(self, verdict: Future[Verdict]) -> Verdict:
        """Wait for the verdict of a submitted answer and return it. Raises RewardError if no process can compute it."""
        ...

    def close(self) -> None: ...


class AtOnce:
    """Scorer that calls built-in reward functions in this process, because they are fast and cannot hang."""

    def __init__(self, terms: Sequence[Term]) -> None:
        self.terms = terms

    def submit(self, prompt: Prompt, answer: Answer) -> Future[Verdict]:
        verdict: Future[Verdict] = Future()
        verdict.set_result(score(self.terms, prompt, answer))
        return verdict

    def result(self, verdict: Future[Verdict]) -> Verdict:
        return verdict.result()

    def close(self) -> None: ...


class Scored(Reward):
    """Reward that extracts the answer of each response and scores it. `scorer` computes the scores in this process or
    in a pool of processes. `marker` and `end` are reward.answer_marker and reward.answer_end."""

    def __init__(self, scorer: Scorer, marker: str, end: str = "") -> None:
        self.scorer, self.marker, self.end = scorer, marker, end
        self._faults = FaultLog()
        self._begun: dict[int, tuple[Response, Future[Verdict]]] = {}  # by id(response)

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
        response.reward, response.outcome, detail, scores, _ = verdict
        response.scores, response.answer = dict(scores), self._answer(response).answer
        self._faults.log(response, detail)
