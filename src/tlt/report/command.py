"""tlt report: write the page of one or several runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run; several are compared")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in RUN, or comparison.html here")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the page. Raises ValueError."""
    if overrides:
        raise ValueError(f"unknown option {overrides[0]}: see tlt report --help")
    from tlt.report import write_report

    out = write_report(arguments.runs, arguments.out)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, open it in a browser")
    return 0
