"""Turns after tool calls. TRL calls the tools of its trainer or environment, and tlt decodes the next turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tlt.integrations import UnsupportedError
from tlt.integrations.decoding import prompt_number
from tlt.sampling import request_seed
from tlt.types import Prompt, Request, Response

_SEAM = "_generate_single_turn"
_ARGUMENTS = ["prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"]
_NAMES = (_SEAM, "_tokenize_prompts", "_tool_call_loop")


def has_tools(trainer: Any) -> bool:
    return bool(trainer.tools or trainer.environment_factories)


@dataclass
class _Row:
    """A completion that TRL may continue."""

    first: Request
    text: tuple[int, ...]
    """tokens of the prompt and of all turns"""


class ToolTurns:
    """Replacement for the trainer's method that generates a turn after a tool call. The tokens of a turn are a function
    of the weights, the tokens before the turn, the seed of the row and the number of the turn."""

    def __init__(self, trainer: Any, decode: Callable[[Sequence[Request]], list[Response]]) -> None:
        """Replace the trainer's method. `decode` returns the responses in the order of the requests."""
        self._decode = decode
        self._rows: list[_Row] = []
        self._turn = 0
        setattr(trainer, _SEAM, self.next_turn)

    def begin(self, requests: Sequence[Request], responses: Sequence[Response]) -> None:
        """Record the first turn of each row of a new batch."""
        pairs = zip(requests, responses, strict=True)
        self._rows = [_Row(first, (*first.prompt.token_ids, *response.token_ids)) for first, response in pairs]
        self._turn = 0

    def next_turn(
        self,
        prompt_ids: Sequence[Sequence[int]],
        images: Any,
        multimodal_fields: Any,
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the tokens and the log-probs of each row's next turn. `prompt_ids` has all tokens of each row before
        this turn, including the results of tools. If they fill max_completion_length, the row gets no tokens."""
        if images or has_tool_images:
            raise UnsupportedError(
                "tlt in TRL does not support images: let tools return text, or leave rollout_func out"
            )
        self._turn += 1
        rows = self._continued(prompt_ids)
        requests = [self._request(row, tuple(ids)) for row, ids in zip(rows, prompt_ids, strict=True)]
        wanted = [request for request in requests if request.sampling.max_new_tokens > 0]
        found = {response.request.seed: response for response in self._decode(wanted)}
        tokens, logprobs = list[list[int]](), list[list[float]]()
        for row, request in zip(rows, requests, strict=True):
            response = found.get(request.seed)
            tokens.append(list(response.token_ids) if response else [])
            logprobs.append(list(response.full_logprobs) if response else [])
            row.text = (*request.prompt.token_ids, *tokens[-1])
        return tokens, logprobs

    def _continued(self, prompt_ids: Sequence[Sequence[int]]) -> list[_Row]:
        """Return the rows that these token sequences continue, found by their tokens. TRL keeps the order of the rows,
        but does not number them."""
        left = iter(self._rows)
        found = [next((row for row in left if tuple(ids[: len(row.text)]) == row.text), None) for ids in prompt_ids]
        rows = [row for row in found if row is not None]
        if len(rows) < len(found):
            raise UnsupportedError(
                "tlt in TRL cannot continue a completion whose earlier tokens have changed: use a chat template that "
                "keeps earlier turns unchanged, or leave tools out"
            )
        return rows

    def _request(self, row: _Row, text: tuple[int, ...]) -> Request:
        first = row.first
        seed = request_seed(first.seed, "trl turn", 0, self._turn, 0)
        new = first.sampling.max_new_tokens - (len(text) - len(first.prompt.token_ids))
        prompt = Prompt(prompt_number(text), "", text)
        return Request(prompt, first.index, first.epoch, seed, replace(first.sampling, max_new_tokens=new))


def refuse_other_methods(trainer: Any) -> None:
    """Raise UnsupportedError if the trainer of the installed TRL lacks the methods that this module uses."""
    missing = [name for name in _NAMES if not callable(getattr(trainer, name, None))]
    if missing or list(inspect.signature(getattr(trainer, _SEAM)).parameters) != _ARGUMENTS:
        what = missing[0] if missing else f"{_SEAM} with the arguments {', '.join(_ARGUMENTS)}"
        raise UnsupportedError(
            f"tlt does not support tools in this TRL, whose trainer has no {what}: install trl 1.16, or leave tools out"
        )
