"""Verification and commit of a round: one target pass over all drafts, then each row takes its accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence

from tlt.draft.chains import Draft
from tlt.engine.drafters import Drafters
from tlt.engine.runner import NewTokens, Sampled
from tlt.engine.state import RolloutState, Round, count_depth, count_row
from tlt.engine.stops import Stops
from tlt.types import Row


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
    return [place for place, row in enumerate(now.rows) if row.finite and not sampled.finite[place]]


def commit_tokens(
    now: Round, drafts: Sequence[Draft], sampled: Sampled, rollout: RolloutState, drafters: Drafters, stops: Stops
) -> list[tuple[Row, str]]:
    """Append the accepted tokens and the bonus token to each row, up to a stop. Remove the finished rows, and return
    them with their finish reasons."""
    drafters.next_round()
    entries: list[tuple[int, int, int, int]] = []  # place, index in the pass, position, the token that follows
    news: dict[int, list[int]] = {}
    finished: dict[int, str] = {}
    for place, (row, draft, start) in enumerate(zip(now.rows, drafts, now.lengths, strict=True)):
        accepted = num_accepted(draft, sampled.tokens[place]) if draft.tokens else 0
        if draft.tokens and not draft.ahead:
            drafters.learn(now.strategy.drafter, draft, accepted)
            count_depth(rollout.stats, now.strategy.drafter, draft, accepted)
        reason = stops.append(row, accepted + 1, sampled, place)
        taken = row.kv_length - start
        news[place] = row.tokens[-taken:]
        if rollout.harvester:
            entries += [(place, n, start + n, token) for n, token in enumerate(news[place])]
        count_row(rollout.stats, row, draft, taken, min(taken, accepted), now.strategy.drafter)
        rollout.ahead.commit(place, news[place])
        if reason:
            finished[place] = reason
    drafters.commit(news)
    if rollout.harvester and sampled.features is not None:
        rollout.harvester.write(sampled.features, entries, max(map(len, news.values())))
        rollout.harvester.collect(now.rows, finished)
    # the last places first, so that the row which takes a free place has not finished
    return [(rollout.rows.remove(place), reason) for place, reason in reversed(finished.items())]
