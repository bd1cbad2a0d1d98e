"""Learned and suffix guesses as one law: the stated mixture, in the tree, and through a swap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from twin import Model, make_layer, make_model

from tlt.config import EngineConfig
from tlt.draft.drafter import Candidates, Level, Node, NodeDrafter, Offer
from tlt.draft.learned import EagleDrafter
from tlt.draft.mixed import MixedDrafter
from tlt.draft.strategy import Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.engine.laws import law_of
from tlt.engine.tuner import Fixed
from tlt.types import Prompt, Request, SamplingParams

VOCAB = 11
CPU = torch.device("cpu")


class Table(NodeDrafter):
    """log q is a function of the path, over the whole vocabulary; some tokens are excluded, as top-k would."""

    name = "eagle"

    def propose(self, nodes: Sequence[Node]) -> Offer:
        return Offer(None, torch.stack([self.law(node.path) for node in nodes]).log())

    @staticmethod
    def law(path: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash(path) % 2**31)
        law = torch.rand(VOCAB, dtype=torch.float64, generator=generator)
        law[:2] = 0.0
        return law / law.sum()


def request(index: int = 0) -> Request:
    return Request(Prompt(0, "", (9, 9, 8)), index, 0, index, SamplingParams())


def opened(texts: Sequence[Sequence[int]]) -> tuple[Table, SuffixDrafter, MixedDrafter]:
    learned, suffix = Table(), SuffixDrafter(1000)
    mixed = MixedDrafter(learned, suffix)
    for drafter in (learned, suffix):
        drafter.begin(None)
        for index, text in enumerate(texts):
            drafter.open(request(index), text)
    return learned, suffix, mixed


def level(depth: int, tokens: Sequence[Sequence[int]], alive: Sequence[Sequence[bool]] | None = None) -> Level:
    shape = np.array(tokens)
    on = np.ones_like(shape, dtype=bool) if alive is None else np.array(alive)
    return Level(depth, shape, np.zeros_like(shape), on, law_of([SamplingParams()] * len(shape), CPU))


# after 1, 2 came 3 twice and 4 once: a match of two tokens, where 1.5 stand for what was not seen
TEXT = [1, 2, 3, 7, 1, 2, 4, 6, 1, 2, 3, 5, 10, 1, 2]
NOTHING = [10, 1, 0]


def test_the_law_is_the_stated_mixture() -> None:
    _, _, mixed = opened([TEXT, NOTHING])
    found = mixed.predict(level(0, [[2], [0]]))
    learned = Table.law(())
    suffix = torch.zeros(VOCAB, dtype=torch.float64)
    suffix[3], suffix[4] = 2 / 4.5, 1 / 4.5
    assert found.ids is None
    assert found.log_q.shape == (2, 1, VOCAB)
    assert torch.allclose(found.log_q[0, 0].exp(), 0.9 * learned + 0.1 * suffix, rtol=1e-6)
    assert torch.allclose(found.log_q[1, 0].exp(), learned), "no match: the learned law alone"
    assert found.classes is not None
    assert found.classes.tolist() == [[1], [0]]


@pytest.mark.parametrize(("matched", "weight", "kind"), [(2, 0.1, 1), (4, 0.3, 2), (8, 0.6, 3)])
def test_a_longer_match_weighs_more(matched: int, weight: float, kind: int) -> None:
    """The text behind the match is sure but for the escape, so what the suffix adds is its weight times that."""
    text = [1, 2, 3, 4, 5, 6, 7, 2, 10, 0, *[1, 2, 3, 4, 5, 6, 7, 2][-matched:]]
    _, suffix, mixed = opened([text])
    found = mixed.predict(level(0, [[2]]))
    alone = suffix.predict(level(0, [[2]]))
    assert alone.ids is not None
    listed = dict(zip(alone.ids[0, 0].tolist(), alone.log_q[0, 0].exp().tolist(), strict=True))
    learned = Table.law(())
    for token in range(VOCAB):
        want = (1 - weight) * learned[token].item() + weight * listed.get(token, 0.0)
        assert found.log_q[0, 0, token].exp().item() == pytest.approx(want, rel=1e-5)
    assert found.classes is not None
    assert found.classes.tolist() == [[kind]]


def test_deeper_levels_go_on_from_both() -> None:
    """The match goes on behind token 3, which came twice: 7 once and 5 once. Behind 8 there is no match."""
    _, _, mixed = opened([TEXT])
    mixed.predict(level(0, [[2]]))
    found = mixed.predict(level(1, [[3, 8]]))
    suffix = torch.zeros(VOCAB, dtype=torch.float64)
    suffix[7] = suffix[5] = 1 / 3.5
    assert torch.allclose(found.log_q[0, 0].exp(), 0.9 * Table.law((3,)) + 0.1 * suffix, rtol=1e-6)
    assert torch.allclose(found.log_q[0, 1].exp(), Table.law((8,)))
    assert found.classes is not None
    assert found.classes.tolist() == [[1, 0]]


def test_a_node_that_is_not_alive_disturbs_no_other() -> None:
    _, _, mixed = opened([TEXT, TEXT])
    both = mixed.predict(level(0, [[2], [2]]))
    one = mixed.predict(level(0, [[2], [2]], [[True], [False]]))
    assert torch.equal(one.log_q[0], both.log_q[0])


# -- in the engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def engine(model: Model, learned: EagleDrafter) -> Engine:
    suffix = SuffixDrafter(1000)
    drafters = [learned, suffix, MixedDrafter(learned, suffix)]
    strategy = Fixed(Strategy("mixed", 3, 2, 8))
    return Engine(model.decoder, EngineConfig(max_rows=3), drafters, strategy, layout=learned.options.layout)


def requests(count: int = 5) -> list[Request]:
    prompts = [Prompt(n, "", (n % 11, 3, 4)) for n in range(count)]
    return [Request(p, 0, 0, p.prompt_id, SamplingParams(0.7, max_new_tokens=30)) for p in prompts]


def test_swapping_the_learned_drafter_swaps_what_the_mixture_reads(model: Model) -> None:
    """After the swap the mixture speaks with the new weights; the old drafter is told nothing more, so it must not be
    asked."""
    old, new = (EagleDrafter(make_layer(model.decoder, "eagle3", 16, seed), model.decoder) for seed in (0, 1))
    live = engine(model, old)
    asked: list[EagleDrafter] = []
    for drafter in (old, new):

        def predict(level: Level, drafter: EagleDrafter = drafter) -> Candidates:
            asked.append(drafter)
            return EagleDrafter.predict(drafter, level)

        drafter.predict = predict
    live.start(requests())
    for _ in range(3):
        live.round()
    assert set(map(id, asked)) == {id(old)}
    asked.clear()
    told: list[str] = []
    live.tuner.renew = lambda drafter, chance: told.append(drafter)
    live.swap(new)
    assert sorted(told) == ["eagle", "mixed"], "the tuner knows whose guesses are new"
    while live.busy:
        live.round()
    assert live.stats.drafter_failures == 0
    assert set(map(id, asked)) == {id(new)}


def test_the_mixture_falls_with_a_part_that_fails(model: Model) -> None:
    """Tokens stay; a mixture without its learned half is not asked for what it cannot know."""
    want = {r.request.seed: r.token_ids for r in Engine(model.decoder, EngineConfig()).generate(requests())}
    learned = EagleDrafter(make_layer(model.decoder, "eagle3", 16), model.decoder)
    live, calls = engine(model, learned), 0

    def close(row: int, last: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("planted in a test")
        EagleDrafter.close(learned, row, last)

    learned.close = close
    assert {r.request.seed: r.token_ids for r in live.generate(requests())} == want
    assert set(live.drafters.usable) == {"suffix"}
