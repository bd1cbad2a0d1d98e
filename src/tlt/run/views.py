"""Output of `tlt train`: the live display or lines of text, or JSON lines (--json)."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any, TextIO

from rich.console import Console

from tlt.loop import StepResult
from tlt.run.display import Display


def open_view(as_json: bool) -> Display:
    return JsonLines(sys.stdout) if as_json else Display()


class JsonLines(Display):
    """Output as one JSON object per line. The field `event` is `note`, `step`, `evaluation` or `end`."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self._out = out

    def note(self, text: str) -> None:
        self._write("note", {"text": text})

    def step(self, result: StepResult) -> None:
        """Write the metrics of a step, the same as in metrics.jsonl."""
        self._write("step", asdict(result.metrics))

    def evaluation(self, step: int, found: dict[str, float]) -> None:
        self._write("evaluation", {"step": step, **found})

    def end(self, summary: dict[str, Any], folder: str) -> None:
        """Write the summary of the run: summary.json without its lists of values by step."""
        self._write("end", {"folder": folder, **{name: value for name, value in summary.items() if name != "by_step"}})

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        print(json.dumps({"event": event, **facts}), file=self._out, flush=True)
