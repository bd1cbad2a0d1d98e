"""What a rollout asks of an engine: ours, or another one that draws with the same noise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sized
from typing import Protocol

import torch
from torch import Tensor

from tlt.config import EngineConfig
from tlt.draft.ahead import AheadStore
from tlt.draft.eagle import EagleLayer
from tlt.engine.spelling import Detokenizer
from tlt.engine.tuner import Tuner
from tlt.models.families import DecoderOptions
from tlt.trace import Tracer
from tlt.types import Request, Response, RolloutStats, Row


class Target(Protocol):
    """The model that an engine decodes with."""

    options: DecoderOptions
    dtype: torch.dtype
    device: torch.device
    version: int

    def load(self, weights: Mapping[str, Tensor], version: int, /) -> None:
        """Take all weights by their Hugging Face names. Raises ModelError, then keeps the old ones."""
        ...


class Rows(Sized, Iterable[Row], Protocol):
    """Some rows, in an order."""


class RolloutEngine(Protocol):
    """Requests in, responses out, a round at a time; between two rounds requests come and go. A response is a function
    of (target version, prompt, seed) alone. `store` holds what was decoded for coming steps."""

    config: EngineConfig
    detokenize: Detokenizer | None
    tracer: Tracer | None
    store: AheadStore
    tuner: Tuner

    @property
    def target(self) -> Target: ...

    @property
    def stats(self) -> RolloutStats:
        """Of the rollout so far."""
        ...

    @property
    def rows(self) -> Rows:
        """The live rows."""
        ...

    @property
    def waiting(self) -> Rows: ...

    @property
    def busy(self) -> bool:
        """Whether there is something to decode for this rollout."""
        ...

    @property
    def looks_ahead(self) -> bool:
        """Whether there is something to decode for those to come."""
        ...

    def generate(self, requests: Iterable[Request]) -> Iterator[Response]: ...

    def start(self, requests: Iterable[Request]) -> None:
        """A new rollout: what was live or waiting is forgotten. This and the next two raise ValueError for a request
        that can never run."""
        ...

    def submit(self, requests: Iterable[Request], resumed: Iterable[Row] = ()) -> None: ...

    def look_ahead(self, requests: Iterable[Request]) -> None:
        """Requests of coming steps, in the place of those given before."""
        ...

    def keep_ahead(self) -> None:
        """The store takes what the rows that are decoded ahead have so far."""
        ...

    def release_requests(self, seeds: Collection[int]) -> list[Row]:
        """These requests leave; whoever goes on with one ends it with the same tokens."""
        ...

    def round(self) -> list[Response]:
        """One turn; returns what finished."""
        ...

    def draft_with(self, layer: EagleLayer) -> None:
        """Put this learned drafter in the place of the one in use, between two rounds."""
        ...

    def release(self) -> None:
        """Give back the cache's memory, up to the next rollout, between two of them."""
        ...

    def plain_beside(self) -> RolloutEngine:
        """One that decodes plainly with the same target; only one of the two is at work at a time."""
        ...


class Generates:
    """What every engine has of the above in terms of the rest."""

    def generate(self: RolloutEngine, requests: Iterable[Request]) -> Iterator[Response]:
        """Decode all requests; responses come in the order they finish. Raises ValueError for one that can never
        run."""
        self.start(requests)
        while self.busy:
            yield from self.round()


def refuse_impossible(request: Request, most_tokens: int, what: str, remedy: str) -> None:
    """Raises ValueError for a request that can never run: `what` (a model, an engine) has room for so many tokens of
    a prompt with its response."""
    prompt, new = request.prompt, request.sampling.max_new_tokens
    if not prompt.token_ids:
        raise ValueError(f"prompt {prompt.prompt_id} is empty: give it at least one token")
    if new < 1:
        raise ValueError(
            f"prompt {prompt.prompt_id} is to get {new} new tokens: give rollout.max_new_tokens at least 1"
        )
    longest = len(prompt.token_ids) + new
    if longest > most_tokens:
        raise ValueError(
            f"prompt {prompt.prompt_id} and its response may reach {longest} tokens, but {what} {most_tokens}: {remedy}"
        )
