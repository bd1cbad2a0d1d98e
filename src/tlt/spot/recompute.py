"""Computation of training data for engines that return no hidden states, such as vLLM: in idle time, one response at a
time.

One forward pass over a whole response gives the hidden states of all its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from tlt.draft.features import FeatureLayout, Harvest, Transcript
from tlt.spot.teacher import Teacher


class FeatureTeacher(Teacher, Protocol):
    def features(self, tokens: Tensor, layout: FeatureLayout, stop: Callable[[], bool]) -> Tensor:
        """Return the hidden states [N, F] of a sequence of N tokens. Call `stop` before each layer. If it returns True,
        raise Interrupted."""
        ...


class Recompute:
    """Queue of responses whose hidden states are not computed yet. They are from the last finished rollout and from the
    one before it (`past`), up to `most_tokens` / 2 tokens from each rollout. The longest response is computed first,
    because drafters fail at late positions first."""

    def __init__(self, teacher: FeatureTeacher, layout: FeatureLayout, most_tokens: int) -> None:
        self.teacher, self.layout, self.most_tokens = teacher, layout, most_tokens
        self._past: list[Transcript] = []
        self._latest: list[Transcript] = []
        self._now: list[Transcript] = []

    def add(self, transcript: Transcript) -> None:
        self._now.append(transcript)
        while _tokens(self._now) > self.most_tokens // 2 and len(self._now) > 1:
            self._now.pop(0)

    def rollout_ended(self) -> None:
        """Make the current rollout the last finished one. Hidden states are computed later, with the teacher's weights
        at that time. The training data have the version of those weights."""
        self._past, self._latest, self._now = self._latest, self._now, []

    def forget(self) -> None:
        """Drop waiting responses of the rollout before the last finished one, because the task seems to have
        changed."""
        self._past = []

    def tokens(self, past: bool) -> int:
        """Return the number of tokens of the waiting responses: those of the last finished rollout, or of the one
        before it if `past`."""
        return _tokens(self._waiting(past))

    def take(self, past: bool, stop: Callable[[], bool]) -> list[Harvest]:
        """Compute the hidden states of the longest waiting response. Return them as items of training data, or [] if no
        response waits or the hidden states are not finite. `past`: see `tokens`. If `stop` returns True, raise
        Interrupted; the response then still waits."""
        waiting = self._waiting(past)
        if not waiting:
            return []
        longest = max(waiting, key=lambda transcript: len(transcript.tokens))
        found = self._harvest(longest, stop)
        waiting.remove(longest)
        return found

    def _harvest(self, transcript: Transcript, stop: Callable[[], bool]) -> list[Harvest]:
        """Compute the hidden states of a response, from position `first` to the last token but one. Cut them into whole
        windows and the last window, as tlt's own engine does. Raises Interrupted."""
        tokens, size = torch.tensor(transcript.tokens), self.layout.window
        features = self.teacher.features(tokens[:-1], self.layout, stop).cpu()
        if not features.isfinite().all():  # they cannot be trained on
            return []
        first, length = transcript.first, len(features)
        starts = [*range(first, length - size + 1, size)]
        if (length - first) % size:
            starts.append(max(first, length - size))
        whole = Harvest(self.teacher.version, 0, transcript.prompt_length, tokens[1:], features)
        cuts = (whole.cut(low, size) for low in starts)
        return [cut._replace(features=cut.features.clone()) for cut in cuts]  # a view would keep all of `features`

    def _waiting(self, past: bool) -> list[Transcript]:
        return self._past if past else self._latest


def _tokens(transcripts: Iterable[Transcript]) -> int:
    return sum(len(transcript.tokens) for transcript in transcripts)
