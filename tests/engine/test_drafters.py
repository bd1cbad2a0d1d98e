"""The alarm: a drafter whose guesses went wrong changes no token, so only its agreement shows it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from small import Target, build, learned, make_requests

from tlt.draft.drafter import Node, NodeDrafter, Offer
from tlt.draft.strategy import Strategy
from tlt.engine.drafters import Agreement, Drafters
from tlt.types import Prompt, SamplingParams


class Nothing(NodeDrafter):
    name = "nothing"

    def __init__(self, published: float | None = None) -> None:
        self.agreement = published

    def propose(self, nodes: Sequence[Node]) -> Offer:
        return Offer(None, torch.zeros(len(nodes), 5))


def fed(published: float | None, *parts: tuple[int, float]) -> list[Agreement]:
    """After each part: so many guesses, right with that chance."""
    seen, rng, states = Agreement(published), random.Random(0), []
    history: list[bool] = []
    for count, chance in parts:
        for _ in range(count):
            history.append(rng.random() < chance)
            seen.add(history[-1])
            recent = history[-1000:]
            assert seen.now == pytest.approx(sum(recent) / len(recent))
        copy = Agreement(seen.published)
        copy.last, copy.right = seen.last.copy(), seen.right
        states.append(copy)
    return states


def test_agreement_is_of_the_last_thousand() -> None:
    early, late = fed(0.8, (1500, 0.8), (1000, 0.3))
    assert early.now == pytest.approx(0.8, abs=0.05)
    assert late.now == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(("now", "alarm"), [(0.8, False), (0.5, False), (0.3, True), (0.0, True)])
def test_less_than_half_of_what_was_published_alarms(now: float, alarm: bool) -> None:
    assert fed(0.8, (2000, now))[-1].alarming is alarm


def test_nothing_is_said_before_a_thousand_guesses() -> None:
    few, enough = fed(0.8, (999, 0.0), (1, 0.0))
    assert not few.alarming
    assert enough.alarming


def test_without_a_published_figure_the_first_thousand_are_the_measure() -> None:
    first, later = fed(None, (1000, 0.6), (1000, 0.1))
    assert first.published == pytest.approx(0.6, abs=0.05)
    assert not first.alarming
    assert later.alarming


def test_a_swap_starts_the_count_anew() -> None:
    drafters = Drafters([Nothing(0.9)])
    for _ in range(1000):
        drafters.agreement["nothing"].add(False)
    assert drafters.agreement["nothing"].alarming
    drafters.swap(Nothing(0.2), None, [])
    assert drafters.agreement["nothing"].published == 0.2
    assert not drafters.agreement["nothing"].alarming


@pytest.mark.parametrize("corrupt", [False, True])
def test_the_engine_raises_the_alarm_and_only_then(corrupt: bool) -> None:
    """A random drafter that is said to be right nine times in ten."""
    target = Target()
    drafter = learned(target)
    drafter.agreement = 0.9 if corrupt else 0.0
    engine = build(target, drafter, Strategy("", 2, 1, 3))
    prompts = [Prompt(i, "", (i % 5, 2, i % 3)) for i in range(40)]
    for _ in engine.generate(make_requests(prompts, [SamplingParams(max_new_tokens=48)], group=1)):
        pass
    assert 0 < engine.stats.agreement["eagle"] < 0.45
    assert set(engine.stats.alarms) == ({"eagle"} if corrupt else set())


def test_a_drafter_is_judged_by_its_own_guesses() -> None:
    """Rounds of plain decoding and rows without a tree count for nobody."""
    target = Target()
    engine = build(target, learned(target), Strategy("", 2, 1, 1))
    for _ in engine.generate(make_requests([Prompt(0, "", (1, 2))], [SamplingParams(max_new_tokens=9)])):
        pass
    assert engine.stats.agreement == {}
