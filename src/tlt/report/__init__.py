"""Writer of report.html, one page about a run. It is made only from the files in the run's folder."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from tlt.files import replace_text

NAME = "report.html"

_log = logging.getLogger(__name__)


class ReportError(ValueError):
    """Error if the page of a run cannot be written. The message names the folder or file and the remedy."""


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page about the run in `folder`, and return its path. By default the path is report.html in that folder.
    Raises ReportError."""
    from tlt.report.page import FILES, page_of, read_run

    if not any((folder / name).exists() for name in FILES):
        raise ReportError(f"{folder} is not the folder of a run: give the run.folder of its recipe")
    path = out or folder / NAME
    text = page_of(read_run(folder))
    try:
        replace_text(path, text)
    except OSError as error:
        raise ReportError(f"{path} cannot be written ({error.strerror}): give another --out") from None
    return path


def write_report_or_warn(folder: Path) -> None:
    """Write report.html of a run. If that fails, log a warning."""
    try:
        write_report(folder)
    except Exception as error:
        _log.warning("report.html was not written (%s: %s); the run is not affected", type(error).__name__, error)


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in RUN")
    parser.set_defaults(command=_report)


def _report(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run the command `tlt report`: write the page and print its path. Raises ValueError for an unknown option."""
    if overrides:
        raise ValueError(f"unknown option {overrides[0]}: see tlt report --help")
    out = write_report(arguments.run, arguments.out)
    print(f"{out}: {out.stat().st_size / 2**10:,.0f} KiB, open it in a browser")
    return 0
