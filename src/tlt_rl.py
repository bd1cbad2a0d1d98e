"""The distribution's name, how its extras are installed, and the command `tlt`."""

from __future__ import annotations

import sys

DISTRIBUTION = "tlt-rl"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this distribution."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def main() -> None:
    """Run the command `tlt`."""
    try:
        from tlt.cli import main as command

        command()
    except KeyboardInterrupt:  # during the imports; the command itself ends by sys.exit
        print("tlt: interrupted", file=sys.stderr)
        sys.exit(130)
