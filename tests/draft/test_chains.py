"""Drafts: their tokens, where they end, and the acceptance rates that decide it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from tlt.draft.chains import Calibration, Draft, NoiseOf, Roots, draft_chains
from tlt.draft.drafter import Candidates, Drafter, Level, Offer, Prefix, PrefixDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.sampling_table import sampling_tensors
from tlt.types import Prompt, Request, SamplingParams

CPU = torch.device("cpu")
VOCAB = 7
STRATEGIES = st.builds(Strategy, st.just("table"), st.integers(1, 5), st.sampled_from([0.0, 0.2, 0.5]))


def request(new_tokens: int = 50, stops: tuple[int, ...] = ()) -> Request:
    return Request(Prompt(0, "", (3, 1)), 0, 0, 0, SamplingParams(max_new_tokens=new_tokens, stop_token_ids=stops))


def noise_at(row: int, depth: int) -> list[float]:
    """Return a number for each token."""
    return [3 * math.sin((31 * row + 17 * depth) * 1.7 + token * 2.3) for token in range(VOCAB)]


def noise_of(rows: int) -> NoiseOf:
    """Return noise like the engine's, which is finite for any id."""

    def noise(depth: int, ids: Tensor | None) -> Tensor:
        table = torch.tensor([noise_at(row, depth) for row in range(rows)])
        return table if ids is None else table.gather(1, ids.clamp(0, VOCAB - 1))

    return noise


class TableDrafter(PrefixDrafter):
    """Drafter whose log q is a function of the draft tokens so far. `states` carry these tokens, to check that they
    arrive."""

    name = "table"

    def __init__(self, seed: int, listed: bool, garbage: bool = False) -> None:
        self.seed, self.listed, self.garbage = seed, listed, garbage

    def offered(self, drafted: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """Return ids and log q of the next token."""
        generator = torch.Generator().manual_seed(hash((self.seed, drafted)) % 2**31)
        ids = torch.randperm(VOCAB, generator=generator)[:5].tolist() if self.listed else list(range(VOCAB))
        scores = torch.randn(len(ids), generator=generator).tolist()
        if self.garbage:
            for k, kind in enumerate(torch.randint(8, (len(ids),), generator=generator).tolist()):
                scores[k] = {0: math.nan, 1: -math.inf, 2: math.inf}.get(kind, scores[k])
                ids[k] = {3: -1, 4: VOCAB, 5: 10**9, 6: ids[0]}.get(kind, ids[k]) if self.listed else ids[k]
        return ids, scores

    def propose(self, prefixes: Sequence[Prefix]) -> Offer:
        assert all(prefix.state in (None, prefix.drafted) for prefix in prefixes)
        offers = [self.offered(prefix.drafted) for prefix in prefixes]
        states = [[(*p.drafted, token) for token in ids] for p, (ids, _) in zip(prefixes, offers, strict=True)]
        ids = torch.tensor([ids for ids, _ in offers]) if self.listed else None
        return Offer(ids, torch.tensor([scores for _, scores in offers]), states)


class Eager(TableDrafter):
    """Drafter that proposes tokens for rows whose draft has ended too."""

    def predict(self, level: Level) -> Candidates:
        return super().predict(level._replace(alive=np.ones_like(level.alive)))


Rows = Sequence[tuple[Request, Sequence[int]]]


def drafts_of(drafter: Drafter, rows: Rows, strategy: Strategy, known: Calibration | None = None) -> list[Draft]:
    drafter.begin(None)
    for asked, committed in rows:
        drafter.open(asked, committed)
    tokens = [committed[-1] if committed else asked.prompt.token_ids[-1] for asked, committed in rows]
    room = [asked.sampling.max_new_tokens - len(committed) for asked, committed in rows]
    stops = [[*asked.sampling.stop_token_ids, -1, -1][:2] for asked, _ in rows]
    sampling = sampling_tensors([asked.sampling for asked, _ in rows], CPU)
    roots = Roots(np.array(tokens), np.array(room), np.array(stops), sampling, CPU)
    return draft_chains(drafter, roots, strategy, noise_of(len(rows)), VOCAB, known or Calibration())


def drafted_slowly(
    drafter: TableDrafter, row: int, asked: Request, committed: Sequence[int], strategy: Strategy
) -> list[int]:
    """Return the draft of one row, worked out token by token in plain Python."""
    known, drafted, chance = Calibration(), list[int](), 1.0
    while len(drafted) < strategy.depth and len(committed) + len(drafted) + 1 < asked.sampling.max_new_tokens:
        if drafted and drafted[-1] in asked.sampling.stop_token_ids:
            break
        ids, scores = drafter.offered(tuple(drafted))
        noisy = [score + noise_at(row, len(drafted))[token] for token, score in zip(ids, scores, strict=True)]
        best = max(range(len(ids)), key=lambda k: noisy[k])
        second = max(score for k, score in enumerate(noisy) if k != best)
        cell = known.cells(None, len(drafted), np.array([[noisy[best], second]]))[0]
        chance *= known.table[cell]
        if chance < strategy.min_chance:
            break
        drafted.append(ids[best])
    return drafted


@given(strategy=STRATEGIES, seed=st.integers(0, 10**6), listed=st.booleans())
@settings(max_examples=150)
def test_a_draft_has_the_best_tokens_under_the_noise_while_they_are_likely(
    strategy: Strategy, seed: int, listed: bool
) -> None:
    rows = [(request(), [4]), (request(3), []), (request(stops=(3, 5)), [2])]
    for kind in (TableDrafter, Eager):
        found = drafts_of(kind(seed, listed), rows, strategy)
        for row, (draft, (asked, committed)) in enumerate(zip(found, rows, strict=True)):
            assert draft.tokens == drafted_slowly(TableDrafter(seed, listed), row, asked, committed, strategy)


@given(strategy=STRATEGIES, seed=st.integers(0, 10**6), listed=st.booleans())
@settings(max_examples=150)
def test_a_draft_is_valid_whatever_the_drafter_proposes(strategy: Strategy, seed: int, listed: bool) -> None:
    rows = [(request(), [4]), (request(), []), (request(), [2, 6])]
    for draft in drafts_of(TableDrafter(seed, listed, garbage=True), rows, strategy):
        assert len(draft.tokens) == len(draft.cells) <= strategy.depth
        assert all(isinstance(token, int) and 0 <= token < VOCAB for token in draft.tokens)
        assert not draft.ahead


class Wrong(TableDrafter):
    """Drafter whose candidates have a wrong shape or type."""

    def __init__(self, wrong: Candidates) -> None:
        super().__init__(0, listed=True)
        self.wrong = wrong

    def predict(self, level: Level) -> Candidates:
        return self.wrong


IDS, LOG_Q = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
WRONG = {
    "log_q of one row": Candidates(None, torch.zeros(1, VOCAB)),
    "log_q of a part of the vocabulary": Candidates(None, LOG_Q),
    "log_q beyond the vocabulary": Candidates(None, torch.zeros(2, VOCAB + 1)),
    "log_q of no token": Candidates(None, torch.zeros(2, 0)),
    "a dimension too many": Candidates(None, torch.zeros(2, 1, VOCAB)),
    "ids of another shape": Candidates(IDS[:1], LOG_Q),
    "ids of another type": Candidates(IDS.int(), LOG_Q),
    "ids that are no integers": Candidates(IDS + 0.5, LOG_Q),
    "classes of one row": Candidates(IDS, LOG_Q, np.zeros(1, dtype=np.int64)),
    "classes of each candidate": Candidates(IDS, LOG_Q, np.zeros((2, 3), dtype=np.int64)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_candidates_of_a_wrong_shape_are_refused(wrong: Candidates) -> None:
    with pytest.raises(ValueError, match=r"Candidates\.\w+ must"):
        drafts_of(Wrong(wrong), [(request(), [4])] * 2, Strategy("table", 2))


def cell(*scores: float, depth: int = 0, kind: int = 0) -> int:
    """Return the calibration cell of a draft token with these noisy scores, best first."""
    return int(Calibration().cells(np.array([kind]) if kind else None, depth, np.array([scores]))[0])


def test_without_counts_the_probability_rises_with_the_lead() -> None:
    chances = [Calibration().table[cell(lead, 0.0)] for lead in np.linspace(0, 8, 33)]
    assert chances == sorted(chances)
    assert chances[0] == 0.5
    assert 0.99 < chances[-1] < 1
    assert Calibration().table[cell(1.0)] == Calibration().table[cell(1.0, -math.inf)] == chances[-1]


def test_a_probability_is_estimated_from_draft_tokens_that_were_reached() -> None:
    """The first token is accepted three times in four, and the second one never."""
    known = Calibration()
    first, second = cell(1.0, 0.0), cell(1.0, 0.0, depth=1)
    for turn in range(2000):
        known.observe([([first, second], 0 if turn % 4 == 0 else 1)])
    known.next_round()
    assert known.table[first] == pytest.approx(0.75, abs=0.02)
    assert known.table[second] < 0.02
    assert known.seen[second] == 1500
    assert known.acceptance_rates(3) == [0.75, 0.0, None]


@pytest.mark.parametrize(
    ("turns", "low", "high"),
    [([0] * 3000 + [1] * 3000, 0.9, 1.0), ([1, 0, 0, 0] * 1000, 0.23, 0.27)],
    ids=["old counts decay", "a constant rate over many half-lives"],
)
def test_a_rate_is_estimated_from_the_last_rounds(turns: list[int], low: float, high: float) -> None:
    known, where = Calibration(), cell(1.0, 0.0, kind=3)
    for accepted in turns:
        known.observe([([where], accepted)])
        known.next_round()
    assert low < known.table[where] < high


def test_classes_and_depths_do_not_share_cells() -> None:
    cells = {
        cell(*scores, depth=d, kind=kind) for kind in range(4) for d in range(8) for scores in ((1.0, 0.0), (9.0,))
    }
    assert len(cells) == 4 * 8 * 2


def test_draft_tokens_that_are_never_accepted_are_no_longer_verified() -> None:
    drafter, strategy = TableDrafter(1, listed=False), Strategy("table", 3, min_chance=0.2)
    known, row = Calibration(), (request(), [5])
    assert drafts_of(drafter, [row], strategy, known)[0].tokens
    for _ in range(100):
        (draft,) = drafts_of(drafter, [row], strategy, known)
        known.observe([(draft.cells, 0)])
        known.next_round()
    assert drafts_of(drafter, [row], strategy, known) == [Draft([], [])]
    known.renew()  # its successor may be right
    assert drafts_of(drafter, [row], strategy, known)[0].tokens


def test_counts_of_a_drafter_weigh_two_tokens_for_its_successor() -> None:
    """The drafter had 25 of 100 tokens accepted, so its successor begins with half a token of two."""
    known, where, rare = Calibration(), cell(1.0, 0.0), cell(9.0, 0.0)
    for turn in range(100):
        known.observe([([where], turn % 4 == 0)])
    known.observe([([rare], 1)])
    known.renew()
    assert (known.seen[where], known.agreed[where]) == (2.0, 0.5)
    assert (known.seen[rare], known.agreed[rare]) == (1.0, 1.0)
