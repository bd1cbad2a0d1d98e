"""Simulates how much is seen ahead as workers are idle longer, on rollouts with long-tailed lengths, second by second.

    python bench/look_ahead_idle.py [--json FILE]

Nothing is decoded. `tlt.cluster.ahead` itself decides what each worker decodes ahead, how a step is dealt out, and in
which order requests are taken. Lengths, speeds and the fraction of look-ahead tokens that is right are made up, with
the figures below. Lengths are log-normal and cut off at 20,480 tokens, as in the trace of the TLT paper (arXiv
2511.16665), where the longest response is far beyond the 75th percentile; those to one prompt are alike. The same
requests are dealt out among more and more workers, so that each has fewer rows and is idle longer.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tlt.cluster.ahead import LookingAhead
from tlt.draft.ahead import Ahead
from tlt.metrics import provenance, write_json
from tlt.types import Prompt, Request, Response, RolloutStats, Row, SamplingParams

PROMPTS, GROUP, LONGEST = 16, 8, 20_480
MEDIAN, BETWEEN, WITHIN = 3_000, 0.8, 0.6  # standard deviations of log lengths; 75th percentile: 5,900
SLOTS = 128  # rows that a worker has room for
PASS, PER_ROW = 0.02, 0.0002  # seconds of a round, and more for each row
DRAFTED, SEEN = 3.0, 8.0  # accept length with the drafter and with a look-ahead
RIGHT = 0.97  # fraction of look-ahead tokens that is right a step later; where one is wrong, the drafter goes on
BRIEF = 1.8  # a round that decodes ahead may take so many times the round of one row
TICK = 1.0  # seconds of a turn of the simulation
STEPS, AHEAD = 16, 4


@dataclass
class Live:
    """A row: its final length, its tokens so far, and how many of them are known from look-ahead."""

    request: Request
    length: int
    tokens: float = 0.0
    known: int = 0


@dataclass
class World:
    workers: int
    looks_ahead: bool
    lengths: dict[int, int] = field(default_factory=dict)
    seen: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(0)
        self.requests = [self._step(step) for step in range(STEPS)]
        self.looking = LookingAhead(SLOTS, AHEAD)

    def _step(self, step: int) -> list[Request]:
        found: list[Request] = []
        for at in range(PROMPTS):
            number = step * PROMPTS + at
            middle = self.rng.gauss(np.log(MEDIAN), BETWEEN)
            for index in range(GROUP):
                seed = number * GROUP + index
                self.lengths[seed] = int(min(LONGEST, max(16, np.exp(self.rng.gauss(middle, WITHIN)))))
                found.append(Request(Prompt(number, "", (number,)), index, 0, seed, SamplingParams()))
        return found

    def run(self) -> dict[str, Any]:
        for step, requests in enumerate(self.requests):
            self._rollout(requests, iter(self.requests[step + 1 :]))
        tokens = sum(self.lengths.values())
        return {
            "workers": self.workers,
            "look_ahead": self.looks_ahead,
            "rollout_seconds": sum(self.seconds),
            "idle_share": sum(self.idle) / (self.workers * sum(self.seconds)),
            "seen_ahead": sum(self.seen) / tokens,
            "seconds_by_step": self.seconds,
        }

    def _rollout(self, requests: Sequence[Request], coming: Iterator[list[Request]]) -> None:
        looking = self.looking
        looking.begin(coming if self.looks_ahead else ())
        line = looking.deal([Row(request) for request in requests], self.workers)
        shares: list[list[Live]] = [[] for _ in range(self.workers)]
        fair = -(-len(requests) // self.workers)
        for index, share in enumerate(shares):
            share += [self._live(row.request) for row in line[index * fair : (index + 1) * fair]]
        seconds = idle = seen = 0.0
        while any(shares):
            dry = [index for index, share in enumerate(shares) if not share]
            for index, share in enumerate(shares):
                seen += self._decode(share)
                shares[index] = [live for live in share if live.tokens < live.length]
            for index in dry if self.looks_ahead else ():
                self._decode_ahead(index, len(dry))
            seconds, idle = seconds + TICK, idle + TICK * len(dry)
        looking.end(RolloutStats(), [Response(request, [], [], [], "stop") for request in requests], 0)
        self.seconds.append(seconds)
        self.idle.append(idle)
        self.seen.append(seen)

    def _live(self, request: Request) -> Live:
        return Live(request, self.lengths[request.seed], known=self.looking.store.length(request.seed))

    def _decode(self, share: list[Live]) -> float:
        """One tick of a worker's rollout; returns the number of tokens seen ahead."""
        seen, passes = 0.0, TICK / (PASS + PER_ROW * len(share))
        for live in share:
            left = passes
            if live.tokens < live.known:
                each = RIGHT * SEEN + (1 - RIGHT) * DRAFTED
                got = min(live.known - live.tokens, left * each)
                live.tokens, left, seen = live.tokens + got, left - got / each, seen + RIGHT * got
            live.tokens = min(live.length, live.tokens + left * DRAFTED)
        return seen

    def _decode_ahead(self, worker: int, idle: int) -> None:
        work = self.looking.work(worker, 0, idle)
        if work is None:
            return
        most = int((BRIEF - 1) * PASS / PER_ROW)
        line = [self._live(request) for request in work.requests]
        live, found = line[:most], line[:most]
        seconds = 0.0
        waiting = iter(line[most:])
        while live and seconds < TICK:
            seconds += 10 * (PASS + PER_ROW * len(live))  # ten rounds
            for one in live:
                one.tokens = min(one.length, max(one.known, one.tokens) + 10 * DRAFTED)
            ended = sum(one.tokens >= one.length for one in live)
            begun = [one for one, _ in zip(waiting, range(ended), strict=False)]
            live, found = [one for one in live if one.tokens < one.length] + begun, found + begun
        drafts = [self._draft(one) for one in found]
        self.looking.add_slice(worker, drafts)

    def _draft(self, live: Live) -> Ahead:
        tokens = np.zeros(int(max(live.tokens, live.known)), dtype=np.int32)
        return Ahead(live.request.seed, live.request.prompt.token_ids, tokens, 0, len(tokens) >= live.length)


def main() -> None:
    parser = argparse.ArgumentParser(description="How much look-ahead sees as workers are idle more.")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", default="1,2,4,8,16")
    asked = parser.parse_args()
    rows = []
    for workers in map(int, asked.workers.split(",")):
        without, with_it = World(workers, False).run(), World(workers, True).run()
        faster = without["rollout_seconds"] / with_it["rollout_seconds"]
        rows.append({"workers": workers, "without": without, "with": with_it, "faster": faster})
        print(
            f"{workers:2} workers: idle {without['idle_share']:4.0%} of their time without look-ahead; with it "
            f"{with_it['seen_ahead']:4.0%} of tokens seen ahead, rollouts {faster:.2f} times as fast",
            flush=True,
        )
    if asked.json:
        figures = {name: value for name, value in globals().items() if name.isupper()}
        write_json(asked.json, {"rows": rows, "made_up": figures, **provenance()})


if __name__ == "__main__":
    main()
