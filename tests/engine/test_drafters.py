"""Isolation of drafters. Wrong draft tokens change no token, so only the acceptance rate shows them. A drafter that
fails, or writes into tensors that it receives, only costs speed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import small
import torch
from small import Target, build, learned, make_requests, request

from tlt.draft.chains import Draft
from tlt.draft.drafter import Candidates, Level, Offer, Prefix, PrefixDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.drafters import AcceptanceRate, Drafters
from tlt.types import Prompt, Request, SamplingParams


class Nothing(PrefixDrafter):
    name = "nothing"

    def __init__(self, published: float | None = None) -> None:
        self.acceptance_rate = published

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        return Offer(None, torch.zeros(len(prefixes), 5))


def fed(published: float | None, *parts: tuple[int, float]) -> list[bool]:
    """Return the alarm after each part. A part is a number of draft tokens and the probability that they are accepted.
    The rate is that of the last thousand tokens."""
    seen, rng, alarms = AcceptanceRate(published), random.Random(0), []
    history: list[bool] = []
    for count, chance in parts:
        for _ in range(count):
            history.append(rng.random() < chance)
            seen.add(history[-1])
            assert seen.now == pytest.approx(sum(history[-1000:]) / len(history[-1000:]))
        alarms.append(seen.alarming)
    return alarms


@pytest.mark.parametrize(
    ("published", "parts", "alarms"),
    [
        *((0.8, [(2000, now)], [alarm]) for now, alarm in ((0.8, False), (0.5, False), (0.3, True), (0.0, True))),
        (0.8, [(999, 0.0), (1, 0.0)], [False, True]),  # a thousand draft tokens are enough
        (None, [(1000, 0.6), (1000, 0.1)], [False, True]),  # the first thousand are the reference
        (None, [(1000, 0.6), (1000, 0.4)], [False, False]),
    ],
)
def test_less_than_half_of_the_published_rate_is_an_alarm(
    published: float | None, parts: list[tuple[int, float]], alarms: list[bool]
) -> None:
    assert fed(published, *parts) == alarms


def test_each_drafter_has_its_own_counts_and_a_swap_resets_only_those() -> None:
    first, second = Nothing(0.9), Nothing(0.9)
    second.name = "other"
    drafters = Drafters([first, second], build(Target()).cache)
    known, other = drafters.calibrations["nothing"], drafters.calibrations["other"]
    draft = Draft([1], [0])
    for _ in range(500):
        drafters.learn("nothing", [(draft, 0)])
        drafters.learn("nothing", [(draft, 0)])
        drafters.learn("other", [(draft, 1)])
    assert (known.seen.sum(), known.agreed.sum(), other.seen.sum(), other.agreed.sum()) == (1000, 0, 500, 500)
    assert drafters.acceptance_rates["nothing"].alarming
    drafters.swap(Nothing(0.2), None, [])
    assert (known.seen.sum(), other.seen.sum()) == (2, 500)
    assert drafters.acceptance_rates["nothing"].published == 0.2
    assert not drafters.acceptance_rates["nothing"].alarming


@pytest.mark.parametrize("corrupt", [False, True])
def test_the_engine_raises_an_alarm_only_below_the_bound(corrupt: bool) -> None:
    """The drafter is random, with a published acceptance rate of 0.9."""
    target = Target()
    drafter = learned(target)
    drafter.acceptance_rate = 0.9 if corrupt else 0.0
    engine = build(target, drafter, Strategy("", 2))
    list(engine.generate([request((i % 5, 2, i % 3), 10 * i, 48) for i in range(40)]))
    assert 0 < engine.stats.acceptance_rate["eagle"] < 0.45
    assert set(engine.stats.alarms) == ({"eagle"} if corrupt else set())


def test_the_acceptance_rate_counts_only_the_drafters_own_tokens() -> None:
    """A row that gets no draft does not count, for example if only one token may follow."""
    target = Target()
    engine = build(target, learned(target), Strategy("", 2))
    list(engine.generate([request((1, 2), 0, 1)]))
    assert engine.stats.acceptance_rate == {}


class Grabbing(PrefixDrafter):
    """Drafter that keeps all that it receives, and writes into it when it drafts."""

    name = "grabbing"

    def __init__(self) -> None:
        self.given: list[Any] = []

    def open(self, request: Request, committed: Sequence[int]) -> None:
        super().open(request, committed)
        self.given += [request, committed]

    def commit(self, row: int, tokens: Sequence[int]) -> None:
        super().commit(row, tokens)
        self.given.append(tokens)

    def predict(self, level: Level) -> Candidates:
        drafted = super().predict(level)
        self.given += [level.tokens, level.alive, *level.sampling[:3]]
        for thing in self.given:
            if isinstance(thing, np.ndarray | torch.Tensor):
                thing[...] = 1
            elif isinstance(thing, Request):
                thing.prompt.data["answer"] = "another"
            else:
                assert isinstance(thing, tuple), "nothing that can grow"
        return drafted

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        return Offer(None, torch.zeros(len(prefixes), small.VOCAB))


def test_a_drafter_that_writes_into_its_inputs_changes_nothing() -> None:
    target, drafter = Target(), Grabbing()
    samplings = [SamplingParams(0.7, max_new_tokens=20), SamplingParams(0.9, top_k=3, max_new_tokens=20)]
    prompts = [Prompt(i, "", (1, 2, i), {"answer": "right"}) for i in range(3)]
    asked = make_requests(prompts, samplings)
    engine = build(target, drafter, Strategy("", 3), max_rows=3)
    found = small.decode(engine, asked)
    small.check_tokens(found, small.reference(target, asked))
    small.check_logprobs(found, small.reference(target, asked))
    assert engine.stats.accepted > engine.stats.drafter_failures == 0
    assert all(prompt.data == {"answer": "right"} for prompt in prompts)
    assert len(drafter.given) > 50
