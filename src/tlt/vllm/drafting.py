"""Drafts for the rows that a vLLM model runner decodes: tlt's drafters, look-ahead and tuner, on the hidden states of
the runner's passes.

This module does not import vLLM. `worker_extension.py` connects it with the runner.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from tlt.config import SpeculationConfig
from tlt.draft.ahead import AheadStore, LookAhead
from tlt.draft.chains import Draft
from tlt.draft.drafter_folder import DrafterError
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import FeatureLayout, FeatureView, FeatureWindow, Harvest, Harvester
from tlt.draft.learned import EagleDrafter
from tlt.draft.strategy import PLAIN, Strategy
from tlt.engine.committing import Stops, commit_rows
from tlt.engine.drafters import Drafters, draft_rows, look_ahead_offers, make_drafters
from tlt.engine.noise_window import NoiseWindow
from tlt.engine.own_backend import make_tuner
from tlt.engine.rows import RowTable
from tlt.engine.sampling_table import SamplingTable
from tlt.engine.state import Round, draft_counts
from tlt.engine.tuner import RoundResult
from tlt.models.decoder import Decoder
from tlt.models.families import decoder_options
from tlt.models.hugging_face import Head, empty_model, names_of_ends
from tlt.models.product import Product
from tlt.types import PassCounts, RolloutStats, Row


class Ends(Decoder):
    """Decoder without layers: it has the embedding, the head and the rotary table of the model. vLLM computes the
    passes."""

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_options(config), dtype, device)
        self.cuda_graphs = False  # vLLM captures its own passes, and drafts run between them
        self._config = config

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy the embedding and the head from all weights, given by their names in transformers' model."""
        model = empty_model(self._config)
        names = [f"{name}.weight" for name in names_of_ends(model)]
        first, last = (state[name] for name in (names[0], names[-1] if names[-1] in state else names[0]))
        self.embedding = first.detach().to(self.device, self.dtype, copy=True)
        tied = last.data_ptr() == first.data_ptr() or torch.equal(last, first)
        weight = self.embedding if tied else last.detach().to(self.device, self.dtype, copy=True)
        model.get_output_embeddings().weight = nn.Parameter(weight, requires_grad=False)
        self.head = Head(model).scaled(weight)
        self.to_logits, self.version = Product(self.head, shared=True), version


_STOPS = Stops(None)  # tokens that end a response; stop strings need the text, which the engine has


@dataclass
class DraftedRow(Row):
    """Row of a vLLM request."""

    name: str = ""
    """vLLM's own request id, which is not the id that the request was added with"""
    key: int | None = None
    """key of its `Draw`"""
    draft: Draft = field(default_factory=Draft)
    """draft that the next pass verifies"""


class Passed(NamedTuple):
    """Part of a request in a target pass that has completed its prompt."""

    row: DraftedRow
    first: int
    """position of its first token in the pass"""
    at: int
    """index of this token among the pass's hidden states"""
    length: int
    """number of its tokens in the pass"""
    drafted: int
    """number of draft tokens among them; vLLM may have cut the draft"""
    sampled: Sequence[int]
    """accepted draft tokens, and the token after them"""

    @property
    def draft(self) -> Draft:
        """Part of the row's draft that the pass verified."""
        draft = self.row.draft
        return draft._replace(tokens=draft.tokens[: self.drafted], cells=draft.cells[: self.drafted])


class _Pending(NamedTuple):
    """Round whose drafts the next pass verifies."""

    strategy: Strategy
    began: float
    """time at which the pass before it had ended"""
    drafting: float
    """seconds of its drafts"""


class Decoded(NamedTuple):
    """Counters and training data of passes."""

    rows: dict[int | None, tuple[PassCounts, str]]
    """by key of a request: counters of its passes, and sources of its tokens as in `Row.proposed`"""
    stats: RolloutStats
    """counters of the rollout since the last call, without tokens"""
    harvests: list[Harvest]


class RowTables:
    """Rows that vLLM decodes in one rollout, with their state: sampling parameters, noise, hidden states if there is a
    learned drafter, and positions in look-ahead drafts."""

    def __init__(
        self,
        target: Ends,
        max_rows: int,
        store: AheadStore,
        layout: FeatureLayout | None,
        drafters: Drafters,
        depth: int,
    ) -> None:
        """Make empty tables. `depth`: largest number of tokens that a drafter drafts for a row."""
        self.target, vocab_size = target, target.options.vocab_size
        self.noise = NoiseWindow(max_rows, vocab_size, depth, target.device)
        self.sampling, self.ahead, self.window = SamplingTable(target.device), LookAhead(store, vocab_size), None
        if layout:
            self.window = FeatureWindow(layout, target.options.hidden_size, target.dtype, target.device)
        windows = [self.window] if self.window else []
        self.rows = RowTable([self.sampling, self.noise, *windows, self.ahead, drafters])
        self.view = FeatureView(self.window) if self.window else None
        drafters.begin(self.view)

    def append(self, row: Row, first: int) -> None:
        """Add a row. `first`: number of its tokens that vLLM's prefix cache had, so that they have no hidden states."""
        self.rows.append(row)
        if self.window:
            place, window, prompt = len(self.rows) - 1, self.window, row.request.prompt.token_ids
            window.first[place] = window.length[place] = first
            for other in range(place if first < len(prompt) else 0):
                same = self.rows[other].request.prompt.token_ids == prompt
                if same and window.first[other] < first <= window.length[other]:
                    window.copy(other, place, first, window.first[other])
                    break

    def entries(self, part: Passed, place: int, parts: Sequence[Passed]) -> Iterator[tuple[int, int, int, int]]:
        """Yield the entries of a row's hidden states in a pass, as `Harvester.write` takes them. If vLLM's prefix cache
        had tokens that this pass computed for another row of the prompt, take the hidden states of that row."""
        if self.window:
            source, prompt = part, part.row.request.prompt.token_ids
            if self.window.first[place] == part.first < len(prompt):
                source = min((p for p in parts if p.row.request.prompt.token_ids == prompt), key=lambda p: p.first)
            low = max(source.first, part.row.kv_length - self.window.window)
            if low != part.first:  # hidden states of another row, or a prompt that is longer than the window
                self.window.first[place] = low
            for position, token in enumerate(part.row.context[low + 1 :], start=low):
                whose = part if position >= part.first else source
                yield place, whose.at + position - whose.first, position, token

    def remove(self, places: Iterable[int]) -> None:
        for place in sorted(places, reverse=True):
            self.rows.remove(place)


class Drafting:
    """Drafters and tuner of a vLLM. It follows the rows of vLLM's batch. `speculation` names the drafters. `layer`
    replaces the learned drafter that it names. `widest`: largest number of draft tokens of a row. `store` has old
    responses, which are drafts. If `collects`, hidden states are training data of the learned drafter."""

    def __init__(
        self,
        speculation: SpeculationConfig,
        target: Ends,
        max_rows: int,
        widest: int,
        store: AheadStore | None = None,
        layer: EagleLayer | None = None,
        collects: bool = False,
    ) -> None:
        self.store = AheadStore(0) if store is None else store
        made, layout = make_drafters(speculation, target, layer, self.store)
        if layout and layout.taps:
            raise DrafterError(
                "vLLM returns no hidden states of inner layers, which kind eagle3 reads: use a drafter of kind eagle1"
            )
        self.target, self._collects = target, collects
        self.tuner = make_tuner(speculation, target, made, widest)
        self.drafters = Drafters(made, None)
        self._tables = partial(RowTables, target, max_rows, self.store, layout)

    def begin(self) -> None:
        """Start a rollout, without rows."""
        depth = max(arm.depth for arm in self.tuner.strategies)
        self.rollout = self._tables(self.drafters, depth)
        self.known: dict[str, DraftedRow] = {}  # rows of all requests, by vLLM's request id
        self._stats, self._harvests = RolloutStats(), list[Harvest]()
        give, window = self._harvests.append if self._collects else None, self.rollout.window
        self._harvester = Harvester(window, self.target.version, give) if window else None
        self._pending: _Pending | None = None

    @torch.inference_mode()
    def draft_with(self, layer: EagleLayer) -> None:
        """Replace the learned drafter by one with these weights."""
        if not hasattr(self, "rollout"):  # a resumed run replaces it before the first rollout
            self.begin()
        drafter = EagleDrafter(layer, self.target)
        self.drafters.swap(drafter, self.rollout.view, self.rollout.rows)
        self.tuner.renew(drafter.name, drafter.acceptance_rate)

    def round(self, parts: Sequence[Passed], features: Tensor, others: bool) -> dict[str, Sequence[int]]:
        """Commit what a pass sampled, and return the drafts for the next pass by request id. `features` [T, F] are the
        hidden states of the pass. `others`: whether the pass had other requests too."""
        began, here, rows = time.perf_counter(), {id(part.row) for part in parts}, self.rollout.rows
        self.rollout.remove(place for place, row in enumerate(rows) if id(row) not in here)  # vLLM may preempt rows
        known = {id(row) for row in rows}
        for part in parts:
            if id(part.row) not in known:
                part.row.draft = Draft()
                self.rollout.append(part.row, part.first)
        alike = not others and all(id(p.row) in known and p.length == 1 + p.drafted for p in parts)
        places = {id(row): place for place, row in enumerate(rows)}
        counts = self._commit(sorted(parts, key=lambda part: places[id(part.row)]), features) if parts else []
        if (pending := self._pending) and parts:
            # a worker may have waited between two rollouts, or vLLM computed a prompt
            seconds, computed = (began - pending.began if alike else 0.0), sum(part.length for part in parts)
            tokens, ahead = zip(*counts, strict=True)
            result = RoundResult(pending.strategy, seconds, pending.drafting, computed, tokens, alike, ahead)
            self.tuner.record(result)
        self._pending = None
        return self._draft(began) if len(rows) else {}

    def noise(self, names: Sequence[str], counts: Sequence[int]) -> Tensor | None:
        """Return the noise of the rows of logits of a pass, [R, V], if the drafts needed it all. `counts`: numbers of
        draft tokens of the requests `names`. A request has a row for its last token and one for each draft token."""
        noise, places = self.rollout.noise, {id(row): place for place, row in enumerate(self.rollout.rows)}
        asked = list[tuple[int, int]]()
        for name, count in zip(names, counts, strict=True):
            row = self.known.get(name)
            if row is None or (place := places.get(id(row))) is None or noise.ready[place] <= len(row.tokens) + count:
                return None
            asked += [(place, len(row.tokens) + n) for n in range(count + 1)]
        return noise.at(*torch.tensor(asked).T) if asked else None

    def _commit(self, parts: Sequence[Passed], features: Tensor) -> list[tuple[int, int]]:
        """Append the sampled tokens to the rows, and remove rows that end. `parts` are in the order of the rows. Return
        `draft_counts` of each part."""
        rows, drafts = [part.row for part in parts], [part.draft for part in parts]
        sampled = [part.sampled for part in parts]
        # vLLM may verify a draft of an earlier round
        accepted = [min(len(s) - 1, len(d.tokens)) for s, d in zip(sampled, drafts, strict=True)]
        drafter = (self._pending.strategy if self._pending else PLAIN).drafter
        news, ended = commit_rows(
            rows, drafts, accepted, sampled, drafter, self.rollout, self.drafters, _STOPS, self._stats
        )
        counts = [draft_counts(*taken) for taken in zip(rows, drafts, map(len, news), strict=True)]
        entries = [one for place, part in enumerate(parts) for one in self.rollout.entries(part, place, parts)]
        if self._harvester and entries:
            everywhere = features.clone()[None].expand(len(rows), *features.shape)  # the next pass overwrites them
            self._harvester.write(everywhere, np.array(entries).T, max(map(len, news)))
            self._harvester.collect(rows, ended)
        self.rollout.remove(ended)
        return counts

    def _draft(self, began: float) -> dict[str, Sequence[int]]:
        """Choose a strategy for the next pass, and return the drafts of all rows."""
        rollout, rows, start = self.rollout, tuple(self.rollout.rows), time.perf_counter()
        context = sum(row.kv_length for row in rows) / len(rows)
        offers = look_ahead_offers(rollout)
        strategy = self.tuner.choose(len(rows), context, self.drafters.usable.keys(), offers)
        positions = [len(row.tokens) for row in rows]
        now = Round(strategy, rows, [row.kv_length for row in rows], torch.tensor(positions), rollout.sampling.batch)
        if strategy.depth:
            rollout.noise.prepare(positions, strategy.depth)
        drafts = draft_rows(now, rollout, self.drafters) if strategy != PLAIN else now.no_drafts()
        live = [row for row in rows if isinstance(row, DraftedRow)]
        for row, draft in zip(live, drafts, strict=True):
            row.draft = draft
        self._pending = _Pending(strategy, began, time.perf_counter() - start)
        if not all(row.ahead for row in rows):
            counts, seconds = self._stats.strategies, self._stats.seconds
            counts[strategy.name] = counts.get(strategy.name, 0) + 1
            seconds["draft"] = seconds.get("draft", 0.0) + self._pending.drafting
        return {row.name: row.draft.tokens for row in live}

    @torch.inference_mode()  # as in vLLM's passes, which made the tensors
    def take(self, keys: Collection[int]) -> Decoded:
        """Forget the requests with these keys. Return the counters and training data of their passes."""
        gone = [row for row in self.known.values() if row.key in keys]
        for row in gone:
            del self.known[row.name]
        rows, numbers = self.rollout.rows, {id(row) for row in gone}
        places = [place for place, row in enumerate(rows) if id(row) in numbers]
        if self._harvester and places:
            self._harvester.collect(rows, places)
        self.rollout.remove(places)
        stats, self._stats = self._stats, RolloutStats()
        stats.tokens = stats.ahead_tokens = 0
        stats.seconds["verify"] = -stats.seconds.get("draft", 0.0)  # the engine's seconds of a step have both
        self.drafters.report(stats)
        found = list(self._harvests)
        self._harvests.clear()
        return Decoded({row.key: (row.decoded, row.proposed) for row in gone}, stats, found)
