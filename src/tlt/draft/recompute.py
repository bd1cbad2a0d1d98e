"""Harvest where the engine keeps no features, as vLLM: they are computed anew in idle time, a response at a time.

One pass over a response gives what the rollout took as many passes for as it has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from tlt.draft.buffer import Harvest, Transcript
from tlt.draft.features import FeatureLayout
from tlt.draft.teacher import Teacher


class FeatureTeacher(Teacher, Protocol):
    def features(self, tokens: Tensor, layout: FeatureLayout, stop: Callable[[], bool]) -> Tensor:
        """[N, F] at each token of a sequence [N]. Raises Interrupted within a layer's time where `stop` says so."""
        ...


class Recompute:
    """Responses of the last whole rollout and of the one before it (`past`) wait here, up to half of `most_tokens` of
    each; the longest comes first, as drafters fail at late positions first."""

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
        """What waits is computed by what the teacher is then: harvest of that version."""
        self._past, self._latest, self._now = self._latest, self._now, []

    def tokens(self, past: bool) -> int:
        """Of those that wait."""
        return _tokens(self._waiting(past))

    def take(self, past: bool, stop: Callable[[], bool]) -> list[Harvest]:
        """Of one of those that wait, in windows; nothing where none does. Raises Interrupted where `stop` says so, and
        then it still waits."""
        waiting = self._waiting(past)
        if not waiting:
            return []
        longest = max(waiting, key=lambda transcript: len(transcript.tokens))
        found = self._harvest(longest, stop)
        waiting.remove(longest)
        return found

    def _harvest(self, transcript: Transcript, stop: Callable[[], bool]) -> list[Harvest]:
        """Entries of all tokens but the last, in whole windows and the last window, as our own engine gives them.
        Raises Interrupted."""
        tokens, size = torch.tensor(transcript.tokens), self.layout.window
        features = self.teacher.features(tokens[:-1], self.layout, stop).cpu()
        if not features.isfinite().all():  # nothing to learn from
            return []
        length = len(features)
        starts = [*range(0, length - size + 1, size)]
        if length % size:
            starts.append(max(0, length - size))
        whole = Harvest(self.teacher.version, 0, transcript.prompt_length, tokens[1:], features)
        return [whole.cut(low, size) for low in starts]

    def _waiting(self, past: bool) -> list[Transcript]:
        return self._past if past else self._latest


def _tokens(transcripts: Iterable[Transcript]) -> int:
    return sum(len(transcript.tokens) for transcript in transcripts)
