"""Verification and commit of a round: one target pass over all drafts, then each row takes its accepted tokens, up to a
condition that ends its response."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from tlt.draft.chains import Draft
from tlt.engine.drafters import Drafted, Drafters
from tlt.engine.runner import NewTokens, Sampled
from tlt.engine.state import RolloutState, Round, count_depths, count_row
from tlt.spelling import Detokenizer
from tlt.types import Response, RolloutStats, Row


def num_accepted(draft: Draft, sampled: Sequence[int]) -> int:
    """Return the number of draft tokens that are accepted, which end at the first one that differs from the target's.
    `sampled[n]` is the target's token after the root and n draft tokens. The first one after the accepted tokens, which
    was not in the draft, is the bonus token."""
    for accepted, token in enumerate(draft.tokens):
        if token != sampled[accepted]:
            return accepted
    return len(draft.tokens)


def verify_drafts(now: Round, drafts: Sequence[Draft], rollout: RolloutState) -> tuple[Sequence[Draft], Sampled]:
    """Verify all drafts in one target pass. Return the drafts and the target's tokens.

    If a draft leads to a value that is not finite, repeat the pass without drafts. Otherwise the value could change
    other tokens, because a mask does not hide it (0 * NaN is NaN)."""
    sampled = _pass(now, drafts, rollout)
    spoiled = _spoiled(now, sampled)
    if spoiled and any(draft.tokens for draft in drafts):
        for place in spoiled:
            rollout.runner.cache.wipe(place, now.lengths[place])
        drafts = now.no_drafts()
        sampled = _pass(now, drafts, rollout)
    for place in _spoiled(now, sampled):
        now.rows[place].finite = False
    return drafts, sampled


def _pass(now: Round, drafts: Sequence[Draft], rollout: RolloutState) -> Sampled:
    runner, drafted = rollout.runner, any(draft.tokens for draft in drafts)
    rows = [[row.root, *draft.tokens] for row, draft in zip(now.rows, drafts, strict=True)]
    # pad a strategy's drafts to one size, so that few CUDA graphs are captured
    new = NewTokens.of(rows, runner.target.device, now.strategy.new if runner.graphs and drafted else 1)
    return runner.verify(new, now.lengths, rollout.noise, now.positions, now.batch)


def _spoiled(now: Round, sampled: Sampled) -> list[int]:
    """Return the places of rows whose values were all finite before this pass and no longer are."""
    if all(sampled.finite):
        return []
    return [place for place, row in enumerate(now.rows) if row.finite and not sampled.finite[place]]


def commit_tokens(
    now: Round, drafts: Sequence[Draft], sampled: Sampled, rollout: RolloutState, drafters: Drafters, stops: Stops
) -> tuple[list[list[int]], list[tuple[Row, str]]]:
    """Commit the accepted tokens and the bonus token of each row, up to a stop. Remove the finished rows. Return the
    new tokens of each row, and the finished rows with their finish reasons."""
    accepted = [num_accepted(*pair) if pair[0].tokens else 0 for pair in zip(drafts, sampled.tokens, strict=True)]
    tokens = [found[: count + 1] for found, count in zip(sampled.tokens, accepted, strict=True)]
    drafter = now.strategy.drafter
    news, finished = commit_rows(now.rows, drafts, accepted, tokens, drafter, rollout, drafters, stops, rollout.stats)
    for row, new, logprobs, full in zip(now.rows, news, sampled.logprobs, sampled.full_logprobs, strict=True):
        row.logprobs += logprobs[: len(new)]
        row.full_logprobs += full[: len(new)]
    if rollout.harvester and sampled.features is not None:
        rollout.harvester.write(sampled.features, _entries(news, now.lengths), max(map(len, news)))
        rollout.harvester.collect(now.rows, finished)
    # the last places first, so that the row which takes a free place has not finished
    return news, [(rollout.rows.remove(place), reason) for place, reason in reversed(finished.items())]


def commit_rows(
    rows: Sequence[Row],
    drafts: Sequence[Draft],
    accepted: Sequence[int],
    tokens: Sequence[Sequence[int]],
    drafter: str,
    rollout: Drafted,
    drafters: Drafters,
    stops: Stops,
    stats: RolloutStats,
) -> tuple[list[list[int]], dict[int, str]]:
    """Append `tokens` to the rows, each up to a stop, and count them. The first `accepted` tokens of a row were in its
    draft, which `drafter` made unless it is a look-ahead draft. Return the new tokens of each row, and the finish
    reasons by place."""
    drafters.next_round()
    learned = [(draft, n) for draft, n in zip(drafts, accepted, strict=True) if draft.tokens and not draft.ahead]
    if learned:
        drafters.learn(drafter, learned)
        count_depths(stats, drafter, learned)
    news: list[list[int]] = []
    finished: dict[int, str] = {}
    for place, (row, draft, right, some) in enumerate(zip(rows, drafts, accepted, tokens, strict=True)):
        before = len(row.tokens)
        if reason := stops.append(row, some):
            finished[place] = reason
        news.append(row.tokens[before:])
        count_row(stats, row, draft, len(row.tokens) - before, right, drafter)
    rollout.ahead.commit(news)
    drafters.commit(news)
    return news, finished


def _entries(news: Sequence[Sequence[int]], lengths: Sequence[int]) -> np.ndarray:
    """Return the entries of hidden states of a round, as `Harvester.write` takes them."""
    counts = np.array([len(new) for new in news])
    places = np.repeat(np.arange(len(news)), counts)
    indices = np.arange(len(places)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack([places, indices, np.array(lengths)[places] + indices, np.concatenate(news)])


# -- stops -------------------------------------------------------------------------------------------------------------


def response_of(row: Row, reason: str, detokenize: Detokenizer | None) -> Response:
    """Return the response of a finished row. Its text is `Prompt.prefill`, then the decoded text. Without `detokenize`
    the text is empty."""
    text = row.request.prompt.prefill + detokenize(row.tokens) if detokenize else ""
    known = {"decoded": row.decoded, "proposed": row.proposed, "replies": row.replies}
    return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, reason, text, **known)


class Stops:
    """Conditions that end a response. They are checked for each token, even if a round commits several tokens.
    `detokenize` is needed for stop strings."""

    def __init__(self, detokenize: Detokenizer | None) -> None:
        self.detokenize = detokenize

    def append(self, row: Row, tokens: Iterable[int]) -> str | None:
        """Append tokens to the row, up to a stop. Return the finish reason, or None."""
        params = row.request.sampling
        for token in tokens:
            row.tokens.append(token)
            if token in params.stop_token_ids or (params.stop_strings and self._ends_in_stop_string(row)):
                return "stop"
            if len(row.tokens) >= params.max_new_tokens:
                return "length"
        return None

    def _ends_in_stop_string(self, row: Row) -> bool:
        """Return whether the last token completes a stop string. Special tokens count as their names, so `<|im_end|>`
        can be a stop string. A stop string is not found across a special token that it does not name, or across the
        beginning of a turn."""
        assert self.detokenize is not None, "stop strings need a tokenizer"
        stops, longest = _as_bytes(row.request.sampling.stop_strings)
        # a token has at least one byte, so this tail contains any stop string that the last token completes
        tail = b"".join(map(self.detokenize.spell, row.tokens[row.turn :][-longest:]))
        return any(stop in tail for stop in stops)


@cache
def _as_bytes(stop_strings: tuple[str, ...]) -> tuple[tuple[bytes, ...], int]:
    """Return the stop strings in UTF-8, and the length in bytes of the longest."""
    stops = tuple(stop.encode() for stop in stop_strings)
    return stops, max(map(len, stops))
