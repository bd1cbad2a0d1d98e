"""`tlt estimate`: run a few steps of a recipe with and without speculation, and extrapolate to the whole run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tlt.commands.options import RECIPE
from tlt.config import Config, ConfigError, load_config
from tlt.files import errors_as
from tlt.gain import NO_GAIN, Gain, gained_little, same_tokens, verdict, why_they_differ
from tlt.metrics import read_metrics
from tlt.progress import loading
from tlt.run.mistakes import refuse_mistakes
from tlt.stopping import Stopped
from tlt.store.hub import from_hub
from tlt.wording import counted

if TYPE_CHECKING:
    from tlt.run.display import Display

_PREFIX = "tlt-estimate-"


def add_estimate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help=RECIPE)
    parser.add_argument("--steps", type=int, default=3, help="number of steps to measure after the first")
    parser.add_argument("--workers", type=int, help="number of workers (cluster.workers)")
    parser.set_defaults(command=_estimate)


def _estimate(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    if arguments.steps < 1:
        raise ConfigError(f"--steps must be a number of at least 1, not {arguments.steps}")
    workers = [] if arguments.workers is None else [f"--cluster.workers={arguments.workers}"]
    config = load_config(arguments.recipe, [*overrides, *workers, "--run.compare_every=1"])
    config = from_hub(_without_extras(config))
    refuse_mistakes(config)
    with loading():
        import_module("tlt.run.train")  # `estimate` needs it
    from rich.console import Console

    from tlt.run.display import Display

    class Measuring(Display):
        def note(self, text: str) -> None:
            """Show a line, unless it names the temporary folder, because that is deleted."""
            if _PREFIX not in text:
                super().note(text)

    console = Console(markup=False, emoji=False)
    for line in estimate(config, arguments.steps, Measuring(console)):
        console.print(line, soft_wrap=True)
    return 0


def estimate(config: Config, steps: int, display: Display) -> list[str]:
    """Train for one step, which includes the start-up, and then for `steps` steps in a temporary folder on the disk of
    run.folder. Return the results as sentences. Nothing is kept. run.compare_every must be 1. Raises the errors of
    `tlt train`."""
    from tlt.run.train import train  # imported after the recipe is checked, because it imports torch

    with _temporary_folder(Path(config.run.folder).absolute()) as folder:
        measured = _without_extras(config)
        changes = {
            "run": measured.run.model_copy(update={"folder": folder, "overwrite": True}),
            "train": config.train.model_copy(update={"steps": steps + 1}),
        }
        try:
            summary = train(measured.model_copy(update=changes), False, display)
            return expected(summary, read_metrics(Path(folder)), config.train.steps)
        except Stopped as stopped:
            raise Stopped("stopped before all steps were measured: nothing is kept", stopped.number) from None
        except (Exception, KeyboardInterrupt) as error:
            # a note says how to continue the run from the temporary folder, which is deleted
            error.__notes__ = [note for note in getattr(error, "__notes__", ()) if folder not in note]
            raise


def _without_extras(config: Config) -> Config:
    """Return the configuration without evaluations, saves and trackers, which are not measured."""
    run = {"save_every": 0, "trackers": [], "on_save": None}
    evaluation = config.eval.model_copy(update={"every": 0, "path": None})
    return config.model_copy(update={"run": config.run.model_copy(update=run), "eval": evaluation})


def _temporary_folder(near: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder in the folder `near` or in the nearest parent of it that exists."""
    place = next(folder for folder in (near, *near.parents) if folder.is_dir())
    with errors_as(ConfigError, f"{place} cannot be written to", "set another --run.folder"):
        return tempfile.TemporaryDirectory(prefix=_PREFIX, dir=place, ignore_cleanup_errors=True)


def expected(summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """Return lines of text about the expected time of `steps` steps. `summary` and `lines` (of metrics.jsonl) are those
    of a run that compared every step with plain decoding. The first step includes the start-up, which is counted once.
    A step's time is the median of the other steps."""
    first, *others = lines
    gain, found = Gain(**summary["gain"]), summary["compared"]
    ours = _median(others, "rollout")
    rest = _median(others, "reward", "update", "sync")
    step, begin = ours + rest, max(0.0, _seconds(first, "rollout", "reward", "update", "sync") - ours - rest)
    header = f"measured on {counted(len(others), 'step')} after the first, {same_tokens(found)}:"
    if not gain.is_trusted:
        return [header, f"  these times cannot be trusted: {gain.fault}"]
    said = [
        header,
        f"  rollout   {ours:.1f} s per step, {_median(others, 'compare'):.1f} s with plain decoding",
        f"  the rest  {rest:.1f} s per step (reward, update, sync)",
        f"  start-up  {begin:.1f} s once",
        verdict(gain),
    ]
    plain = ""
    if gain.times:
        slow = ours * gain.times + rest
        said.append(f"a step takes {step:.1f} s, {slow / step:.2f} times as fast as with plain decoding")
        plain = f", with plain decoding {_time(steps * slow)}"
    said.append(
        f"{counted(steps, 'step')} would take {_time(begin + steps * step)}{plain}; evaluations and saves come on top"
    )
    if found["differ"]:
        said.append(why_they_differ(summary))
    if ours < rest:
        said.append("decoding is less than half of a step, so faster rollouts gain little here")
    if gained_little(gain):
        said.append(NO_GAIN)
    return said


def _seconds(line: Mapping[str, Any], *phases: str) -> float:
    return sum(line["seconds"].get(phase, 0.0) for phase in phases)


def _median(lines: Sequence[Mapping[str, Any]], *phases: str) -> float:
    return median(_seconds(line, *phases) for line in lines)


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
