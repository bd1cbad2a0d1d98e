"""vLLM with the interface of tlt's own engine. A round is one vLLM step.

The noise (`noise.py`) determines each sampled token, so responses equal those of tlt's own engine up to rounding.
vLLM schedules, pages the KV cache and verifies drafts. This module handles requests, responses and look-ahead. A later
turn of an episode is a new request to vLLM. Its prompt is the episode so far, whose full blocks are in vLLM's prefix
cache.

`VllmBackend` opens it for `engine.backend = "vllm"`. Modules of vLLM are imported only when a target starts vLLM.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from tlt.draft.ahead import Ahead, AheadStore
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.draft.strategy import PLAIN
from tlt.engine.committing import Stops, response_of
from tlt.engine.protocol import Generates, Target, refuse_impossible
from tlt.engine.tuner import Fixed, Tuner
from tlt.models.families import decoder_options, read_config
from tlt.models.hugging_face import empty_model, is_named, names_of_ends
from tlt.models.loading import folder_weights
from tlt.models.model_folder import ModelError
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats, Row
from tlt.vllm.drafting import Drafting
from tlt.vllm.noise import Draw
from tlt.vllm.settings import WIDEST, VllmError
from tlt.vllm.target import VllmTarget, start_vllm


class VllmEngine(Generates):
    """Engine that decodes with vLLM.

    `detokenize` is needed for stop strings. Tokens of look-ahead requests are saved in `store`, and serve as drafts in
    a later rollout. `speculation` names the drafters (default: none). `layer` replaces the learned drafter that it
    names. `on_harvest` receives hidden states for the training of the drafter. There are no drafts if vLLM was started
    without a drafter.
    """

    def __init__(
        self,
        target: VllmTarget,
        config: EngineConfig,
        detokenize: Detokenizer | None = None,
        tracer: Tracer | None = None,
        store: AheadStore | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        layer: EagleLayer | None = None,
        on_harvest: Callable[[Harvest], None] | None = None,
    ) -> None:
        self.target, self.config, self.detokenize, self.tracer = target, config, detokenize, tracer
        self.on_harvest = on_harvest
        self.store = AheadStore(0) if store is None else store
        self.drafting: Drafting | None = None
        if target.drafts:
            asked = speculation or SpeculationConfig(drafter="off")
            ends, collects = target.ends, on_harvest is not None
            most = config.most_rows(target.device.type)
            self.drafting = Drafting(asked, ends, most, WIDEST, self.store, layer, collects)
        self.tuner: Tuner = self.drafting.tuner if self.drafting else Fixed(PLAIN)
        self.stops = Stops(detokenize)
        self.waiting: deque[Row] = deque()
        self._ahead: deque[Row] = deque()
        self._live: dict[str, Row] = {}  # by vLLM request id
        self._ended: set[str] = set()  # ids of live rows that vLLM has finished
        self.stats, self.version = RolloutStats(), target.version

    def plain_engine(self) -> VllmEngine:
        """Return an engine that never drafts. It shares vLLM with this engine, so only one of the two may have
        unfinished requests."""
        return VllmEngine(self.target, self.config, self.detokenize)

    # -- requests ------------------------------------------------------------------------------------------------------

    def start(self, requests: Iterable[Request]) -> None:
        """Start a new rollout and drop all requests of the last one. Raises ValueError for a request that cannot be
        decoded."""
        self.keep_ahead()
        self._abort(list(self._live))
        self.waiting.clear()
        self._ahead.clear()
        self.target.llm.collective_rpc("tlt_start", args=(self.drafting,))
        self.stats = RolloutStats(seconds=dict.fromkeys(("prefill", "draft", "verify", "commit", "ahead"), 0.0))
        self.version = self.target.version
        self.submit(requests)

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None:
        """Add requests to the current rollout. `resumed` are unfinished rows that another engine released. Raises
        ValueError for a request that cannot be decoded."""
        rows = [*resumed, *(Row(request) for request in requests)]
        for row in rows:
            self._check(row.request)
        self.waiting.extend(rows)

    def _check(self, request: Request) -> None:
        remedy = "lower rollout.max_new_tokens or raise data.max_prompt_tokens"
        refuse_impossible(request, self.target.longest, "vLLM was started for", remedy)

    def release_requests(self, seeds: Collection[int]) -> list[Row]:
        """Remove waiting and live requests with these seeds and return their rows. An engine that continues a row
        produces the same tokens."""
        left = [row for row in self.waiting if row.request.seed in seeds]
        self.waiting = deque(row for row in self.waiting if row.request.seed not in seeds)
        names = [name for name, row in self._live.items() if row.request.seed in seeds and not row.ahead]
        self._take(names)
        return left + self._abort(names)

    def look_ahead(self, requests: Iterable[Request]) -> None:
        """Replace the look-ahead requests. They are decoded when the current rollout leaves slots free. If one of the
        new requests is already being decoded, it continues. Raises ValueError for a request that cannot be decoded."""
        wanted = {request.seed: request for request in requests}
        for request in wanted.values():
            self._check(request)
        self.keep_ahead()
        live = {row.request.seed: name for name, row in self._live.items() if row.ahead}
        self._abort([name for seed, name in live.items() if seed not in wanted])
        vocab_size, most = self.target.options.vocab_size, self.config.prefill_tokens
        self._ahead = deque(self.store.row(r, vocab_size, most) for seed, r in wanted.items() if seed not in live)

    def keep_ahead(self) -> None:
        """Save the tokens of look-ahead rows in the store."""
        for row in self.rows:
            if row.ahead and row.tokens:
                self.store.put_row(row, self.version)

    def _preempt_ahead(self) -> None:
        self.keep_ahead()
        self._ahead.extendleft(reversed(self._abort([name for name, row in self._live.items() if row.ahead])))

    def draft_with(self, layer: EagleLayer) -> None:
        """Replace the learned drafter by one with the weights of `layer`. With tensor parallelism it drafts from the
        next rollout on."""
        assert self.drafting, "vLLM was started without a drafter"
        self.drafting.draft_with(layer)

    def release(self) -> None:
        """End the look-ahead requests and save their tokens. If no other rows are live, free the KV cache until the
        next request."""
        self.look_ahead(())
        if not self._live:
            self.target.release()

    @property
    def busy(self) -> bool:
        """Whether the current rollout has unfinished requests."""
        return bool(self.waiting) or not all(row.ahead for row in self.rows)

    @property
    def looks_ahead(self) -> bool:
        """Whether look-ahead requests are waiting or live."""
        return bool(self._ahead) or any(row.ahead for row in self.rows)

    @property
    def rows(self) -> Collection[Row]:
        """Rows that vLLM is decoding, including look-ahead rows."""
        return self._live.values()

    # -- a round -------------------------------------------------------------------------------------------------------

    def round(self) -> list[Response]:
        """Run one vLLM step and return the finished responses. Raises VllmError if vLLM ends a request by itself."""
        assert self.target.version == self.version, "the target has other weights than this rollout: call start"
        assert self.busy or self.looks_ahead, "nothing to decode: call start, submit or look_ahead"
        began, start = time.time(), time.perf_counter()
        self._admit()
        own = self.busy
        finished: dict[str, str] = {}
        tokens = 0
        for output in self.target.llm.step():
            name, news = output.request_id, output.outputs[0].token_ids
            if name in self._live and news:
                row = self._live[name]
                if len(row.tokens) == len(row.logprobs):  # first output since the row was added to vLLM
                    self.stats.prefill_tokens += len(row.context) - output.num_cached_tokens
                tokens += self._append(name, news, finished)
            if output.finished:
                self._ended.add(name)
        for name in self._ended & self._live.keys() - finished.keys():
            raise VllmError(f"vLLM ended request {name} unexpectedly: see vLLM's messages above")
        if self.tracer:
            self.tracer.add("vllm", began, time.time(), rounds=1, tokens=tokens)
        self.stats.rounds += own
        self.stats.seconds["verify" if own else "ahead"] += time.perf_counter() - start
        return self._end(finished)

    def _admit(self) -> None:
        if self.waiting:
            self._preempt_ahead()
        own = sum(not row.ahead for row in self.rows)
        most = self.config.most_rows(self.target.device.type)
        slots = most if self.waiting or not own else self.tuner.free_rows(own)
        line = self.waiting or self._ahead
        while line and len(self._live) < slots:
            row = line.popleft()
            draw, stops = Draw.of_row(self.target.next_key(), row), row.request.sampling.stop_token_ids
            if self.target.parallel:  # its drafting is in other processes
                self.target.llm.collective_rpc("tlt_drafts", args=(self.store.group(row.request),))
            self._live[self.target.add(list(row.context), draw, row.room, stops)] = row

    def _append(self, name: str, news: Sequence[int], finished: dict[str, str]) -> int:
        """Append new tokens to a row until it stops, and return their number. If it stops, put the reason into
        `finished`."""
        row = self._live[name]
        had = len(row.tokens)
        if reason := self.stops.append(row, news):
            finished[name] = reason
        count = len(row.tokens) - had
        if row.ahead:
            self.stats.ahead_tokens += count
        else:
            self.stats.tokens += count
            for counts in () if self.drafting else (self.stats, row.decoded):
                counts.row_passes += 1
        return count

    def _end(self, finished: dict[str, str]) -> list[Response]:
        self._take(list(finished))
        responses = []
        for row, reason in zip(self._abort(list(finished)), finished.values(), strict=True):
            if row.ahead:
                self.store.put([Ahead.of(row, self.version, ended=True)])
            else:
                row.proposed = row.proposed[: len(row.tokens)] if self.drafting else ""
                responses.append(response_of(row, reason, self.detokenize))
        return responses

    def _abort(self, names: list[str]) -> list[Row]:
        """Remove live rows and return them. Requests that vLLM still runs are aborted."""
        if going := [name for name in names if name not in self._ended]:
            self.target.llm.abort_request(going)
        self._ended.difference_update(names)
        return [self._live.pop(name) for name in names]

    def _take(self, names: list[str]) -> None:
        """Fetch what vLLM's passes gave since each row was added to it: log-probs, counters and training data."""
        if not names:
            return
        wanted = {int(name): (len((row := self._live[name]).logprobs), len(row.tokens)) for name in names}
        drawn, decoded = self.target.llm.collective_rpc("tlt_take", args=(wanted,))[0]
        for name in names:
            row = self._live[name]
            row.logprobs += [logprob for logprob, _ in drawn[int(name)]]
            row.full_logprobs += [full for _, full in drawn[int(name)]]
        if decoded:
            for key, (counts, proposed) in decoded.rows.items():
                row = self._live[str(key)]
                row.proposed += proposed
                for what, count in vars(counts).items():
                    setattr(row.decoded, what, getattr(row.decoded, what) + count)
            self.stats += decoded.stats
            for item in decoded.harvests:
                assert self.on_harvest, "training data were not asked for"
                self.on_harvest(item)


# -- backend -----------------------------------------------------------------------------------------------------------


class VllmBackend:
    """Backend that decodes with vLLM (protocol `Backend` of `engine/protocol.py`)."""

    start_note = "starting vLLM, which takes one or two minutes"

    def open_target(self, config: Config, folder: str | Path | None) -> VllmTarget:
        """Start vLLM with the weights in `folder`. If `folder` is None, as for training, start it with the weights of
        model.path, and let it free its KV cache during the update. Raises ModelError or VllmError."""
        _refuse_other_heads(config)
        target = start_vllm(config.model, config.engine, config.speculation, config.longest, sleeps=folder is None)
        if folder:
            target.load(folder_weights(folder, target.dtype), 0)
        return target

    def open_engine(
        self,
        config: Config,
        target: Target,
        detokenize: Detokenizer,
        layer: EagleLayer | None,
        on_harvest: Callable[[Harvest], None] | None,
        tracer: Tracer,
    ) -> VllmEngine:
        assert isinstance(target, VllmTarget), "the target belongs to another backend"
        store = AheadStore()
        return VllmEngine(
            target, config.engine, detokenize, tracer, store, config.speculation, layer=layer, on_harvest=on_harvest
        )

    def load_engine(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        engine: EngineConfig,
        detokenize: Detokenizer,
        longest: int | None,
    ) -> VllmEngine:
        target = start_vllm(model, engine, speculation, longest)
        if target.drafts:
            target.ends.load(folder_weights(model.path, target.dtype), 0)
        return VllmEngine(target, engine, detokenize, speculation=speculation)

    def about_cache(self, config: Config) -> str:
        return ""

    def about_speculation(self, config: Config) -> str:
        learned = f" with {config.speculation.path}" if config.speculation.path else ""
        return f"{config.speculation.drafter}{learned}, with vLLM"


def _refuse_other_heads(config: Config) -> None:
    """Raise ModelError for a LoRA adapter on the head or the embedding if these two are tied. vLLM keeps one tensor for
    both, but the adapter changes only one of them."""
    lora, family = config.train.lora, read_config(config.model.path)
    if not (lora.rank and decoder_options(family).tied):
        return
    ends = names_of_ends(empty_model(family))
    if odd := [target for target in lora.targets if any(is_named(end, target) for end in ends)]:
        raise ModelError(
            f"train.lora.targets has {odd[0]}, but the model's head and embedding are tied, and vLLM keeps one "
            "tensor for both: remove that target, or set engine.backend = 'tlt'"
        )
