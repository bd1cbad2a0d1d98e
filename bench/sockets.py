"""What can be reached of a run with two workers: the sockets its processes listen on, gathered while it lasts.

    python bench/sockets.py [--code FOLDER] [--json FILE]

`--code` is another checkout of this project, whose run is looked at instead. A socket counts as private where its
address is a loopback's; Unix sockets and folders are private where only their owner can open them, or where a folder
above them keeps others out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil

from tlt.metrics import provenance, write_json

_MARK = "TLT_BENCH_SOCKETS"
_WRITES = """
import pathlib, sys
import recovery
recovery.write_recipe(pathlib.Path(sys.argv[1]), cluster={"workers": 2}, train={"steps": 20})
"""


def processes() -> Iterator[psutil.Process]:
    """Those that have inherited the mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if _MARK in process.environ():
                yield process


def name_of(process: psutil.Process) -> str:
    words = " ".join(process.cmdline()[:4])
    names = {"ray::": "worker", "gcs_server": "Ray's control process", "raylet": "raylet", "-m tlt": "driver"}
    return next((name for word, name in names.items() if word in words), process.name())


def is_private(path: str) -> bool:
    """Whether nobody but its owner and root gets there."""
    there = Path(path)
    return any(not folder.stat().st_mode & 0o001 for folder in there.parents) or not there.stat().st_mode & 0o002


def heard(process: psutil.Process) -> Iterator[tuple[str, str]]:
    """What it listens on, and whom it can be reached by."""
    for socket in process.net_connections(kind="inet"):
        if socket.status == psutil.CONN_LISTEN:
            address = ip_address(socket.laddr.ip.removeprefix("::ffff:"))
            yield f"{address}:{socket.laddr.port}", "this machine" if address.is_loopback else "the network"
    for socket in process.net_connections(kind="unix"):
        if isinstance(socket.laddr, str) and socket.laddr.startswith("/"):
            with suppress(OSError):
                yield socket.laddr, "this user" if is_private(socket.laddr) else "all users"


def run(code: Path, home: Path) -> dict[str, dict[str, int]]:
    """By process, how many of its sockets can be reached by whom."""
    folders = [str(code / "src"), str(code / "bench"), str(code / "tests")]
    environment = os.environ | {_MARK: "1", "PYTHONPATH": os.pathsep.join(folders)}
    subprocess.run([sys.executable, "-c", _WRITES, str(home)], env=environment, check=True)
    command = [sys.executable, "-m", "tlt", "train", str(home / "recipe.toml")]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    found: set[tuple[str, str, str]] = set()
    while driver.poll() is None:
        for process in processes():
            with suppress(psutil.Error):
                found |= {(name_of(process), *socket) for socket in heard(process)}
        time.sleep(0.2)
    if driver.returncode:
        raise SystemExit(driver.returncode)
    rows: dict[str, Counter[str]] = {}
    for name, _, whom in sorted(found):
        rows.setdefault(name, Counter())[whom] += 1
    return {name: dict(counts) for name, counts in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        rows = run(arguments.code.resolve(), Path(home))
    for name, counts in rows.items():
        print(f"{name:>24}  " + ", ".join(f"{count} to {whom}" for whom, count in counts.items()))
    if arguments.json:
        commit = subprocess.check_output(["git", "-C", arguments.code, "rev-parse", "--short", "HEAD"], text=True)
        result: dict[str, Any] = {"code": commit.strip(), "sockets": rows, **provenance()}
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
