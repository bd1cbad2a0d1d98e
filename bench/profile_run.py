"""One training run of bench/simulate.py, in a process of its own: python bench/profile_run.py CONFIG FORESEES

A run with one worker records its decoding rounds in `rounds.json` of its folder, as [rows, seconds, tokens] by kind
(`own`, `plain`). With FORESEES = 1, each step is also decoded one update earlier, by plain decoding. These responses
are the look-ahead drafts of the step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from tlt.cluster.pool import local_worker
from tlt.cluster.remote import ClusterRollout
from tlt.config import parse_config
from tlt.draft.ahead import Ahead
from tlt.engine.tuner import RoundResult
from tlt.loop import Rollout
from tlt.metrics import write_json
from tlt.run.display import Display
from tlt.run.train import train
from tlt.types import Request, Response, RolloutStats

SKIPPED = 2
"""number of first steps that are not recorded, because they include the start-up"""
Rounds = list[tuple[int, float, int]]


class Recording:
    """Tuner that records each round as (rows, seconds, tokens) and leaves all decisions to another tuner."""

    def __init__(self, tuner: Any) -> None:
        self._tuner, self.rounds = tuner, Rounds()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tuner, name)

    def record(self, result: RoundResult) -> None:
        self.rounds.append((len(result.tokens), result.seconds, sum(result.tokens)))
        self._tuner.record(result)


class Recorded(ClusterRollout):
    """Rollout of one worker whose rounds are recorded."""

    def __init__(self, rollout: ClusterRollout, foresees: bool) -> None:
        super().__init__(rollout.coordinator)
        self.worker, self.foresees, self.done = local_worker(self.supervisor.pool), foresees, 0
        self.own, self.plain = Recording(self.worker.engine.tuner), Recording(self.worker.plain.tuner)
        self.worker.engine.tuner, self.worker.plain.tuner = self.own, self.plain

    def generate(
        self,
        requests: Sequence[Request],
        on_response: Callable[[Response], None],
        coming: Iterable[list[Request]] = (),
    ) -> tuple[list[Response], RolloutStats]:
        found = super().generate(requests, on_response)
        self.done += 1
        if self.done == SKIPPED:
            self.own.rounds, self.plain.rounds = [], []
        if self.foresees and (following := next(iter(coming), None)):
            version = self.worker.target.version
            drafts = [Ahead.of(r, version, True) for r in self.generate_plain(following, lambda response: None)]
            self.coordinator.idle.ahead.store.put(drafts)
        return found


def main(config_file: str, foresees: str) -> None:
    config = parse_config(json.loads(Path(config_file).read_text(encoding="utf-8")), config_file)
    made: list[Recorded] = []

    def wrap(rollout: Rollout) -> Rollout:
        made.append(Recorded(cast(ClusterRollout, rollout), foresees == "1"))
        return made[0]

    train(config, display=Display(Console(quiet=True)), wrap=wrap if config.cluster.workers == 1 else None)
    for one in made:
        write_json(Path(config.run.folder) / "rounds.json", {"own": one.own.rounds, "plain": one.plain.rounds})


if __name__ == "__main__":
    main(*sys.argv[1:])
