"""Conditions that end a response. They are checked for each token, even if a round commits several tokens."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from tlt.spelling import Detokenizer
from tlt.types import Response, Row


def response_of(row: Row, reason: str, detokenize: Detokenizer | None) -> Response:
    """Return the response of a finished row. Its text is `Prompt.prefill`, then the decoded text. Without `detokenize`
    the text is empty."""
    text = row.request.prompt.prefill + detokenize(row.tokens) if detokenize else ""
    known = {"decoded": row.decoded, "proposed": row.proposed, "replies": row.replies}
    return Response(row.request, row.tokens, row.logprobs, row.full_logprobs, reason, text, **known)


class Stops:
    """Conditions that end a response. `detokenize` is needed for stop strings."""

    def __init__(self, detokenize: Detokenizer | None) -> None:
        self.detokenize = detokenize

    def append(self, row: Row, tokens: Iterable[int]) -> str | None:
        """Append tokens to the row, up to a stop. Return the finish reason, or None."""
        params = row.request.sampling
        for token in tokens:
            row.tokens.append(token)
            if token in params.stop_token_ids or (params.stop_strings and self._ends_in_stop_string(row)):
                return "stop"
            if len(row.tokens) >= params.max_new_tokens:
                return "length"
        return None

    def _ends_in_stop_string(self, row: Row) -> bool:
        """Return whether the last token completes a stop string. Special tokens count as their names, so `<|im_end|>`
        can be a stop string. A stop string is not found across a special token that it does not name, or across the
        beginning of a turn."""
        assert self.detokenize is not None, "stop strings need a tokenizer"
        stops, longest = _as_bytes(row.request.sampling.stop_strings)
        # a token has at least one byte, so this tail contains any stop string that the last token completes
        tail = b"".join(map(self.detokenize.spell, row.tokens[row.turn :][-longest:]))
        return any(stop in tail for stop in stops)


@cache
def _as_bytes(stop_strings: tuple[str, ...]) -> tuple[tuple[bytes, ...], int]:
    """Return the stop strings in UTF-8, and the length in bytes of the longest."""
    stops = tuple(stop.encode() for stop in stop_strings)
    return stops, max(map(len, stops))
