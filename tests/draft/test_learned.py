"""State of the learned drafter during a rollout. Its proposals equal those of a twin without a cache, in float64. A
proposal is the distribution of one token of a round's draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small import by_seed, request, with_slots_of_any_size
from torch import Tensor
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.drafter import Candidates, Level
from tlt.draft.eagle import EagleLayer, Kind
from tlt.draft.features import FeatureView, FeatureWindow
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.rows import RowTable
from tlt.engine.sampling_table import sampling_tensors
from tlt.engine.tuner import Fixed, Tuner
from tlt.types import Prompt, Request, Row, SamplingParams
from tlt.verify.modes import InTurn

DRAFTED = Strategy("eagle", 4)
ALL = tuple(range(11))  # the vocabulary
Path = tuple[int, ...]
Place = tuple[int, int]  # seed of the request, tokens it had


@dataclass
class Round:
    """Proposals for one row in one round."""

    request: Request
    committed: list[int]
    layer: EagleLayer
    distributions: dict[Path, Tensor] = field(default_factory=dict)


class Recorder(EagleDrafter):
    """Drafter that records the distribution of every token. Rows are identified by the engine's order."""

    def __init__(self, layer: EagleLayer, model: Model, log: dict[Place, Round]) -> None:
        super().__init__(layer, model.decoder)
        self.layer, self.log = layer, log
        self.engine: Engine | None = None
        self.paths: list[Path] = []

    def predict(self, level: Level) -> Candidates:
        candidates = super().predict(level)
        live = self.engine.rows
        if level.depth == 0:
            self.paths = [()] * len(live)
            for row in live:
                self.log[row.request.seed, len(row.tokens)] = Round(row.request, list(row.tokens), self.layer)
        else:
            self.paths = [(*path, token) for path, token in zip(self.paths, level.tokens.tolist(), strict=True)]
        for slot, row in enumerate(live):
            if level.alive[slot]:
                found = self.log[row.request.seed, len(row.tokens)].distributions
                found[self.paths[slot]] = candidates.log_q[slot].clone()
        return candidates


@dataclass
class Life:
    """Engine whose learned drafter is recorded."""

    model: Model
    layer: EagleLayer
    tuner: Tuner = field(default_factory=lambda: Fixed(DRAFTED))
    max_rows: int = 8
    bound_tokens: int | None = None
    log: dict[Place, Round] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drafters = [Recorder(self.layer, self.model, self.log), SuffixDrafter()]
        config = EngineConfig(max_rows=self.max_rows, prefill_tokens=32)
        layout, bound = self.layer.options.layout, self.bound_tokens
        self.engine = Engine(self.model.decoder, config, drafters, self.tuner, layout=layout, kv_tokens=bound)
        if bound:
            with_slots_of_any_size(self.engine)
        drafters[0].engine = self.engine

    def swap(self, layer: EagleLayer) -> None:
        drafter = Recorder(layer, self.model, self.log)
        drafter.engine = self.engine
        self.engine.swap(drafter)

    def run(self, requests: Sequence[Request]) -> dict[Place, Round]:
        list(self.engine.generate(requests))
        assert self.engine.stats.drafter_failures == 0
        for where in [where for where, round_ in self.log.items() if not round_.distributions]:  # no room for a draft
            del self.log[where]
        return self.log


def requests(count: int = 6, new_tokens: int = 40, group: int = 1, prompt: int = 5) -> list[Request]:
    """Return requests with different prompts, lengths and sampling parameters."""
    samplings = ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0})
    found = []
    for n in range(count):
        text = tuple((3 * k + n // group) % 11 for k in range(prompt + n // group))
        params = SamplingParams(max_new_tokens=new_tokens - 5 * (n % 4), **samplings[n % len(samplings)])
        found.append(Request(Prompt(n // group, "", text), n % group, 0, 77 + n, params))
    return found


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


SHAPES: list[tuple[Kind, int]] = [("eagle3", 8), ("eagle1", 16)]
"""(kind, window) of drafters"""


def check_as_twin(model: Model, log: dict[Place, Round], listed: Sequence[int] = ALL) -> None:
    """Compare the proposals of 10 rounds from the whole range with the twin's. The drafter proposes the tokens
    `listed`."""
    twins = {id(round_.layer): model.twin(round_.layer) for round_ in log.values()}
    assert len(log) > 8
    for where, got in list(log.items())[:: max(1, len(log) // 9)]:
        context = [*got.request.prompt.token_ids, *got.committed]
        twin, window = twins[id(got.layer)], got.layer.options.window
        features = model.features(context, got.layer.options.taps)[:-1]  # the root has not been through the target
        start = max(0, len(context) - 1 - window)
        entries = twin.true_entries(features[start:], context[start + 1 :], start)
        whole = max(got.distributions, key=len)
        outputs = twin.chain(entries, whole) if entries else []
        for path, distribution in got.distributions.items():
            inside = distribution.isfinite()
            if not entries:
                assert not inside.any(), "there is nothing to draft from"
                continue
            assert path == whole[: len(path)], "a draft is a chain"
            logits = twin.logits(outputs[len(path)]) / (got.request.sampling.temperature or 1.0)
            logits = logits[list(listed)]
            want = torch.log_softmax(logits[inside], 0)  # among what top-k and top-p leave
            assert torch.allclose(distribution[inside], want, rtol=1e-7, atol=1e-7), (where, path)
            assert inside.all() or logits[inside].min() >= logits[~inside].max()
            assert set(path) <= set(listed)


@pytest.mark.parametrize(("window", "strategy"), [(200, Strategy("eagle", 3)), (16, Strategy("eagle", 9))])
def test_proposals_equal_the_twins(model: Model, window: int, strategy: Strategy) -> None:
    """The twin uses transformers' hidden states and full attention. This checks windows, positions, masks and the
    cache."""
    log = Life(model, make_layer(model.decoder, "eagle3", window), Fixed(strategy)).run(requests(4, new_tokens=60))
    assert max(len(path) for round_ in log.values() for path in round_.distributions) == strategy.depth - 1
    check_as_twin(model, log)


class Event(NamedTuple):
    """Rollout in which something happens to the rows."""

    requests: dict[str, int]
    max_rows: int = 8
    turns: Sequence[Strategy] = (DRAFTED,)
    bound_tokens: int | None = None
    prefilled: int | None = None


EVENTS = {
    "the last row moves to the place of a finished one and places stay free": Event({"count": 8}, max_rows=3),
    "all places are in use": Event({"count": 13}),
    "rounds of plain decoding and of another drafter come between": Event(
        {"new_tokens": 60},
        turns=[DRAFTED, PLAIN, DRAFTED, *[PLAIN] * 11, DRAFTED, DRAFTED, Strategy("suffix", 3), DRAFTED],
    ),
    "the drafter is off until its window and the slack of 64 have wrapped around": Event(
        {"count": 4, "new_tokens": 150}, turns=[DRAFTED, DRAFTED, *[PLAIN] * 90, *[DRAFTED] * 3]
    ),
    "rows are preempted and return": Event({"count": 8, "new_tokens": 60}, bound_tokens=180),
    "siblings copy a prompt": Event({"new_tokens": 30, "group": 3, "prompt": 20}, prefilled=19 + 20),
    "a sibling reuses the place of a finished one": Event(
        {"count": 4, "new_tokens": 30, "group": 2, "prompt": 20}, max_rows=1, prefilled=19 + 20
    ),
}


@pytest.mark.parametrize(("event", "shape"), list(zip(EVENTS.values(), cycle(SHAPES))), ids=EVENTS)
def test_proposals_do_not_depend_on_earlier_events(model: Model, event: Event, shape: tuple[Kind, int]) -> None:
    tuner, layer = InTurn(event.turns), make_layer(model.decoder, *shape)
    life = Life(model, layer, tuner, event.max_rows, event.bound_tokens)
    log = life.run(requests(**event.requests))
    assert (life.engine.stats.preemptions > 0) == (event.bound_tokens is not None)
    assert event.prefilled in (None, life.engine.stats.prefill_tokens)
    check_as_twin(model, log)


@pytest.mark.parametrize(("kind", "window"), SHAPES)
def test_drafters_swapped_between_two_rounds(model: Model, kind: Kind, window: int) -> None:
    layers = cycle([make_layer(model.decoder, kind, window, seed) for seed in range(3)])
    life, rounds = Life(model, next(layers), max_rows=3), count(1)
    one_round = life.engine.round

    def then_swap() -> list[Any]:
        if next(rounds) % 3 == 0:
            life.swap(next(layers))
        return one_round()

    life.engine.round = then_swap
    check_as_twin(model, life.run(requests(7)))


@pytest.mark.parametrize("window", [8, 64])
def test_a_late_sibling_copies_from_an_active_one(model: Model, window: int) -> None:
    """The source has continued, but its ring still holds the last window of the prompt."""
    prompt = tuple(range(11)) * 2
    life = Life(model, make_layer(model.decoder, "eagle3", window), Fixed(DRAFTED), max_rows=2)
    check_as_twin(model, life.run([request(prompt, 900, 60), *(request(prompt, 901 + i, 14) for i in range(4))]))
    assert life.engine.stats.prefill_tokens == 21


@pytest.mark.parametrize(("kind", "listed"), [("eagle1", None), ("eagle3", None), ("eagle3", [0, 2, 3, 6, 7, 10])])
def test_a_new_target_version(monkeypatch: pytest.MonkeyPatch, kind: Kind, listed: list[int] | None) -> None:
    """Features, embedding and head are those of the present version. With a draft vocabulary, proposals are the twin's
    distributions over these tokens alone."""
    model, other = make_model(seed=0), make_model(seed=1)
    if listed:
        monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", len(listed))
    layer = make_layer(model.decoder, kind, 16)
    if listed:
        layer.vocabulary.copy_(torch.tensor(listed))
    life = Life(model, layer, Fixed(DRAFTED), max_rows=3)
    life.run(requests(5))
    life.log.clear()
    model.decoder.load(other.hf.state_dict(), version=1)
    log = life.run(requests(5))
    check_as_twin(other, log, listed or ALL)
    plain = by_seed(Engine(model.decoder, EngineConfig()).generate(requests(4)))
    assert by_seed(life.engine.generate(requests(4))) == plain


def test_a_prompt_of_one_token_has_no_features(model: Model) -> None:
    """Its first round has no features. The proposals then depend on no neighbour and no earlier row, and the
    neighbours' proposals do not depend on it."""
    one, layer = request((4,), 5, 20), make_layer(model.decoder, "eagle3", 16)
    alone = Life(model, layer).run([one])
    near = Life(model, layer, max_rows=2).run([*requests(3), one])
    after = Life(model, layer, max_rows=1).run([*requests(2), one])
    check_as_twin(model, near)
    for log in (alone, near, after):
        assert (5, 0) in log
        check_as_twin(model, {k: r for k, r in log.items() if k[0] == 5})


@pytest.mark.parametrize("place", [0, 1])
def test_values_that_are_not_finite_do_not_affect_the_next_row(model: Model, place: int) -> None:
    """The next row in that place is shorter than its neighbour. Its proposals equal those of a new drafter."""
    hidden = model.decoder.options.hidden_size
    layer = make_layer(model.decoder, "eagle3", 16)
    layout = layer.options.layout

    def distributions(before: bool) -> Tensor:
        window = FeatureWindow(layout, hidden, torch.float64, torch.device("cpu"))
        drafter, table = EagleDrafter(layer, model.decoder), RowTable([window])

        def come(number: int, entries: int, size: float) -> None:
            row = Row(requests(3)[number])
            table.append(row)
            drafter.open(row.request, ())
            features = size * torch.arange(entries * layout.width(hidden)).sin().double().view(entries, -1)
            at = len(table) - 1
            window.write([at] * entries, range(entries), features, [p % 11 for p in range(entries)])

        def predict() -> Tensor:
            none = np.zeros(len(table), dtype=np.int64)
            sampling = sampling_tensors([SamplingParams()] * len(table), torch.device("cpu"))
            return drafter.predict(Level(0, none, none == 0, sampling)).log_q

        drafter.begin(FeatureView(window))
        if before:
            for number in (0, 1):
                come(number, 12, torch.nan if number == place else 1.0)
            predict()
            drafter.close(place, 1)
            table.remove(place)
        else:
            come(0, 12, 1.0)
        come(2, 3, 1.0)
        return predict()

    assert torch.allclose(distributions(before=True), distributions(before=False), rtol=1e-10, atol=1e-10)
