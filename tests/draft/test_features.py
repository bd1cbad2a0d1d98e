"""The feature window against a plain Python implementation, the engine's features against transformers' hidden states,
and the training data made from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.drafter import Drafter, Node, NodeDrafter, Offer
from tlt.draft.features import FeatureLayout, FeatureWindow
from tlt.draft.hostile import RandomDrafter
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.engine import Engine
from tlt.engine.harvest import Harvester
from tlt.engine.tuner import Fixed
from tlt.spot.buffer import Harvest
from tlt.types import Prompt, Request, Response, Row, SamplingParams

CPU = torch.device("cpu")
A_ROW = Row(Request(Prompt(0, "", (1,)), 0, 0, 0, SamplingParams()))


# -- the window alone --------------------------------------------------------------------------------------------------


@dataclass
class PlainRow:
    """All features of a row by position, and the oldest position that may be read."""

    entries: dict[int, tuple[float, int]] = field(default_factory=dict)
    first: int = 0
    length: int = 0


def check_row(window: FeatureWindow, row: int, plain: PlainRow) -> None:
    low = window.start(row)
    assert window.length[row] == plain.length
    assert plain.length - window.window <= low <= plain.length or low == 0
    assert low >= plain.first
    features, tokens = window.read(row, low, plain.length)
    assert [int(x) for x in tokens] == [plain.entries[p][1] for p in range(low, plain.length)]
    assert features[:, 0].tolist() == [plain.entries[p][0] for p in range(low, plain.length)]
    assert (features == features[:, :1]).all()


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_the_window_equals_the_plain_implementation(data: st.DataObject) -> None:
    """Rows arrive, copy a prefix from another row, grow by up to one round's tokens, and leave. The last row then moves
    to the free place.

    A copy has the features that the source still holds. These are at least the last window, if the source is at most
    the slack ahead."""
    size = data.draw(st.sampled_from([1, 3, 8]))
    window = FeatureWindow(FeatureLayout((0,), size), 2, torch.float64, CPU)
    rows: list[PlainRow] = []
    value = 0.0
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["append", "copy", "remove", "write", "write", "write", "long"]))
        if action == "append" or not rows:
            rows.append(PlainRow())
            window.append(A_ROW, kept=0)
        elif action == "copy":
            source = data.draw(st.integers(0, len(rows) - 1))
            length = data.draw(st.integers(0, rows[source].length))
            window.append(A_ROW, kept=0)
            window.copy(source, len(rows), length)
            entries = {p: e for p, e in rows[source].entries.items() if p < length}
            held = rows[source].length - window.capacity
            rows.append(PlainRow(entries, min(length, max(rows[source].first, held)), length))
            assert window.start(len(rows) - 1) <= max(rows[source].first, length - size, min(held, length), 0)
        elif action == "remove":
            row = data.draw(st.integers(0, len(rows) - 1))
            window.remove(row, len(rows) - 1)
            rows[row] = rows[-1]
            rows.pop()
        else:
            row = data.draw(st.integers(0, len(rows) - 1))
            count = data.draw(st.integers(60, 200) if action == "long" else st.integers(1, 9))
            for low in range(0, count, 16):  # as the engine writes: no more at once than a round commits
                part = range(rows[row].length, rows[row].length + min(16, count - low))
                new = {p: (value + p, int(value + p) % 97) for p in part}
                features = torch.tensor([[v] * 4 for v, _ in new.values()], dtype=torch.float64)
                window.write([row] * len(new), list(new), features, [t for _, t in new.values()])
                rows[row].entries.update(new)
                rows[row].length = part.stop
            value += 1000
        if data.draw(st.booleans()):  # what nobody read yet is written, copied and removed all the same
            for row, plain in enumerate(rows):
                check_row(window, row, plain)
    for row, plain in enumerate(rows):
        check_row(window, row, plain)


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


def test_rows_are_written_in_one_call() -> None:
    window = FeatureWindow(FeatureLayout((), 4), 2, torch.float32, CPU)
    for _ in range(3):
        window.append(A_ROW, kept=0)
    features = torch.arange(12.0).view(6, 2)
    window.write([0, 0, 0, 2, 2, 1], [0, 1, 2, 0, 1, 0], features, [9, 8, 7, 6, 5, 4])
    assert window.length == [3, 1, 2]
    assert window.read(0, 1, 3)[0].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert window.read(2, 0, 2)[1].tolist() == [6, 5]


def test_features_are_read_as_copies() -> None:
    window = FeatureWindow(FeatureLayout((), 4), 2, torch.float32, CPU)
    window.append(A_ROW, kept=0)
    window.write([0], [0], torch.ones(1, 2), [3])
    features, tokens = window.read(0, 0, 1)
    window.write([0], [window.capacity], torch.zeros(1, 2), [4])  # the same place of the ring
    assert features.tolist() == [[1.0, 1.0]]
    assert tokens.tolist() == [3]


# -- what the engine keeps and gives away ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def requests(count: int = 7, prompt: int = 5, group: int = 1, new_tokens: int = 45) -> list[Request]:
    return [
        Request(
            Prompt(n // group, "", tuple((3 * k + n // group) % 11 for k in range(prompt + 3 * (n // group)))),
            n % group,
            0,
            50 + n,
            SamplingParams(0.8, max_new_tokens=max(1, new_tokens - 7 * n), stop_token_ids=(9,) if n % 3 == 2 else ()),
        )
        for n in range(count)
    ]


def run(
    model: Model,
    asked: Sequence[Request],
    window: int,
    drafter: str = "eagle",
    bound_tokens: int | None = None,
    max_rows: int = 3,
) -> tuple[Engine, list[Response], list[Harvest]]:
    layer = make_layer(model.decoder, "eagle3", window)
    drafters: dict[str, Drafter] = {"eagle": EagleDrafter(layer, model.decoder), "random": RandomDrafter(11)}
    strategy = PLAIN if drafter == "plain" else Strategy(drafter, 3, 2, 8)
    items: list[Harvest] = []
    engine = Engine(
        model.decoder,
        EngineConfig(max_rows=max_rows),
        [drafters[drafter]] if drafter in drafters else [],
        Fixed(strategy),
        layout=layer.options.layout,
        on_harvest=items.append,
        kv_tokens=bound_tokens,
    )
    return engine, list(engine.generate(asked)), items


def by_response(items: Sequence[Harvest], responses: Sequence[Response]) -> dict[int, list[Harvest]]:
    """Return the training data of each response in order, by seed. It is found by its tokens. (Windows inside a shared
    prompt are equal.)"""
    found: dict[int, list[Harvest]] = {response.request.seed: [] for response in responses}
    for item in items:
        owners = []
        for response in responses:
            text = [*response.request.prompt.token_ids, *response.token_ids]
            same = item.tokens.tolist() == text[item.start + 1 : item.start + 1 + len(item.tokens)]
            if same and item.prompt_length == len(response.request.prompt.token_ids):
                owners.append(response.request.seed)
        assert owners, "an item is of one of the responses, at its place"
        free = [seed for seed in owners if item.start not in [other.start for other in found[seed]]]
        assert len(owners) == 1 or item.start + len(item.tokens) < item.prompt_length + 2
        assert free, "nothing is given away twice"
        found[free[0]].append(item)
    return found


def check_features(model: Model, items: Sequence[Harvest], response: Response, taps: Sequence[int]) -> None:
    text = [*response.request.prompt.token_ids, *response.token_ids]
    features = model.features(text, taps)
    for item in items:
        want = features[item.start : item.start + len(item.tokens)]
        assert torch.allclose(item.features, want, rtol=0, atol=1e-9)


@pytest.mark.parametrize("drafter", ["plain", "eagle", "random"])
@pytest.mark.parametrize("window", [8, 16, 100])
def test_training_data_equals_hidden_states_of_transformers(model: Model, window: int, drafter: str) -> None:
    """The features are those at the taps and after the final norm. Each entry has the next token and the true position.
    The last token of a response has not been through the target, so it has no entry. Entries come one window at a
    time."""
    engine, responses, items = run(model, requests(), window, drafter)
    assert engine.layout is not None
    for seed, mine in by_response(items, responses).items():
        response = next(r for r in responses if r.request.seed == seed)
        check_features(model, mine, response, engine.layout.taps)
        entries = len(response.request.prompt.token_ids) + len(response.token_ids) - 1
        first = max(0, len(response.request.prompt.token_ids) - 1 - window)  # what the prefill kept
        *whole, last = mine
        assert [item.start for item in whole] == [first + window * i for i in range(len(whole))]
        assert all(len(item.tokens) == window for item in whole)
        assert last.start + len(last.tokens) == entries, "to the end of the response, and not beyond"
        assert len(last.tokens) == min(window, entries - first)
        assert len(whole) in ((entries - first) // window, (entries - first) // window - 1)
        covered = {p for item in mine for p in range(item.start, item.start + len(item.tokens))}
        assert covered == set(range(first, entries)), "every entry comes out"


class Replay(NodeDrafter):
    """Drafter that continues as the responses would without a stop."""

    name = "replay"

    def __init__(self, known: Sequence[Response]) -> None:
        self.known = {response.request.seed: response.token_ids for response in known}

    def propose(self, nodes: Sequence[Node]) -> Offer:
        behind = [self.known[node.request.seed][len(node.committed) + len(node.path) :] for node in nodes]
        return Offer(torch.tensor([tokens[:1] or [-1] for tokens in behind]), torch.zeros(len(nodes), 1))


def test_no_features_of_a_drafted_stop_token_are_kept(model: Model) -> None:
    """The target agrees with the draft and has computed the features of the stop token, but the response ends before
    it."""
    asked = [replace(r, sampling=SamplingParams(0.8, max_new_tokens=45)) for r in requests(4)]
    _, whole, _ = run(model, asked, 8, "plain")
    stops = {r.request.seed: r.token_ids[20] for r in whole}
    asked = [replace(r, sampling=replace(r.sampling, stop_token_ids=(stops[r.seed],))) for r in asked]
    layout = make_layer(model.decoder, "eagle3", 8).options.layout
    items: list[Harvest] = []
    shape = Fixed(Strategy("replay", 6, 1, 7))
    engine = Engine(model.decoder, EngineConfig(), [Replay(whole)], shape, layout=layout, on_harvest=items.append)
    responses = list(engine.generate(asked))
    assert {response.finish_reason for response in responses} == {"stop"}
    assert engine.stats.accepted > 2 * engine.stats.row_passes
    for seed, mine in by_response(items, responses).items():
        response = next(r for r in responses if r.request.seed == seed)
        check_features(model, mine, response, layout.taps)
        entries = len(response.request.prompt.token_ids) + len(response.token_ids) - 1
        assert mine[-1].start + len(mine[-1].tokens) == entries


def test_a_preempted_response_is_saved_as_training_data_too(model: Model) -> None:
    engine, responses, items = run(model, requests(8, new_tokens=60), 8, bound_tokens=180, max_rows=8)
    assert engine.stats.preemptions > 0
    assert engine.layout is not None
    for seed, mine in by_response(items, responses).items():
        response = next(r for r in responses if r.request.seed == seed)
        check_features(model, mine, response, engine.layout.taps)
        entries = len(response.request.prompt.token_ids) + len(response.token_ids) - 1
        assert mine[-1].start + len(mine[-1].tokens) == entries
        for one, other in itertools.pairwise(mine[:-1]):
            assert other.start >= one.start + len(one.tokens)


@pytest.mark.parametrize("longest", [30, 150])
def test_siblings_with_a_copied_prompt_have_their_own_training_data(model: Model, longest: int) -> None:
    prompt = Prompt(0, "", tuple(range(11)) * 2)
    asked = [Request(prompt, i, 0, 900 + i, SamplingParams(max_new_tokens=longest if i == 0 else 25)) for i in range(6)]
    engine, responses, items = run(model, asked, 8, max_rows=2)
    assert engine.layout is not None
    for seed, mine in by_response(items, responses).items():
        response = next(r for r in responses if r.request.seed == seed)
        check_features(model, mine, response, engine.layout.taps)
        assert mine[-1].start + len(mine[-1].tokens) == 22 + len(response.token_ids) - 1


def test_without_a_layout_nothing_is_kept(model: Model) -> None:
    items: list[Harvest] = []
    engine = Engine(model.decoder, EngineConfig(), on_harvest=items.append)
    assert len(list(engine.generate(requests(2)))) == 2
    assert engine.rollout.window is None
    assert items == []


@pytest.mark.parametrize(("wrote", "given"), [("nothing", 1), ("a token", 0), ("NaN", 0)])
def test_training_data_that_a_drafter_overwrote_is_dropped(wrote: str, given: int) -> None:
    window = FeatureWindow(FeatureLayout((), 4), 2, torch.float32, CPU)
    row = Row(A_ROW.request, tokens=[5, 6, 7])
    window.append(row, 0)
    window.write([0] * 3, range(3), torch.ones(3, 2), [5, 6, 7])
    if wrote == "a token":
        window.tokens[0, 1] = 8
    if wrote == "NaN":
        window.features[0, 1] = torch.nan
    found: list[Harvest] = []
    Harvester(window, 0, found.append).collect([row], finished=[0])
    assert len(found) == given
