"""The feature window against a plain Python implementation, the engine's features against transformers' hidden states,
and the training data made from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from random_drafter import RandomDrafter
from small import Replay, request, strategy_for, with_slots_of_any_size
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.drafter import Drafter
from tlt.draft.features import FeatureLayout, FeatureView, FeatureWindow, Harvest, Harvester
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import Strategy
from tlt.engine.engine import Engine
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, Response, Row, SamplingParams

CPU = torch.device("cpu")
DRAFTED = Strategy("", 6)
A_ROW = Row(Request(Prompt(0, "", (1,)), 0, 0, 0, SamplingParams()))


@dataclass
class PlainRow:
    """All features of a row, and the oldest position that may be read. The token after entry v is v modulo 97."""

    values: list[float] = field(default_factory=list)
    first: int = 0


def check_row(window: FeatureWindow, row: int, plain: PlainRow) -> None:
    low, length = window.start(row), len(plain.values)
    assert window.length[row] == length
    assert length - window.window <= low <= length or low == 0
    assert low >= plain.first
    features, tokens = window.read(row, low, length)
    assert features.tolist() == [[v] * 4 for v in plain.values[low:]]
    assert tokens.tolist() == [v % 97 for v in plain.values[low:]]


@given(st.data())
@settings(max_examples=120)
def test_the_window_equals_the_plain_implementation(data: st.DataObject) -> None:
    """Rows arrive, copy a prefix from another row, grow by up to one round's tokens, and leave. The last row then moves
    to the free place. A copy has the features that the source still holds. These are at least the last window, if the
    source is at most the slack ahead."""
    size = data.draw(st.sampled_from([1, 3, 8]))
    window = FeatureWindow(FeatureLayout((0,), size), 2, torch.float64, CPU)
    rows: list[PlainRow] = []
    for number in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["append", "copy", "remove", "write", "write", "write", "long"]))
        row = data.draw(st.integers(0, len(rows) - 1)) if rows else 0
        if action == "append" or not rows:
            rows.append(PlainRow())
            window.append(A_ROW, kept=0)
        elif action == "copy":
            values, first = rows[row].values, rows[row].first
            length, held = data.draw(st.integers(0, len(values))), len(values) - window.capacity
            window.append(A_ROW, kept=0)
            window.copy(row, len(rows), length)
            rows.append(PlainRow(values[:length], min(length, max(first, held))))
            assert window.start(len(rows) - 1) <= max(first, length - size, min(held, length), 0)
        elif action == "remove":
            window.remove(row, len(rows) - 1)
            rows[row] = rows[-1]
            rows.pop()
        else:
            count = data.draw(st.integers(60, 200) if action == "long" else st.integers(1, 9))
            for low in range(0, count, 16):  # as the engine writes: no more at once than a round commits
                values = rows[row].values
                part = range(len(values), len(values) + min(16, count - low))
                new = [1000.0 * number + p for p in part]
                features = torch.tensor([[v] * 4 for v in new], dtype=torch.float64)
                window.write([row] * len(new), list(part), features, [int(v) % 97 for v in new])
                values += new
        if data.draw(st.booleans()):  # what nobody read yet is written, copied and removed all the same
            for place, plain in enumerate(rows):
                check_row(window, place, plain)
    for place, plain in enumerate(rows):
        check_row(window, place, plain)


@pytest.mark.parametrize("written", [5, 66, 68, 100])
@pytest.mark.parametrize("kept", [0, 2, 5, 35, 60])
def test_a_row_that_keeps_its_place_keeps_the_features_in_its_ring(written: int, kept: int) -> None:
    window = FeatureWindow(FeatureLayout((), 3), 1, torch.float64, CPU)
    window.append(A_ROW, kept=0)
    for p in range(written):
        window.write([0], [p], torch.tensor([[float(p)]], dtype=torch.float64), [p + 1])
    window.remove(0, 0)
    kept = min(kept, written)
    window.append(A_ROW, kept)
    start = window.start(0)
    assert start == min(kept, max(0, written - window.capacity, kept - 3))
    features, tokens = window.read(0, start, kept)
    assert features[:, 0].tolist() == list(range(start, kept))
    assert tokens.tolist() == list(range(start + 1, kept + 1))


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def requests(count: int = 7, new_tokens: int = 45) -> list[Request]:
    return [
        request(
            [(3 * k + n) % 11 for k in range(5 + 3 * n)],
            500 + 10 * n,
            max(1, new_tokens - 7 * n),
            temperature=0.8,
            stop_token_ids=(9,) if n % 3 == 2 else (),
        )
        for n in range(count)
    ]


@dataclass
class Run:
    """Rollout with its responses and training data."""

    model: Model
    engine: Engine
    responses: list[Response]
    items: list[Harvest]

    def check(self) -> dict[int, list[Harvest]]:
        """Check that tokens and features are those of transformers, to the end of each response. Return the items of
        each prompt, which has one response.

        The last token of a response has not been through the target, so it has no entry."""
        found: dict[int, list[Harvest]] = {}
        for prompt, token_ids in ((r.request.prompt, r.token_ids) for r in self.responses):
            mine = found[prompt.prompt_id] = [item for item in self.items if item.prompt_id == prompt.prompt_id]
            text = [*prompt.token_ids, *token_ids]
            features = self.model.features(text, self.engine.layout.taps)
            for item in mine:
                end = item.start + len(item.tokens)
                assert item.tokens.tolist() == text[item.start + 1 : end + 1]
                assert item.prompt_length == len(prompt.token_ids)
                assert torch.allclose(item.features, features[item.start : end], rtol=0, atol=1e-9)
            assert all(one.start < other.start for one, other in itertools.pairwise(mine)), "none is given away twice"
            assert mine[-1].start + len(mine[-1].tokens) == len(text) - 1, "to the end, and not beyond"
        assert sum(map(len, found.values())) == len(self.items)
        return found


def run(
    model: Model,
    asked: Sequence[Request],
    window: int,
    drafter: Drafter | None = None,
    shape: Strategy = DRAFTED,
    bound_tokens: int | None = None,
    max_rows: int = 3,
) -> Run:
    layout, items = make_layer(model.decoder, "eagle3", window).options.layout, list[Harvest]()
    drafters, tuner = [drafter] if drafter else [], Fixed(strategy_for(drafter, shape))
    config, harvest = EngineConfig(max_rows=max_rows), items.append
    engine = Engine(model.decoder, config, drafters, tuner, layout=layout, on_harvest=harvest, kv_tokens=bound_tokens)
    if bound_tokens:
        with_slots_of_any_size(engine)
    return Run(model, engine, list(engine.generate(asked)), items)


def eagle(model: Model, window: int) -> EagleDrafter:
    return EagleDrafter(make_layer(model.decoder, "eagle3", window), model.decoder)


@pytest.mark.parametrize("drafter", ["plain", "eagle", "random"])
@pytest.mark.parametrize("window", [8, 100])
def test_training_data_equals_hidden_states_of_transformers(model: Model, window: int, drafter: str) -> None:
    """The features are those at the taps and after the final norm. Each entry has the next token and the true position.
    Entries come one window at a time."""
    drafters: dict[str, Drafter | None] = {"eagle": eagle(model, window), "random": RandomDrafter(11), "plain": None}
    found = run(model, requests(), window, drafters[drafter])
    items = found.check()
    for response in found.responses:
        *whole, last = items[response.request.prompt.prompt_id]
        first = max(0, len(response.request.prompt.token_ids) - 1 - window)  # what the prefill kept
        end = len(response.request.prompt.token_ids) + len(response.token_ids) - 1
        assert [item.start for item in whole] == [first + window * i for i in range(len(whole))]
        assert all(len(item.tokens) == window for item in whole)
        assert len(last.tokens) == min(window, end - first)
        assert len(whole) in ((end - first) // window, (end - first) // window - 1)
        covered = {p for item in (*whole, last) for p in range(item.start, item.start + len(item.tokens))}
        assert covered == set(range(first, end)), "every entry comes out"


def test_no_features_of_a_drafted_stop_token_are_kept(model: Model) -> None:
    """The target agrees with the draft and has computed the features of the stop token, but the response ends before
    it."""
    asked = [replace(r, sampling=SamplingParams(0.8, max_new_tokens=45)) for r in requests(4)]
    whole = run(model, asked, 8).responses
    stops = {r.request.seed: r.token_ids[20] for r in whole}
    asked = [replace(r, sampling=replace(r.sampling, stop_token_ids=(stops[r.seed],))) for r in asked]
    found = run(model, asked, 8, Replay(whole), DRAFTED, max_rows=4)
    assert {response.finish_reason for response in found.responses} == {"stop"}
    assert found.engine.stats.accepted > 2 * found.engine.stats.row_passes
    found.check()


def test_a_preempted_response_is_saved_as_training_data_too(model: Model) -> None:
    found = run(model, requests(8, new_tokens=60), 8, eagle(model, 8), bound_tokens=180, max_rows=8)
    assert found.engine.stats.preemptions > 0
    for mine in found.check().values():
        for one, other in itertools.pairwise(mine[:-1]):
            assert other.start >= one.start + len(one.tokens)


@pytest.mark.parametrize("longest", [30, 150])
def test_siblings_with_a_copied_prompt_have_their_own_training_data(model: Model, longest: int) -> None:
    asked = [request(tuple(range(11)) * 2, 900 + 10 * i, longest if i == 0 else 25) for i in range(6)]
    found = run(model, asked, 8, eagle(model, 8), max_rows=2)
    assert found.engine.stats.prefill_tokens == 21
    found.check()


@pytest.mark.parametrize(("wrote", "given"), [("nothing", 1), ("a token", 0), ("NaN", 0)])
def test_training_data_that_a_drafter_overwrote_is_dropped(wrote: str, given: int) -> None:
    window = FeatureWindow(FeatureLayout((), 4), 2, torch.float32, CPU)
    row = Row(A_ROW.request, tokens=[5, 6, 7])
    window.append(row, 0)
    window.write([0] * 3, range(3), torch.ones(3, 2), [5, 6, 7])
    FeatureView(window).lengths[0] = 99  # only in a copy
    if wrote == "a token":
        window.tokens[0, 1] = 8
    if wrote == "NaN":
        window.features[0, 1] = torch.nan
    found: list[Harvest] = []
    Harvester(window, 0, found.append).collect([row], finished=[0])
    assert len(found) == given


def test_windows_are_counted_by_the_row_that_grew_most(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise entries of a fast row would be overwritten before they are collected."""
    grown, write = list[tuple[int, int]](), Harvester.write

    def watched(self: Harvester, features: Any, entries: Any, most: int) -> None:
        places = entries[0].tolist()
        grown.append((most, max(map(places.count, places))))
        write(self, features, entries, most)

    monkeypatch.setattr(Harvester, "write", watched)
    run(model, requests(), 8, RandomDrafter(11))
    assert all(most == largest for most, largest in grown)
    assert {most for most, _ in grown} > {1}
