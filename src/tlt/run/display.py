"""Display of a run: a live panel if the output is a terminal, else one line per step, or JSON lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tlt.config import Config
from tlt.gain import NO_GAIN, Gain, gained_little, same_tokens, verdict, why_they_differ
from tlt.loop import StepResult, Watcher
from tlt.progress import Work, working
from tlt.trace import FACTS, ROLLOUT
from tlt.types import Response, StepMetrics, WorkerNow
from tlt.wording import counted

_SHOWN_STEPS = 10
_OTHER_LINES = 14  # lines of the terminal that the panel needs for everything but the table of steps
_PHASES = ("rollout", "compare", "reward", "update", "sync", "save", "eval", "other")


class Display(Watcher):
    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(markup=False, emoji=False)
        self.history: list[StepMetrics] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.asked_to_stop = ""
        self._live: Live | None = None
        self._work = Work("train", None, "steps")
        self._step_began = time.monotonic()

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, soft_wrap=True)

    def stopping(self, text: str) -> None:
        """Show that a signal asked the run to stop. This is called in a signal handler, which must not use the console,
        so the text is written to the file descriptor of stderr."""
        self.asked_to_stop = text
        if self._live is None:
            with suppress(OSError):  # the terminal may have been closed
                os.write(2, f"tlt: {text}\n".encode())

    @contextmanager
    def live(
        self,
        config: Config,
        first: int,
        workers_now: Callable[[], Sequence[WorkerNow]],
        updated: Callable[[], float] = lambda: 0.0,
    ) -> Iterator[None]:
        """Show the run until the `with` block ends. `first` is the index of the first step. `workers_now` returns the
        state of each worker, and `updated` the finished share of the current update, 0 to 1."""
        self.config, self.workers_now, self.updated = config, workers_now, updated
        self.now = ("starting", first, 0, 0)
        self._step_began = time.monotonic()
        if not self.console.is_terminal:
            with working("train", config.train.steps - first, "steps") as self._work:
                self._work.left = self._time_left
                yield
            return
        with Live(self, console=self.console, refresh_per_second=4) as self._live:
            yield
        self._live = None

    # -- events (the loop's Watcher) -----------------------------------------------------------------------------------

    def phase(self, step: int, name: str, total: int) -> None:
        self.now = (name, step, 0, total)
        self._work.note = f"{name} 0/{total}" if total and name != "update" else name

    def response(self, response: Response) -> None:
        name, step, done, total = self.now
        self.now = (name, step, done + 1, total)
        self._work.note = f"{name} {done + 1}/{total}"

    def step(self, result: StepResult) -> None:
        self.history.append(result.metrics)
        self._step_began = time.monotonic()
        self._work.advance()
        if self._live is None:
            self.console.print(self._line(result.metrics), highlight=False, soft_wrap=True)

    def evaluation(self, step: int, found: dict[str, float]) -> None:
        """Show the metrics of an evaluation on held-out prompts after `step` steps."""
        self.evaluations.append((step, found))
        if self._live is None:
            self.console.print(self._held_out(), highlight=False, soft_wrap=True)

    def end(self, summary: dict[str, Any], folder: str) -> None:
        """Print the summary of a run that has ended. `folder` is the run's folder."""
        for line in closing(summary, folder):
            self.console.print(line, soft_wrap=True)

    # -- pictures -----------------------------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        name, step, done, total = self.now
        steps, length = self.config.train.steps, 40 if self.console.width >= 80 else 20
        share = self.updated() if name == "update" else done / max(1, total)
        counted = f"{done}/{total}" if total and name != "update" else ""
        head = Table.grid(padding=(0, 1))
        head.add_row("step", f"{step + 1}/{steps}", ProgressBar(steps, step, width=length), self._time_left())
        head.add_row(name, counted, ProgressBar(1.0, min(1.0, share), width=length), "")
        parts: list[RenderableType] = [head, self._workers(step)]
        if self.asked_to_stop:
            parts.insert(0, Text(self.asked_to_stop, "bold yellow"))
        if self.history:
            parts += [self._table(), *(Text(alarm, "bold red") for alarm in _alarms(self.history[-1]))]
        if self.evaluations:
            parts.append(Text(self._held_out()))
        folder = Text(self.config.run.folder)
        return Panel(Group(*parts), title="tlt", title_align="left", subtitle=folder, subtitle_align="right")

    def _workers(self, step: int) -> Table:
        """Return the table of the workers. Its last column shows for which future steps a worker decodes look-ahead
        drafts."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("worker", justify="right")
        table.add_column("state", width=len(ROLLOUT))
        for column in ("rows", "longest"):
            table.add_column(column, justify="right")
        table.add_column("steps ahead", no_wrap=True)
        for index, worker in enumerate(self.workers_now()):
            rows, longest = str(len(worker.live) or ""), str(max(worker.live, default=""))
            ahead = ", ".join(str(step + 1 + offset) for offset in worker.ahead)
            table.add_row(str(index), Text(worker.state, FACTS[worker.state].colour), rows, longest, ahead)
        return table

    def _held_out(self) -> str:
        step, found = self.evaluations[-1]
        return f"held out, after step {step}  {held_out_line(found)}"

    def _time_left(self) -> str:
        """Return text with the estimated remaining time of the run. While a step runs, the estimate falls by at most
        the expected duration of a step."""
        if not self.history:
            return ""
        last = self.history[-1]
        steps = self.config.train.steps - last.step
        gone = min(time.monotonic() - self._step_began, last.seconds_left / max(1, steps))
        return f"{timedelta(seconds=round(last.seconds_left - gone))} left"

    def _table(self) -> Table:
        """Return the table with the metrics of the last steps. It is at most 74 characters wide."""
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        columns = ("step", "reward", "median", "longest", "cut off", "tokens/s", "accept length", "look ahead")
        for column in (*columns, "mismatch", "seconds"):
            table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
        shown = max(3, min(_SHOWN_STEPS, self.console.height - _OTHER_LINES))
        for m in self.history[-shown:]:
            table.add_row(
                str(m.step),
                f"{m.reward:.3f}",
                *(f"{m.lengths[key]:.0f}" for key in ("median", "max")),
                f"{m.lengths['truncated']:.0%}",
                f"{m.tokens_per_second:,.0f}",
                f"{m.accept_length:.2f}",
                f"{_seen_ahead(m):.0%}",
                f"{m.update['mismatch_mean']:.1e}",
                f"{m.seconds['total']:.1f}",
            )
        return table

    def _line(self, m: StepMetrics) -> str:
        spent = ", ".join(f"{name} {m.seconds[name]:.1f}" for name in _PHASES if m.seconds.get(name, 0.0) >= 0.05)
        missing = ", ".join(f"{count} {outcome}" for outcome, count in m.outcomes.items())
        return (
            f"step {m.step}/{self.config.train.steps}  reward {m.reward:.3f}  "
            f"{f'without reward: {missing}  ' if missing else ''}"
            f"length {m.lengths['median']:.0f} median {m.lengths['max']:.0f} longest "
            f"{m.lengths['truncated']:.0%} cut off  "
            f"{m.tokens_per_second:,.0f} tokens/s  accept length {m.accept_length:.2f}  "
            f"{_from_look_ahead(m)}{_version(m)}"
            f"{m.seconds['total']:.1f} s ({spent})  {self._time_left()}" + "".join(f"\n{line}" for line in _alarms(m))
        )


def held_out_line(found: dict[str, float]) -> str:
    """Return text with the metrics of an evaluation."""
    shares = [f"{name} {value:.3f}" for name, value in found.items() if "@" in name]
    if "half_width" in found:
        shares[0] += f" \N{PLUS-MINUS SIGN} {found['half_width']:.3f}"
    missing = [f"without reward: {found['without_reward']:.0f}"] * bool(found["without_reward"])
    return "  ".join(
        [*shares, *missing, f"length {found['length_mean']:.0f} mean", f"{found['truncated']:.0%} cut off"]
    )


def _version(m: StepMetrics) -> str:
    """Return text with the version of the learned drafter; empty if training has not replaced the first one."""
    version = m.rollout["spot"].get("version")
    return f"drafter {version:.0f}  " if version else ""


def _from_look_ahead(m: StepMetrics) -> str:
    """Return text with the share of a step's tokens from look-ahead; empty if it is 0 %."""
    share = f"{_seen_ahead(m):.0%}"
    return "" if share == "0%" else f"{share} of tokens from look-ahead  "


def _seen_ahead(m: StepMetrics) -> float:
    """Return the share of a step's tokens that are accepted draft tokens of look-ahead."""
    return m.rollout["seen_ahead"] / max(1, m.tokens)


def _alarms(m: StepMetrics) -> list[str]:
    alarms: dict[str, float] = m.rollout["alarms"]
    return [
        f"the acceptance rate of the {name} drafter fell to {now:.0%}, less than half of its first rate: tokens stay "
        "correct, but speculation is slow; train the drafter again"
        for name, now in alarms.items()
    ]


# -- the last lines of a run -------------------------------------------------------------------------------------------


def closing(summary: dict[str, Any], folder: str) -> list[Text]:
    """Return the lines that are printed at the end of a run. `summary` is the content of summary.json."""
    missing = summary["without_reward"]
    lines = [
        Text(
            f"{counted(summary['steps'], 'step')}: mean reward {_first_and_last(summary)}; "
            f"{summary['seconds']['total']:.0f} s, {summary['tokens_per_second']:,.0f} tokens/s, "
            f"accept length {summary['accept_length']:.2f}, "
            f"{summary['useful_share']:.0%} of the workers' time useful"
        )
    ]
    if summary["gain"]:
        gain = Gain(**summary["gain"])
        lines.append(Text(f"{verdict(gain)}; {same_tokens(summary['compared'])}"))
        if summary["compared"]["differ"]:
            lines.append(Text(why_they_differ(summary)))
        if gained_little(gain):
            lines.append(Text(NO_GAIN))
    if missing:
        share = sum(missing.values()) / summary["responses"]
        named = ", ".join(f"{count:,} {outcome}" for outcome, count in missing.items())
        responses = counted(summary["responses"], "response")
        line = f"{share:.1%} of {responses} had no reward ({named}): see the errors above"
        lines.append(Text(line, "bold red"))
    return [*lines, Text(f"all files are in {folder}: summary.json, metrics.jsonl, completions, checkpoints")]


def _first_and_last(summary: dict[str, Any]) -> str:
    """Return text with the mean rewards of the first and the last steps, and the number of these steps."""
    first, last, steps = (summary[f"reward_{name}"] for name in ("first", "last", "steps"))
    some = "step" if steps == 1 else f"{steps} steps"
    return f"{first:.3f} in the first {some}, {last:.3f} in the last{'' if steps == 1 else f' {steps}'}"
