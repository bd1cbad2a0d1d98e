"""The distribution's name, how its extras are installed, and the command `tlt`.

`tlt` on the package index is another project, which installs into the same folder `tlt/`. This module lies outside of
it, so the command can name the remedy even if that project has replaced our files.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "tlt-rl"
_THEIR_MODULE = "models/lvvit.py"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra of this distribution."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def package_in_the_way() -> str:
    """Return a sentence that names the other package and the remedy. It is empty if `tlt/` holds our files alone."""
    spec = find_spec("tlt")
    # without an __init__.py, the other package has been uninstalled and has taken ours with it
    if spec and spec.origin and not (Path(spec.origin).parent / _THEIR_MODULE).exists():
        return ""
    return (
        f"another package, tlt (Token Labeling Toolbox), has written into the folder of {DISTRIBUTION}: "
        f"run pip uninstall -y tlt, then pip install --force-reinstall --no-deps {DISTRIBUTION} (in a clone: "
        "pip install -e .)"
    )


def main() -> None:
    """Run the command `tlt`, if it is ours."""
    if found := package_in_the_way():
        sys.exit(f"tlt: {found}")
    try:
        from tlt.cli import main as command

        command()
    except KeyboardInterrupt:  # amid the imports; the command itself ends by sys.exit
        print("tlt: interrupted", file=sys.stderr)
        sys.exit(130)
