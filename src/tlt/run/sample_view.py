"""View of one response of the last step in the live display: the end of its prompt, its text and its reward."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.text import Text

from tlt.types import Group, Response
from tlt.wording import counted

SAMPLE, BEST, WORST = "a sample", "best", "worst"
KEYS = {"s": SAMPLE, "b": BEST, "w": WORST}
_PROMPT_LINES, _RESPONSE_LINES = 2, 4


def choose(groups: Sequence[Group], which: str) -> Response | None:
    """Return the response to show: the first one with a reward, or the one with the highest or lowest reward, as
    `which` selects. Return None if no response has a reward."""
    rewarded = [r for group in groups for r in group.responses if r.reward is not None]
    if not rewarded:
        return None
    if which == SAMPLE:
        return rewarded[0]
    return max(rewarded, key=lambda r: (r.reward or 0.0) * (1 if which == BEST else -1))


def picture(response: Response, which: str, width: int) -> Text:
    """Return the view of a response as text of at most seven lines of `width` characters."""
    reward = response.reward if response.reward is not None else float("nan")
    terms = ", ".join(f"{name} {score:.3g}" for name, score in response.scores.items())
    cut_off = ", cut off" if response.finish_reason != "stop" else ""
    facts = f"  reward {reward:.3g}{f' ({terms})' if len(response.scores) > 1 else ''}"
    head = Text.assemble(
        (which, "bold"), f"{facts}  {counted(len(response.token_ids), 'token')}{cut_off}", no_wrap=True
    )
    head.append("   keys: b best, w worst, s sample", "dim")
    head.truncate(width, overflow="ellipsis")
    prompt = _last(_lines(response.request.prompt.text, width), _PROMPT_LINES)
    shown = _ends(_lines(response.text, width), _RESPONSE_LINES)
    return Text("\n").join([head, *(Text(line, "dim") for line in prompt), *(Text(line) for line in shown)])


def _lines(text: str, width: int) -> list[str]:
    """Return the lines of a text, wrapped at `width` characters. Unprintable characters become dots."""
    clean = "".join(char if char == "\n" or char.isprintable() else "·" for char in text.strip())
    return [part for line in clean.split("\n") for part in textwrap.wrap(line, width)]


def _last(lines: Sequence[str], most: int) -> list[str]:
    return list(lines[-most:])


def _ends(lines: Sequence[str], most: int) -> list[str]:
    """Return at most `most` lines: some from the start, and the last ones, which have the answer."""
    if len(lines) <= most:
        return list(lines)
    return [*lines[: most // 2 - 1], "…", *lines[-(most // 2) :]]
