"""A first step in which all rewards are equal teaches nothing: what each term saw of one response tells why."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tlt.config import RewardConfig, RewardTerm
from tlt.rewards.golds import right_answers
from tlt.rewards.scores import named_terms
from tlt.types import Group, Response

log = logging.getLogger(__name__)
_SHOWN = 500
"""characters of a text"""


def warn_if_alike(groups: Sequence[Group], config: RewardConfig) -> None:
    """Log a response, what each reward term saw of it, and its scores, if all rewards of the step are equal, or all
    scores but those of the length.

    It is the longest response that ended by itself, because an answer that was cut off is 0 for that reason.
    """
    rewarded = [response for group in groups for response in group.responses if response.reward is not None]
    names = [name for name, term in named_terms(config) if term.name != "length"]
    scores = {tuple(response.scores.get(name) for name in names) or response.reward for response in rewarded}
    if len(rewarded) < 2 or len(scores) > 1:
        return
    shown = max(rewarded, key=lambda response: (response.finish_reason == "stop", len(response.token_ids)))
    ended = "ended by itself" if shown.finish_reason == "stop" else "was cut off, as all others were"
    terms = [f"{name}: {_score(shown, name)}, from {seen(term, shown, config)}" for name, term in named_terms(config)]
    if len({response.reward for response in rewarded}) == 1:
        what = f"all {len(rewarded)} rewards of the first step are {shown.reward:g}, so that it teaches nothing"
    else:
        what = f"all {len(rewarded)} responses of the first step score alike but for length, which alone it teaches"
    lines = [
        f"{what}; for example",
        f"prompt {shown.request.prompt.prompt_id}: {_end(shown.request.prompt.text)!r}",
        f"response, which {ended}: {_end(shown.text)!r}",
        *terms,
    ]
    log.warning("\n  ".join(lines))


def seen(term: RewardTerm, response: Response, config: RewardConfig) -> str:
    """Return what a term compares, in words."""
    if term.name == "format":
        return f"the pattern {term.pattern!r} and the whole response"
    if term.name == "length":
        return f"{len(response.token_ids)} tokens"
    golds = " or ".join(repr(gold) for gold in right_answers(response.request.prompt))
    missing = [mark for mark in (config.answer_marker, config.answer_end) if mark.rstrip() not in response.text]
    why = f" (the response has no {' and no '.join(map(repr, missing))})" if missing else ""
    return f"the answer {_end(response.answer)!r}{why} and the data's answer {golds}"


def _score(response: Response, name: str) -> str:
    return f"score {response.scores[name]:g}" if name in response.scores else "does not apply"


def _end(text: str) -> str:
    """The answer is at the end."""
    return text if len(text) <= _SHOWN else f"…{text[-_SHOWN:]}"
