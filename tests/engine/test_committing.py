"""Accepted draft tokens."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from tlt.draft.chains import Draft
from tlt.engine.committing import num_accepted

TOKENS = st.integers(0, 1)  # few, so that many are accepted


@given(drafted=st.lists(TOKENS, max_size=8), data=st.data())
@settings(max_examples=200)
def test_draft_tokens_are_accepted_up_to_the_first_that_the_target_does_not_sample(
    drafted: list[int], data: st.DataObject
) -> None:
    """A pass may be wider than the draft, and samples after padding do not count."""
    width = len(drafted) + data.draw(st.integers(1, 3))
    sampled = data.draw(st.lists(TOKENS, min_size=width, max_size=width))
    accepted = num_accepted(Draft(drafted), sampled)
    longest = max(n for n in range(len(drafted) + 1) if drafted[:n] == sampled[:n])
    assert accepted == longest
