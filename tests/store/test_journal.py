"""The journal: what comes back of it, whole or torn, and what a killed run gains by it."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tiny import tiny_config

from tlt.config import Config
from tlt.draft.ahead import Ahead
from tlt.engine.bandit import Bandit
from tlt.loop import StepResult
from tlt.metrics import read_metrics
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.store.journal import Journal
from tlt.types import Prompt, Request, Response, SamplingParams


def response(seed: int, prompt: tuple[int, ...], tokens: list[int]) -> Response:
    request = Request(Prompt(0, "", prompt), 0, 0, seed, SamplingParams())
    return Response(request, tokens, [0.0] * len(tokens), [0.0] * len(tokens), "stop")


SAID = [
    response(2**64 - 1, (1, 2, 3), [4, 5, 2**31 - 1]),
    response(7, (), [9]),
    response(8, (1,), []),
]


def plain(found: list[Ahead]) -> list[tuple[int, tuple[int, ...], list[int], bool]]:
    assert all(ahead.tokens.dtype == np.int32 for ahead in found)
    return [(ahead.seed, ahead.prompt, ahead.tokens.tolist(), ahead.ended) for ahead in found]


WANT = [(r.request.seed, r.request.prompt.token_ids, r.token_ids, True) for r in SAID]


def test_what_was_written_comes_back_and_a_torn_end_is_passed_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.bin", 100)
    assert journal.read() == []
    ends = []
    for said in SAID:
        journal.add(said)
        ends.append(journal.path.stat().st_size)
    data = journal.path.read_bytes()
    for size in range(len(data) + 1):
        journal.path.write_bytes(data[:size])
        assert plain(journal.read()) == WANT[: sum(end <= size for end in ends)]
    journal.clear()
    assert journal.read() == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.bin", 10)
    for seed in range(20):
        journal.add(response(seed, (1,), [seed] * 3))
        seeds = [ahead.seed for ahead in journal.read()]
        assert seeds == list(range(seed + 1))[-len(seeds) :]
        assert 1 <= len(seeds) <= 3


def test_what_is_written_behind_a_torn_end_comes_back(tmp_path: Path) -> None:
    """Killed amid a record, gone on with --resume, and killed once more before the next checkpoint."""
    Journal(tmp_path / "journal.bin", 100).add(SAID[0])
    with (tmp_path / "journal.bin").open("ab") as file:
        file.write(b"torn!")
    again = Journal(tmp_path / "journal.bin", 100)
    assert plain(again.take_up()) == WANT[:1]
    for said in SAID[1:]:
        again.add(said)
    assert plain(again.read()) == WANT


def test_damage_is_never_more_than_a_bad_draft(tmp_path: Path) -> None:
    rng, journal = random.Random(0), Journal(tmp_path / "journal.bin", 100)
    for _ in range(200):
        journal.path.write_bytes(rng.randbytes(rng.randrange(200)))
        assert all(len(ahead.tokens) < 60 for ahead in journal.read())


def test_where_it_cannot_be_written_it_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "no folder" / "journal.bin", 100)
    with caplog.at_level(logging.WARNING):
        journal.add(SAID[0])
        journal.add(SAID[1])
    assert len(caplog.records) == 1


# -- a run -------------------------------------------------------------------------------------------------------------


class Stops(Display):
    """Ends the run as it is about to show a step."""

    def __init__(self, at: int) -> None:
        super().__init__(Console(quiet=True))
        self.at = at

    def step(self, result: StepResult) -> None:
        super().step(result)
        if result.metrics.step == self.at:
            raise KeyboardInterrupt


def config_of(home: Path, folder: str) -> Config:
    sections: dict[str, Any] = {
        "reward": {"name": "tiny_rewards:share_of_low_bytes", "folder": str(Path(__file__).parent.parent)},
        "speculation": {"drafter": "adaptive"},
        "train": {"steps": 5, "learning_rate": 1e-3},
        "run": {"folder": str(home / folder), "seed": 1, "save_every": 2},
    }
    return tiny_config(home, **sections)


def test_a_run_that_was_killed_is_soon_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 3 and 4 were done and not saved: they are done again from the same targets, so all drafts are right."""
    monkeypatch.setattr(Bandit, "free_rows", lambda self, rows: rows)  # as measured, now and then one more is free
    undisturbed = run_module.train(config_of(tmp_path, "undisturbed"), False, Display(Console(quiet=True)))
    config = config_of(tmp_path, "killed")
    with pytest.raises(KeyboardInterrupt):
        run_module.train(config, False, Stops(at=2))
    again = run_module.train(config, True, Display(Console(quiet=True)))
    assert again["policy_sha256"] == undisturbed["policy_sha256"]
    counts = [line["rollout"] for line in read_metrics(Path(config.run.folder))]
    assert [line["ahead_drafted"] > 0 for line in counts] == [False, False, True, False, False]
    assert counts[2]["ahead_drafted"] == counts[2]["seen_ahead"]
    assert Journal(Path(config.run.folder) / "journal.bin", 100).read() == []
