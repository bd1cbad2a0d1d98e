"""What an attack on the look-ahead found; each of these fails until its fault is mended."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from test_journal import SAID, WANT, Stops, config_of, plain
from tiny import tiny_config

from tlt import run as run_module
from tlt.cluster.ahead import Value
from tlt.cluster.worker import Worker
from tlt.display import Display
from tlt.journal import Journal
from tlt.metrics import read_metrics
from tlt.types import RolloutStats


@pytest.mark.xfail(strict=True, raises=ZeroDivisionError, reason="Value.learn: passes without a bonus token")
def test_a_rollout_with_few_passes_beside_the_look_ahead_has_a_value() -> None:
    """Two responses: eight tokens by a look-ahead, the last of them the stop, in one pass; and one token in another."""
    value = Value()
    value.drafted += 8
    value.decoded(10, 1.0)
    value.learn(RolloutStats(tokens=9, row_passes=2, ahead_passes=1, seen_ahead=8), 1.0)
    assert value.saves(1.0, workers=2) >= 0.0


@pytest.mark.xfail(strict=True, reason="Value.learn: a pass of one token is said to give fewer than none")
def test_a_pass_gives_a_token_at_least() -> None:
    value = Value()
    value.learn(RolloutStats(tokens=17, row_passes=3, ahead_passes=2, seen_ahead=16), 1.0)
    assert value.accept_length >= 1.0


@pytest.mark.xfail(strict=True, reason="Journal.add writes behind a torn record, so that all that follow are lost")
def test_what_is_written_behind_a_torn_end_comes_back(tmp_path: Path) -> None:
    """Killed amid a record, gone on with --resume, and killed once more before the next checkpoint."""
    Journal(tmp_path / "journal.bin").add(SAID[0])
    with (tmp_path / "journal.bin").open("ab") as file:
        file.write(b"torn!")
    again = Journal(tmp_path / "journal.bin")
    assert plain(again.read()) == WANT[:1]
    for said in SAID[1:]:
        again.add(said)
    assert plain(again.read()) == WANT


@pytest.mark.xfail(strict=True, reason="the journal is read where there is a checkpoint alone")
def test_a_run_that_was_killed_before_its_first_checkpoint_is_soon_where_it_was(tmp_path: Path) -> None:
    config = config_of(tmp_path, "killed")
    with pytest.raises(KeyboardInterrupt):
        run_module.train(config, False, Stops(at=0))
    assert Journal(Path(config.run.folder) / "journal.bin").read()
    run_module.train(config, True, Display(Console(quiet=True)))
    assert read_metrics(Path(config.run.folder))[0]["rollout"]["seen_ahead"] > 0


@pytest.mark.xfail(strict=True, reason="with run.save_every = 0 nothing clears the journal, and nothing could read it")
def test_the_journal_does_not_grow_with_the_run(tmp_path: Path) -> None:
    sizes: list[int] = []

    class Sizes(Display):
        def step(self, result: object) -> None:
            path = Path(config.run.folder) / "journal.bin"
            sizes.append(path.stat().st_size if path.exists() else 0)

    config = config_of(tmp_path, "never saved")
    config = config.model_copy(update={"run": config.run.model_copy(update={"save_every": 0})})
    run_module.train(config, False, Sizes(Console(quiet=True)))
    assert max(sizes) < 2 * sizes[0] + 1


@pytest.mark.xfail(strict=True, raises=KeyError, reason="Worker.take_state does not tell the drafter's trainer")
def test_a_worker_that_took_the_state_of_another_trains_on_what_it_decodes(tmp_path: Path) -> None:
    """Not only from the next sync on: it gives up training for good."""
    config = tiny_config(tmp_path, speculation={"drafter": "adaptive"}, cluster={"workers": 2})
    old, new = (Worker(config, 1, config.model.path) for _ in range(2))
    old.sync(1)
    new.take_state(old.state())
    assert new.spot_trainer is not None
    assert new.spot_trainer.trainer.heads[new.target.version] is new.target.head
