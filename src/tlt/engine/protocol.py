"""Protocols of a rollout engine, and of the backend that creates it. All engines, such as tlt's own and vLLM, sample
with the same noise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tlt.config import Config, EngineConfig, ModelConfig, SpeculationConfig
from tlt.draft.ahead import AheadStore
from tlt.draft.eagle import EagleLayer
from tlt.draft.features import Harvest
from tlt.engine.tuner import Tuner
from tlt.models.decoder import Decoder
from tlt.models.families import DecoderOptions
from tlt.spelling import Detokenizer
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats, Row


class Target(Protocol):
    """The model that an engine decodes with."""

    options: DecoderOptions
    dtype: torch.dtype
    device: torch.device
    version: int

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt with its response."""
        ...

    @property
    def teacher(self) -> Decoder:
        """Embedding, head and rotary table of the model. The learned drafter and its training read them."""
        ...

    def text_logits(self, tokens: Tensor, with_drafts: bool, /) -> Tensor:
        """Return logits [n, V], up to an additive constant in each row, at the last n tokens of a text [N], for a check
        of the model. If `with_drafts`, tokens are verified as drafts, if the target can do so."""
        ...

    def load(self, weights: Mapping[str, Tensor], version: int, /) -> None:
        """Load all weights, given by their Hugging Face names. If a weight is missing, raise ModelError and keep the
        old weights."""
        ...


class Rows(Sized, Iterable[Row], Protocol):
    """Ordered collection of rows. A row is a request with its tokens so far."""


class RolloutEngine(Protocol):
    """Engine that decodes requests to responses, one round at a time. Requests may be added and removed between two
    rounds. A response is a function of (target version, prompt, seed). `store` has look-ahead drafts."""

    config: EngineConfig
    detokenize: Detokenizer | None
    tracer: Tracer | None
    store: AheadStore
    tuner: Tuner

    @property
    def target(self) -> Target: ...

    @property
    def stats(self) -> RolloutStats:
        """Counters of the rollout so far."""
        ...

    @property
    def rows(self) -> Rows:
        """Requests that are being decoded, with their tokens so far."""
        ...

    @property
    def waiting(self) -> Rows: ...

    @property
    def busy(self) -> bool:
        """Whether the current rollout has unfinished requests."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether look-ahead requests are unfinished."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]: ...

    def start(self, requests: Iterable[Request]) -> None:
        """Start a new rollout. All rows of the previous rollout are dropped. This method, `submit` and `look_ahead`
        raise ValueError for a request that cannot be decoded."""
        ...

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None: ...

    def look_ahead(self, requests: Iterable[Request]) -> None:
        """Replace the look-ahead requests. They are requests of coming steps, which are decoded in advance."""
        ...

    def keep_ahead(self) -> None:
        """Store the tokens so far of all look-ahead rows as drafts."""
        ...

    def release_requests(self, seeds: Collection[int]) -> list[Row]:
        """Remove the requests with these seeds. Return their unfinished rows, which another engine can resume."""
        ...

    def round(self) -> list[Response]:
        """Run one round: admit waiting requests, then run one target pass over the active rows. Return the finished
        responses."""
        ...

    def draft_with(self, layer: EagleLayer) -> None:
        """Replace the learned drafter in use by one with the weights of `layer`. Call this between two rounds."""
        ...

    def release(self) -> None:
        """Free the memory of the key-value cache until the next rollout. Call this between two rollouts."""
        ...

    def plain_engine(self) -> RolloutEngine:
        """Return an engine for plain decoding with the same target. Only one of the two may run at a time."""
        ...


class Backend(Protocol):
    """Factory of targets and engines. A recipe chooses it by `engine.backend` (BACKENDS in `tlt.config.registry`)."""

    start_note: str
    """note for users if engines of this backend take long to start, else an empty text"""

    def open_target(self, config: Config, folder: str | Path | None) -> Target:
        """Return a target with the weights in `folder`. If `folder` is None, return a target for training, whose
        weights are loaded later. Raises ModelError."""
        ...

    def open_engine(
        self,
        config: Config,
        target: Target,
        detokenize: Detokenizer,
        layer: EagleLayer | None,
        on_harvest: Callable[[Harvest], None] | None,
        tracer: Tracer,
    ) -> RolloutEngine:
        """Return an engine for a training run. `target` comes from `open_target`. `layer` is the learned drafter to
        start with (None: the one that the recipe names, if any). `on_harvest` receives training data for the drafter
        (None: no data are collected)."""
        ...

    def load_engine(
        self,
        model: ModelConfig,
        speculation: SpeculationConfig,
        engine: EngineConfig,
        detokenize: Detokenizer,
        longest: int | None,
    ) -> RolloutEngine:
        """Return an engine for use without training, with the weights in the model's folder. `longest` is the maximum
        length in tokens of a prompt together with its response (None: the model's limit). Raises ModelError or
        DrafterError."""
        ...

    def about_cache(self, config: Config) -> str:
        """Return a note for users on the size of the key-value cache, or an empty text."""
        ...

    def about_speculation(self, config: Config) -> str:
        """Return a note for users on the drafter in use."""
        ...


class Generates:
    """Base class of engines. Its methods call only methods of `RolloutEngine`."""

    def generate(self: RolloutEngine, requests: Iterable[Request]) -> Iterator[Response]:
        """Decode all requests. Yield responses in the order in which they finish. Raises ValueError for a request that
        cannot be decoded."""
        self.start(requests)
        while self.busy:
            yield from self.round()


def refuse_impossible(request: Request, most_tokens: int, what: str, remedy: str) -> None:
    """Raise ValueError for a request that cannot be decoded. `most_tokens`: maximum length in tokens of a prompt
    together with its response. `what` and `remedy` are parts of the message: a clause that the limit completes, such as
    "the model supports", and what the user can do."""
    prompt, new = request.prompt, request.sampling.max_new_tokens
    if not prompt.token_ids:
        raise ValueError(f"prompt {prompt.prompt_id} is empty: give it at least one token")
    if new < 1:
        raise ValueError(
            f"prompt {prompt.prompt_id} may get {new} new tokens: set rollout.max_new_tokens to at least 1"
        )
    longest = len(prompt.token_ids) + new
    if longest > most_tokens:
        raise ValueError(
            f"prompt {prompt.prompt_id} and its response may reach {longest} tokens, but {what} {most_tokens}: {remedy}"
        )
