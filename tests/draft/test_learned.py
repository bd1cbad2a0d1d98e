"""State of the learned drafter during a rollout. Its proposals equal those of a new engine with the same weights,
prefix and window, and those of a twin without a cache, in float64. They do not depend on earlier rows and rounds.

A proposal is the distribution at a node of a round's tree. The calibration is fixed, so that trees depend on the
distributions alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.calibration import Calibration
from tlt.draft.drafter import Candidates, Level
from tlt.draft.eagle import EagleLayer, Kind
from tlt.draft.features import FeatureView, FeatureWindow
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.draft.tree import DraftTree
from tlt.engine.engine import Engine
from tlt.engine.engine import Round as Round_
from tlt.engine.rows import RowTable
from tlt.engine.sampling_table import sampling_tensors
from tlt.engine.tuner import Fixed, Tuner
from tlt.types import Prompt, Request, Row, SamplingParams
from tlt.verify.modes import InTurn

TREE = Strategy("eagle", 3, 2, 8)
CHAIN = Strategy("eagle", 4, 1, 5)
CLASSES: tuple[Kind, ...] = ("eagle3", "eagle1")
Path = tuple[int, ...]
Place = tuple[int, int]  # seed of the request, tokens it had


class Still(Calibration):
    """Calibration that never changes."""

    def observe(self, cells: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> None: ...

    def next_round(self) -> None: ...


@dataclass
class Round:
    """Proposals for one row in one round."""

    row: Row
    layer: EagleLayer
    length: int
    """of the feature window"""
    distributions: dict[Path, Tensor] = field(default_factory=dict)
    tree: DraftTree | None = None
    committed: tuple[int, ...] = ()


class Recorder(EagleDrafter):
    """Drafter that records the distribution at every active node. Rows are identified by the engine's order."""

    def __init__(self, layer: EagleLayer, model: Model, log: dict[Place, Round]) -> None:
        super().__init__(layer, model.decoder)
        self.layer, self.log = layer, log
        self.engine: Engine | None = None
        self.paths: list[list[Path]] = []

    def predict(self, level: Level) -> Candidates:
        candidates = super().predict(level)
        assert self.engine is not None
        live = self.engine.rows
        parents, tokens, alive = (x.tolist() for x in (level.parents, level.tokens, level.alive))
        if level.depth == 0:
            paths: list[list[Path]] = [[()] for _ in live]
            for slot, row in enumerate(live):
                where = (row.request.seed, len(row.tokens))
                self.log[where] = Round(row, self.layer, self.window.lengths[slot], committed=tuple(row.tokens))
        else:
            paths = [
                [(*self.paths[b][p], t) for p, t in zip(parents[b], tokens[b], strict=True)] for b in range(len(live))
            ]
        self.paths = paths
        for slot, row in enumerate(live):
            for w, on in enumerate(alive[slot]):
                if on:
                    found = self.log[row.request.seed, len(row.tokens)].distributions
                    found[paths[slot][w]] = candidates.log_q[slot, w].clone()
        return candidates


@dataclass
class Life:
    """Engine whose learned drafter is recorded."""

    model: Model
    layer: EagleLayer
    tuner: Tuner = field(default_factory=lambda: Fixed(TREE))
    max_rows: int = 8
    bound_tokens: int | None = None
    log: dict[Place, Round] = field(default_factory=dict)

    def __post_init__(self) -> None:
        drafters = [Recorder(self.layer, self.model, self.log), SuffixDrafter(1000)]
        config = EngineConfig(max_rows=self.max_rows, prefill_tokens=32)
        layout = self.layer.options.layout
        self.engine = Engine(
            self.model.decoder,
            config,
            drafters,
            self.tuner,
            layout=layout,
            kv_tokens=self.bound_tokens,
        )
        self.engine.drafters.calibrations = {drafter.name: Still() for drafter in drafters}
        drafters[0].engine = self.engine  # type: ignore[union-attr]
        draft = self.engine.draft

        def observed(now: Round_) -> list[DraftTree]:
            trees, strategy = draft(now), now.strategy
            for row, tree in zip(now.rows, trees, strict=True):
                if strategy.drafter == "eagle" and (where := (row.request.seed, len(row.tokens))) in self.log:
                    self.log[where].tree = tree
            return trees

        self.engine.draft = observed

    def swap(self, layer: EagleLayer) -> None:
        drafter = Recorder(layer, self.model, self.log)
        drafter.engine = self.engine
        self.engine.swap(drafter)

    def run(self, requests: Sequence[Request]) -> dict[Place, Round]:
        for _ in self.engine.generate(requests):
            pass
        assert self.engine.stats.drafter_failures == 0
        for where in [where for where, round_ in self.log.items() if not round_.distributions]:  # no room for a draft
            del self.log[where]
        return self.log


def fresh(model: Model, round_: Round, strategy: Strategy) -> Round:
    """Return the proposals of a new engine that knows only the prefix."""
    life = Life(model, round_.layer, Fixed(strategy))
    life.engine.start([])
    life.engine.submit([], [Row(round_.row.request, list(round_.committed))])
    life.engine._admit()
    (tree,) = life.engine.draft(life.engine.open_round(strategy))
    (found,) = life.log.values()
    found.tree = tree
    return found


def some_of(log: dict[Place, Round], every: int) -> list[tuple[Place, Round]]:
    """Return at most 16 rounds from the whole range, because each is compared with an engine of its own."""
    return list(log.items())[:: max(every, len(log) // 15)]


def check_as_fresh(model: Model, log: dict[Place, Round], strategy: Strategy, every: int = 3) -> None:
    assert len(log) > 8
    for where, got in some_of(log, every):
        want = fresh(model, got, strategy)
        assert got.distributions.keys() == want.distributions.keys(), where
        for path, distribution in want.distributions.items():
            assert torch.allclose(got.distributions[path], distribution, rtol=1e-8, atol=1e-8), (where, path)
        assert got.tree is not None
        assert want.tree is not None
        assert (got.tree.tokens, got.tree.parents) == (want.tree.tokens, want.tree.parents), where


def requests(count: int = 6, new_tokens: int = 40, group: int = 1, prompt: int = 5) -> list[Request]:
    """Return requests with different prompts, lengths and sampling parameters."""
    samplings = ({}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.0})
    return [
        Request(
            Prompt(n // group, "", tuple((3 * k + n // group) % 11 for k in range(prompt + n // group))),
            n % group,
            0,
            77 + n,
            SamplingParams(max_new_tokens=new_tokens - 5 * (n % 4), **samplings[n % len(samplings)]),
        )
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


shapes = pytest.mark.parametrize(("kind", "window"), [("eagle3", 8), ("eagle1", 16)])


# -- the twin ----------------------------------------------------------------------------------------------------------


def check_as_twin(model: Model, log: dict[Place, Round], every: int, listed: Tensor | None = None) -> None:
    """Compare all proposals with the twin's. With `listed`, the drafter proposes only these tokens."""
    twins = {id(round_.layer): model.twin(round_.layer) for round_ in log.values()}
    for where, got in some_of(log, every):
        context = [*got.row.request.prompt.token_ids, *got.committed]
        twin, window = twins[id(got.layer)], got.layer.options.window
        params = got.row.request.sampling
        features = model.features(context, got.layer.options.taps)[:-1]  # the root has not been through the target
        start = max(0, len(context) - 1 - window)
        entries = twin.true_entries(features[start:], context[start + 1 :], start)
        for path, distribution in got.distributions.items():
            logits = twin.logits(twin.chain(entries, path)[-1]) / (params.temperature or 1.0)
            logits = logits if listed is None else logits[listed]
            inside = distribution.isfinite()
            want = torch.log_softmax(logits[inside], 0)  # among what top-k and top-p leave
            assert torch.allclose(distribution[inside], want, rtol=1e-7, atol=1e-7), (where, path)
            assert logits[inside].min() >= logits[~inside].max() if not inside.all() else True


@pytest.mark.parametrize(
    ("kind", "window", "strategy"),
    [
        *(("eagle3", 8, TREE), ("eagle3", 200, TREE), ("eagle1", 16, TREE)),
        *(("eagle3", 16, Strategy("eagle", 9, 1, 10)), ("eagle3", 16, Strategy("eagle", 5, 4, 20))),
    ],
)
def test_proposals_equal_the_twins(model: Model, kind: Kind, window: int, strategy: Strategy) -> None:
    """The twin uses transformers' hidden states and full attention. This checks windows, positions, tree masks and the
    cache."""
    log = Life(model, make_layer(model.decoder, kind, window), Fixed(strategy)).run(requests(4, new_tokens=60))
    assert max(len(path) for round_ in log.values() for path in round_.distributions) == strategy.depth - 1
    check_as_twin(model, log, every=17)


# -- the rollout's life ------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("rows", [3, 8])
def test_rows_that_arrive_and_leave(model: Model, kind: Kind, window: int, rows: int) -> None:
    """There are more requests than rows, of different lengths. The last row moves to the place of a finished one. Three
    rows leave places of the drafter's cache free, and eight use all."""
    log = Life(model, make_layer(model.decoder, kind, window), max_rows=rows).run(requests(rows + 5))
    check_as_fresh(model, log, TREE)


@shapes
def test_speculation_off_and_on_again(model: Model, kind: Kind, window: int) -> None:
    """Rounds of plain decoding and of another drafter come between. The drafter then computes the tokens that it
    missed."""
    tuner = InTurn([TREE, PLAIN, TREE, *[PLAIN] * 11, TREE, TREE, Strategy("suffix", 3, 2, 8), TREE])
    log = Life(model, make_layer(model.decoder, kind, window), tuner).run(requests(6, new_tokens=60))
    check_as_fresh(model, log, TREE, every=2)


def test_off_for_longer_than_the_ring(model: Model) -> None:
    """After 90 rounds of plain decoding, the window of 8 and its slack of 64 have wrapped around."""
    tuner = InTurn([TREE, TREE, *[PLAIN] * 90, *[TREE] * 3])
    log = Life(model, make_layer(model.decoder, "eagle3", 8), tuner).run(requests(4, new_tokens=150))
    late = {where: round_ for where, round_ in log.items() if where[1] > 90}
    assert late
    check_as_fresh(model, log, TREE, every=1)


@shapes
def test_drafters_swapped_between_two_rounds(model: Model, kind: Kind, window: int) -> None:
    layers = cycle([make_layer(model.decoder, kind, window, seed) for seed in range(3)])
    life = Life(model, next(layers), max_rows=3)
    one_round, count = life.engine.round, 0

    def then_swap() -> list[Any]:
        nonlocal count
        count += 1
        if count % 3 == 0:
            life.swap(next(layers))
        return one_round()

    life.engine.round = then_swap
    check_as_fresh(model, life.run(requests(7)), TREE)


@shapes
def test_preemption_and_return(model: Model, kind: Kind, window: int) -> None:
    life = Life(model, make_layer(model.decoder, kind, window), bound_tokens=180)
    log = life.run(requests(8, new_tokens=60))
    assert life.engine.stats.preemptions > 0
    check_as_fresh(model, log, TREE)


@shapes
def test_siblings_copy_a_prompt_that_is_prefilled_once(model: Model, kind: Kind, window: int) -> None:
    life = Life(model, make_layer(model.decoder, kind, window))
    log = life.run(requests(6, new_tokens=30, group=3, prompt=20))
    assert life.engine.stats.prefill_tokens == 19 + 20
    check_as_fresh(model, log, TREE, every=1)


def late_siblings(model: Model, window: int, first: int, others: int) -> Life:
    """Return an engine with two rows. One decodes `first` tokens, while its siblings arrive, copy from it, and
    leave."""
    prompt = Prompt(0, "", tuple(range(11)) * 2)
    asked = [
        Request(prompt, i, 0, 900 + i, SamplingParams(max_new_tokens=first if i == 0 else 14))
        for i in range(1 + others)
    ]
    life = Life(model, make_layer(model.decoder, "eagle3", window), Fixed(CHAIN), max_rows=2)
    life.run(asked)
    assert life.engine.stats.prefill_tokens == 21
    return life


@shapes
def test_a_sibling_reuses_the_place_of_a_finished_one(model: Model, kind: Kind, window: int) -> None:
    life = Life(model, make_layer(model.decoder, kind, window), max_rows=1)
    log = life.run(requests(4, new_tokens=30, group=2, prompt=20))
    assert life.engine.stats.prefill_tokens == 19 + 20
    check_as_fresh(model, log, TREE, every=1)


@pytest.mark.parametrize("window", [8, 64])
def test_a_late_sibling_copies_from_an_active_one(model: Model, window: int) -> None:
    """The source has continued, but its ring still holds the last window of the prompt."""
    life = late_siblings(model, window, first=60, others=4)
    check_as_fresh(model, life.log, CHAIN, every=1)


def test_a_sibling_whose_source_no_longer_has_the_prompt(model: Model) -> None:
    """The source is 150 tokens ahead and its ring holds 72, so nothing or little of the prompt is left. The siblings
    draft from their own tokens as if there was no prompt. They read no tokens of other rows."""
    window = 8
    life = late_siblings(model, window, first=150, others=9)
    late = [round_ for (seed, _), round_ in life.log.items() if seed != 900]
    assert late
    for round_ in late:
        context = [*round_.row.request.prompt.token_ids, *round_.committed]
        first = max(0, len(context) - 1 - window)
        features = model.features(context, round_.layer.options.taps)[:-1]
        twin = model.twin(round_.layer)
        possible = []
        for start in range(first, len(context) - 1):
            entries = twin.true_entries(features[start:], context[start + 1 :], start)
            possible.append(torch.log_softmax(twin.logits(twin.chain(entries, ())[-1]), 0))
        distribution = round_.distributions.get(())
        if distribution is None or not distribution.isfinite().all():
            assert not round_.committed, "nothing to draft from, but only before the first round"
        else:
            assert any(torch.allclose(distribution, p, rtol=1e-7, atol=1e-7) for p in possible), len(round_.committed)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_new_target_version(kind: Kind) -> None:
    """Features, embedding and head are those of the present version."""
    model, other = make_model(seed=0), make_model(seed=1)
    life = Life(model, make_layer(model.decoder, kind, 16), max_rows=3)
    life.run(requests(5))
    life.log.clear()
    model.decoder.load(other.hf.state_dict(), version=1)
    log = life.run(requests(5))
    check_as_fresh(other, log, TREE)
    check_as_twin(other, log, every=17)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_draft_vocabulary(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    """Proposals are the twin's distributions over these tokens alone, with the head of the present version."""
    monkeypatch.setattr("tlt.draft.eagle._DRAFT_VOCABULARY", 6)
    model, other, listed = make_model(seed=0), make_model(seed=1), torch.tensor([0, 2, 3, 6, 7, 10])
    layer = make_layer(model.decoder, kind, 16)
    assert layer.vocabulary is not None
    layer.vocabulary.copy_(listed)
    life = Life(model, layer, Fixed(CHAIN), max_rows=3)
    life.run(requests(4))
    life.log.clear()
    model.decoder.load(other.hf.state_dict(), version=1)
    log = life.run(requests(4))
    check_as_twin(other, log, every=11, listed=listed)
    for got in log.values():
        assert got.tree is not None
        assert set(got.tree.tokens[1:]) <= set(listed.tolist())
    plain = {r.request.seed: r.token_ids for r in Engine(model.decoder, EngineConfig()).generate(requests(4))}
    assert {r.request.seed: r.token_ids for r in life.engine.generate(requests(4))} == plain


# -- the edges ---------------------------------------------------------------------------------------------------------


def test_a_prompt_of_one_token_has_no_features(model: Model) -> None:
    """Its first round has no features. The proposals then depend on no neighbour and no earlier row."""
    one = Request(Prompt(0, "", (4,)), 0, 0, 5, SamplingParams(max_new_tokens=20))
    layer = make_layer(model.decoder, "eagle3", 16)
    alone = Life(model, layer).run([one])
    beside = Life(model, layer, max_rows=2).run([*requests(3), one])
    after = Life(model, layer, max_rows=1).run([*requests(2), one])
    check_as_fresh(model, {**alone, **{(s, n): r for (s, n), r in beside.items() if s == 5}}, TREE, every=1)
    for log in (beside, after):
        got, want = log[5, 0], alone[5, 0]
        assert (got.tree and got.tree.tokens) == (want.tree and want.tree.tokens)


def test_a_row_without_features_does_not_affect_other_rows(model: Model) -> None:
    one = Request(Prompt(0, "", (4,)), 0, 0, 5, SamplingParams(max_new_tokens=20))
    layer = make_layer(model.decoder, "eagle3", 16)
    log = Life(model, layer).run([*requests(2), one])
    check_as_fresh(model, {k: v for k, v in log.items() if k[0] != 5}, TREE, every=1)


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
            rows = len(table)
            none = np.zeros((rows, 1), dtype=np.int64)
            sampling = sampling_tensors([SamplingParams()] * rows, torch.device("cpu"))
            return drafter.predict(Level(0, none, none, none == 0, sampling)).log_q

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


def test_a_tree_too_large_for_the_cache_only_turns_the_drafter_off(model: Model) -> None:
    """The configuration refuses such a strategy. If it is set in another way, decoding continues without the
    drafter."""
    life = Life(model, make_layer(model.decoder, "eagle3", 16), Fixed(Strategy("eagle", 30, 8, 200)))
    plain = Engine(model.decoder, EngineConfig())
    want = {r.request.seed: r.token_ids for r in plain.generate(requests(3))}
    assert {r.request.seed: r.token_ids for r in life.engine.generate(requests(3))} == want
