"""All events of one or several engines, in any order: each response equals the slow twin's, to the token.

Requests of a few prompts arrive at any time, siblings separately. Rows are released and continue in another engine.
Caches preempt, grow, shrink and are released. Drafters are swapped, raise, or write into their inputs. The target gets
new weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import small
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from small import Target

import tlt.attention.slot_memory
import tlt.engine.noise_window
import tlt.engine.scheduler
from tlt.attention.key_counts import BLOCK
from tlt.config import EngineConfig
from tlt.draft.drafter import Candidates, Level
from tlt.draft.eagle import EagleLayer, eagle_options
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.draft.suffix import SuffixDrafter
from tlt.engine.engine import Engine
from tlt.models.decoder import Decoder
from tlt.types import Prompt, Request, Row, SamplingParams
from tlt.verify.modes import InTurn

TARGETS = (Target(seed=0), Target(seed=1))
PROMPTS = (Prompt(0, "", (1, 2, 3)), Prompt(1, "", (4,)), Prompt(2, "", (2, 0, 1) * 7), Prompt(3, "", (1, 2, 3, 3)))
SAMPLINGS = (
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 1.1, "top_p": 0.8, "stop_token_ids": (4,)},
)
ASKED = st.tuples(st.sampled_from(PROMPTS), st.sampled_from(SAMPLINGS), st.sampled_from((1, 3, 12, 60)))
SIZES = st.tuples(st.integers(1, 5), st.sampled_from([110, 150, 10_000]), st.integers(1, 40))
ARMS = (PLAIN, Strategy("eagle", 3), Strategy("eagle", 6))
EVENTS = itertools.count()
_expected: dict[tuple[int, Request], small.Reference] = {}


def expected(weights: int, request: Request) -> small.Reference:
    key = (weights, request)
    if key not in _expected:
        (_expected[key],) = small.reference(TARGETS[weights], [request])
    return _expected[key]


class WhileUsable(InTurn):
    """Tuner that cycles through all strategies whose drafter still works."""

    def choose(self, rows: int, context: float, usable: Collection[str], offers: Sequence[int] = ()) -> Strategy:
        arm = super().choose(rows, context, usable, offers)
        return arm if arm.drafter in usable else PLAIN


class Vandal(EagleDrafter):
    """Drafter that writes into its inputs, and then raises."""

    def predict(self, level: Level) -> Candidates:
        for array in (level.tokens, level.alive):
            array[...] = 1
        for tensor in (level.sampling.temperature, level.sampling.top_k, level.sampling.top_p):
            tensor.fill_(3)
        for rows in (self.window.lengths, self.window.starts):
            rows.append(7)
        raise RuntimeError("planted in a test")


def drafter(decoder: Decoder, seed: int, kind: type[EagleDrafter] = EagleDrafter) -> EagleDrafter:
    torch.manual_seed(seed)
    return kind(EagleLayer(eagle_options(decoder.options, "eagle3", window=4)).double(), decoder)


class Engines(RuleBasedStateMachine):
    @initialize(sizes=st.lists(SIZES, min_size=1, max_size=3))
    def start_engines(self, sizes: list[tuple[int, int, int]]) -> None:
        """Start engines. Each has max_rows, a bound of the cache, and prefill_tokens."""
        self.weights = self.versions = 0
        self.engines: list[Engine] = []
        self.open: dict[int, Request] = {}
        self.indices = itertools.count()
        for max_rows, bound, prefill in sizes:
            decoder = small.decoder_of(TARGETS[0].model)
            learned, suffix = drafter(decoder, 0), SuffixDrafter()
            config, layout = EngineConfig(max_rows=max_rows, prefill_tokens=prefill), learned.options.layout
            engine = Engine(decoder, config, [learned, suffix], WhileUsable(ARMS), layout=layout, kv_tokens=bound)
            self.engines.append(engine)

    def engine(self, number: int) -> Engine:
        next(EVENTS)
        return self.engines[number % len(self.engines)]

    def take_responses(self, engine: Engine) -> None:
        for response in engine.round():
            request = response.request
            want = expected(self.weights, request)
            got = (response.token_ids, response.finish_reason)
            assert got == (want.token_ids, want.finish_reason), request
            assert np.allclose(response.logprobs, want.logprobs, atol=1e-9)
            assert np.allclose(response.full_logprobs, want.full_logprobs, atol=1e-9)
            assert self.open.pop(request.seed) is request, "each request ends once"

    @rule(number=st.integers(0, 2), asked=st.lists(ASKED, min_size=1, max_size=4))
    def submit(self, number: int, asked: list[tuple[Prompt, dict[str, Any], int]]) -> None:
        requests = []
        for prompt, sampling, length in asked:
            index = next(self.indices) % 6
            while (seed := 10 * prompt.prompt_id + index) in self.open:
                index += 100
            requests.append(Request(prompt, index, 0, seed, SamplingParams(**sampling, max_new_tokens=length)))
            self.open[seed] = requests[-1]
        self.engine(number).submit(requests)

    @rule(number=st.integers(0, 2), count=st.sampled_from([1, 1, 2, 5, 30]))
    def rounds(self, number: int, count: int) -> None:
        engine = self.engine(number)
        for _ in range(count):
            if engine.busy:
                self.take_responses(engine)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 2), other=st.integers(0, 2), data=st.data(), from_the_start=st.booleans())
    def release_requests(self, number: int, other: int, data: st.DataObject, from_the_start: bool) -> None:
        """Release requests. They continue in another engine, or here later. Some are decoded from the start, as after
        the loss of a worker."""
        seeds = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1, max_size=3))
        rows = self.engine(number).release_requests(seeds)
        assert {row.request.seed for row in rows} <= seeds
        for row in rows:
            right = expected(self.weights, row.request).token_ids
            assert row.tokens == right[: len(row.tokens)]
        fresh = [row.request for row in rows] if from_the_start else []
        resumed = [] if from_the_start else [Row(r.request, list(r.tokens), r.logprobs, r.full_logprobs) for r in rows]
        self.engine(other).submit(fresh, resumed)

    @rule(number=st.integers(0, 2), seed=st.integers(0, 5), vandal=st.booleans())
    def swap(self, number: int, seed: int, vandal: bool) -> None:
        engine = self.engine(number)
        engine.swap(drafter(engine.target, seed, Vandal if vandal else EagleDrafter))

    @rule(number=st.integers(0, 2))
    def release(self, number: int) -> None:
        engine = self.engine(number)
        if not len(engine.rows):
            engine.cache.release()

    @rule(number=st.integers(0, 2), rows=st.integers(1, 3), tokens=st.integers(1, 100))
    def reserve(self, number: int, rows: int, tokens: int) -> None:
        """Reserve capacity as a larger batch would. If the cache shrinks, free slots are dropped."""
        cache = self.engine(number).cache
        rows = max(rows, len(self.engine(number).rows))
        if cache.fits(rows, max(tokens, cache.store.tokens)):
            cache.reserve(rows, max(tokens, cache.store.tokens))

    @rule(number=st.integers(0, 2))
    def start_again(self, number: int) -> None:
        engine = self.engine(number)
        for row in (*engine.rows, *engine.waiting):
            del self.open[row.request.seed]
        engine.start([])

    @rule()
    def reload_weights(self) -> None:
        next(EVENTS)
        self.weights, self.versions = 1 - self.weights, self.versions + 1
        for engine in self.engines:
            engine.target.load(TARGETS[self.weights].model.state_dict(), self.versions)
            asked = [row.request for row in (*engine.rows, *engine.waiting)]
            engine.start(asked)

    @invariant()
    def every_open_request_is_somewhere(self) -> None:
        if hasattr(self, "engines"):
            held = [row.request.seed for e in self.engines for row in (*e.rows, *e.waiting)]
            assert sorted(held) == sorted(self.open)

    def teardown(self) -> None:
        for engine in getattr(self, "engines", ()):
            while engine.busy:
                self.take_responses(engine)
        assert not getattr(self, "open", None)


TestEngines = Engines.TestCase
TestEngines.settings = settings(max_examples=int(os.environ.get("TLT_STATEFUL_EXAMPLES", "30")), stateful_step_count=30)


@pytest.fixture(autouse=True, scope="module")
def small_steps() -> Any:
    """Set capacity, headroom and noise to small steps, so that short responses reach all their limits."""
    patch = pytest.MonkeyPatch()
    patch.setattr(tlt.attention.slot_memory, "key_counts", lambda *key: tuple(range(8, BLOCK + 1, 8)))
    patch.setattr(tlt.engine.scheduler, "_HEADROOM", 4)
    patch.setattr(tlt.engine.noise_window, "_MAX_WINDOW", 4)
    yield
    patch.undo()


def test_much_happened() -> None:
    assert next(EVENTS) > 500
