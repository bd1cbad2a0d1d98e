"""Views of `tlt train`: live display or plain lines, one last line, or JSON for scripts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console

from tlt.loop import StepResult
from tlt.run.closing import closing
from tlt.run.display import Display


def open_view(quiet: bool, as_json: bool) -> Display:
    if as_json:
        return JsonLines(sys.stdout)
    return OneLine(sys.stdout) if quiet else Display()


class OneLine(Display):
    """Last line of a run only. Errors and warnings go to stderr, as in every view."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self._out = out

    def end(self, summary: dict[str, Any], folder: str) -> None:
        print(f"{closing(summary, folder)[0].plain}; all files are in {folder}", file=self._out, flush=True)


class JsonLines(OneLine):
    """One JSON object per line. `event` is note, step, evaluation or end."""

    def note(self, text: str) -> None:
        self._write("note", {"text": text})

    def step(self, result: StepResult) -> None:
        """Write the same numbers as metrics.jsonl."""
        self._write("step", asdict(result.metrics))

    def evaluation(self, step: int, found: dict[str, float]) -> None:
        self._write("evaluation", {"step": step, **found})

    def end(self, summary: dict[str, Any], folder: str) -> None:
        """Write summary.json without its lists over steps."""
        self._write("end", {"folder": folder, **{name: value for name, value in summary.items() if name != "by_step"}})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **facts}), file=self._out, flush=True)
