"""Where a response ends: stops are looked for token by token, however many a round commits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tlt.engine.runner import Sampled
from tlt.types import Row


def text_of(row: Row, detokenize: Callable[[Sequence[int]], str] | None) -> str:
    """Return the text of a finished response: the prompt's prefill, then what was decoded."""
    return row.request.prompt.prefill + detokenize(row.tokens) if detokenize else ""


class Stops:
    def __init__(self, detokenize: Callable[[Sequence[int]], str] | None) -> None:
        """`detokenize` is needed for stop strings."""
        self.detokenize = detokenize

    def append(self, row: Row, path: Sequence[int], sampled: Sampled, place: int) -> str | None:
        """Commit the sampled token of each node on the path, up to a stop; returns why the response ends, if it
        does."""
        for node in path:
            row.tokens.append(sampled.tokens[place][node])
            row.logprobs.append(sampled.logprobs[place][node])
            row.full_logprobs.append(sampled.full_logprobs[place][node])
            if reason := self.reason(row):
                return reason
        return None

    def reason(self, row: Row) -> str | None:
        """Why the response ends with its last token, if it does."""
        params = row.request.sampling
        if row.tokens[-1] in params.stop_token_ids or (params.stop_strings and self._ends_in_stop_string(row)):
            return "stop"
        return "length" if len(row.tokens) >= params.max_new_tokens else None

    def _ends_in_stop_string(self, row: Row) -> bool:
        assert self.detokenize is not None, "stop strings need a tokenizer"
        stops = row.request.sampling.stop_strings
        # a token spells at least one byte, so this tail holds the whole of a stop string that the last token completes
        tail = row.tokens[-(max(len(s.encode()) for s in stops) + 4) :]
        text = self.detokenize(tail)
        return any(stop in text for stop in stops)
