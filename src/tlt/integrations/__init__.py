"""Integration of tlt into other trainers through their documented extension points."""

from __future__ import annotations

import importlib.metadata
import logging

from tlt_rl import install_hint

log = logging.getLogger(__name__)

Version = tuple[int, int]
"""(major, minor) version"""


class UnsupportedError(ValueError):
    """Error for an option of a trainer that tlt does not support. The message names the option and the remedy."""


def refuse_version(package: str, name: str, tested: tuple[Version, Version]) -> None:
    """Raise UnsupportedError if `package` is missing or older than the first version in `tested`. Log a warning if it
    is newer than the last one. `name` is the package's name in messages."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(f"{name} is not installed: {install_hint(package)}") from None
    first, last = (".".join(map(str, number)) for number in tested)
    found = tuple(int(part) for part in version.split(".")[:2])
    if found < tested[0]:
        raise UnsupportedError(f"{name} {version} is too old, tlt supports {first} to {last}: {install_hint(package)}")
    if found > tested[1]:
        log.warning("%s %s is newer than the tested versions, %s to %s", name, version, first, last)
