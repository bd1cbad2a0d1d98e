"""The noise window against the noise function."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import tlt.engine.noise_window
from tlt.engine.noise_window import DraftNoise, NoiseWindow
from tlt.sampling import gumbel_noise
from tlt.types import Prompt, Request, Row, SamplingParams

CPU = torch.device("cpu")
VOCAB = 5


@pytest.fixture(autouse=True, scope="module")
def narrow_ring() -> Iterator[None]:
    """Keep no more positions than a round needs, so that every round wraps around."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tlt.engine.noise_window, "_MAX_WINDOW", 2)
    yield
    patch.undo()


def row(seed: int, temperature: float, new_tokens: int, begun: int = 0) -> Row:
    params = SamplingParams(temperature, max_new_tokens=new_tokens)
    return Row(Request(Prompt(0, "", (1,)), 0, 0, seed, params), [0] * begun)


def truth(row: Row, position: int) -> Tensor:
    if row.request.sampling.temperature == 0:
        return torch.zeros(VOCAB)
    return gumbel_noise(torch.tensor([row.request.seed]), torch.tensor([position]), VOCAB)[0]


@given(st.data())
@settings(max_examples=150)
def test_every_row_has_its_own_noise_after_any_arrivals_and_departures(data: st.DataObject) -> None:
    """Rows arrive, new or resumed, greedy or not, and leave. The noise of a round is there before the round is
    committed."""
    deepest = data.draw(st.integers(0, 5))
    window, rows, seeds = NoiseWindow(4, VOCAB, deepest, CPU), [], itertools.count(7)
    for _ in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from(["append", "remove", "round", "round", "round"]))
        if action == "append" or not rows:
            length = data.draw(st.integers(1, 40))
            temperature, begun = data.draw(st.sampled_from([0.0, 0.7])), data.draw(st.integers(0, length - 1))
            rows.append(row(next(seeds), temperature, length, begun))
            window.append(rows[-1], kept=0)
        elif action == "remove":
            place = data.draw(st.integers(0, len(rows) - 1))
            window.remove(place, len(rows) - 1)
            rows[place] = rows[-1]
            rows.pop()
        else:
            depth = data.draw(st.integers(0, deepest))
            one_round(window, rows, depth)
            for each in rows:
                room = each.request.sampling.max_new_tokens - 1 - len(each.tokens)
                each.tokens += [0] * min(room, data.draw(st.integers(1, depth + 1)))


def one_round(window: NoiseWindow, rows: list[Row], depth: int) -> None:
    positions = [len(each.tokens) for each in rows]
    window.prepare(positions, depth)
    at, place = torch.tensor(positions), torch.arange(len(rows))[:, None]
    found = window.at(place, at[:, None] + torch.arange(depth + 1))
    listed = torch.arange(VOCAB).flip(0).expand(len(rows), -1)
    draft = DraftNoise(window, at, depth)
    for b, each in enumerate(rows):
        for ahead in range(min(depth + 1, each.request.sampling.max_new_tokens - positions[b])):
            want = truth(each, positions[b] + ahead)
            assert torch.equal(found[b, ahead], want)
            if ahead < depth:
                assert torch.equal(draft(ahead, None)[b], want)
                assert torch.equal(draft(ahead, listed)[b], want.flip(0)), "of a listed candidate, the same"


def test_a_real_vocabulary_leaves_room_for_look_ahead_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of SmolLM2 (49,152 token ids) verify chains of 16 tokens."""
    monkeypatch.setattr(tlt.engine.noise_window, "_MAX_WINDOW", 64)
    assert NoiseWindow(64, 49_152, 6, torch.device("cpu")).width > 16
