"""Tests runs on two nodes of one machine: two network namespaces with a cable between them, and a Ray node in each.

    python bench/two_nodes.py [--steps 60] [--json FILE]

A run must end with the sha256 of one on a single node, whatever happens to the second node: it is lost and comes back,
it is behind a slow link, its worker is stopped, its cable is pulled amid a rollout and amid an update. A node without
the model must be named before the first step. Else the exit status is 1. The test needs root, ip and tc; without them
it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disturbed import end_in_order
from recovery import write_recipe

_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_PORT = 6399
_SLOW = ("tbf", "rate", "8mbit", "burst", "32kbit", "latency", "400ms")
_READY = 60.0  # seconds for a node to come up
_LIMIT = 240.0  # seconds for a run to end
_TELLS = """
import sys
from tlt import cli
from tlt.run.display import Display

def phase(self, step, name, total, real=Display.phase):
    print(f"phase {step} {name}", flush=True)
    real(self, step, name, total)

Display.phase = phase
cli.main(sys.argv[1:])
"""
"""a program that runs tlt and prints a line at the beginning of every phase"""


def can_be_made() -> bool:
    """Whether this user may make network namespaces here."""
    if not shutil.which("ip") or not shutil.which("tc"):
        return False
    name = f"tlt_try_{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made


@dataclass
class Nodes:
    """Two nodes in network namespaces; node 0 is Ray's head."""

    home: Path
    names: tuple[str, str] = (f"tlt_a_{os.getpid()}", f"tlt_b_{os.getpid()}")
    token: str = field(default_factory=lambda: secrets.token_hex(32))

    def make(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        ends = [f"v{index}t{os.getpid() % 100000}" for index in (0, 1)]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, _ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "link", "set", end, "name", "cable", "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")

    def start(self, node: int, *before: str) -> None:
        """Start Ray on a node, with one CPU. `before`: a command that Ray's command is given to."""
        address = _ADDRESSES[node]
        joins = ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={self.home / 'ray'}"]
        joins = [f"--address={_ADDRESSES[0]}:{_PORT}"] if node else joins
        ray = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            f"--node-ip-address={address}",
            "--num-cpus=1",
            *joins,
        ]
        until = time.monotonic() + _READY
        while True:
            started = self.run(node, [*before, *ray, "--disable-usage-stats", "--object-store-memory=100000000"])
            if started.returncode == 0:
                return
            if time.monotonic() > until:
                raise RuntimeError(f"node {node} does not start: {started.stderr[-1000:]}")
            time.sleep(1.0)

    def run(self, node: int, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._inside(node, command), env=self.environment, capture_output=True, text=True, check=False
        )

    def popen(self, node: int, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(self._inside(node, command), env=self.environment, stdout=file, stderr=file)

    def _inside(self, node: int, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.names[node], *command]

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
        }

    def kill(self, node: int) -> None:
        """Kill all processes of a node, as if its power were cut."""
        while pids := _ip("netns", "pids", self.names[node]).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.1)

    def stop(self, node: int) -> None:
        """Stop the worker of a node, as if it hung."""
        for pid in _ip("netns", "pids", self.names[node]).split():
            with suppress(OSError):
                if b"ray::Actor" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(int(pid), signal.SIGSTOP)

    def link(self, state: str) -> None:
        _ip("-n", self.names[1], "link", "set", "cable", state)

    def slow(self) -> None:
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "cable", "root", *_SLOW], check=True, text=True)

    def fast(self) -> None:
        for name in self.names:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", "cable", "root"], check=True)

    def bytes(self) -> int:
        """Number of bytes that have gone over the cable, both ways."""
        (found,) = json.loads(_ip("-n", self.names[0], "-s", "-j", "link", "show", "cable"))
        return found["stats64"]["rx"]["bytes"] + found["stats64"]["tx"]["bytes"]

    def end(self) -> None:
        for node, name in enumerate(self.names):
            with suppress(subprocess.CalledProcessError):
                self.kill(node)
                _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextmanager
def nodes() -> Iterator[Nodes]:
    with tempfile.TemporaryDirectory(prefix="t2", dir="/tmp") as folder:
        made = Nodes(Path(folder))
        try:
            made.make()
            yield made
        finally:
            made.end()


@dataclass
class Trial:
    """A run on both nodes, and what happens when it comes to given phases of given steps."""

    nodes: Nodes
    recipe: Path
    name: str
    events: dict[tuple[int, str], Callable[[], None]] = field(default_factory=dict)
    """what to do, by step and phase"""
    options: tuple[str, ...] = ()

    def run(self) -> dict[str, Any]:
        folder = self.nodes.home / self.name
        command = [sys.executable, "-c", _TELLS, "train", str(self.recipe), "--run.folder", str(folder)]
        command += ["--cluster.address", f"{_ADDRESSES[0]}:{_PORT}", *self.options]
        before, log = self.nodes.bytes(), self.nodes.home / f"{self.name}.log"
        process = self.nodes.popen(0, command, log)
        until, due = time.monotonic() + _LIMIT, sorted(self.events)
        while process.poll() is None:
            if due and _has_come_to(*due[0], log):
                self.events[due.pop(0)]()
            if time.monotonic() > until:
                process.kill()
                process.wait()
            time.sleep(0.02)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if line.strip() and not line.startswith("phase ")]
        told = [line for line in said if "worker 1" in line]
        if process.returncode:
            return {"name": self.name, "exit": process.returncode, "said": (said or [""])[-1], "told": told}
        moved = {"bytes": self.nodes.bytes() - before, "events_left": len(due), "told": told}
        return facts_of(self.name, folder) | moved


def _has_come_to(step: int, phase: str, log: Path) -> bool:
    """Whether the run has come to this phase of this step, or is past it."""
    lines = [line.split() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    seen = [(int(words[1]), words[2]) for words in lines if len(words) == 3 and words[0] == "phase"]
    return bool(seen) and (seen[-1][0] > step or (step, phase) in seen)


def facts_of(name: str, folder: Path) -> dict[str, Any]:
    """Facts of a finished run: seconds of the median and of the longest step, in the later two thirds of its steps, and
    of the median update."""
    from tlt.metrics import read_metrics

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    lines = read_metrics(folder)
    totals = sorted(line["seconds"]["total"] for line in lines[len(lines) // 3 :])
    absent = [line["step"] for line in lines if any(worker["ABSENT"] > 0 for worker in line["workers"])]
    return {
        "name": name,
        "exit": 0,
        "sha256": summary["policy_sha256"],
        "steps": len(lines),
        "seconds_a_step": round(totals[len(totals) // 2], 3),
        "longest_step": round(totals[-1], 3),
        "update_seconds": round(sorted(line["seconds"]["update"] for line in lines)[len(lines) // 2], 3),
        "steps_with_one_worker": absent,
    }


def alone(recipe: Path, home: Path) -> dict[str, Any]:
    """A run with both workers on this machine, without namespaces."""
    folder = home / "alone"
    command = [sys.executable, "-m", "tlt", "train", str(recipe), "--run.folder", str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return facts_of("one node", folder)


def recipe_of(home: Path, steps: int) -> Path:
    return write_recipe(
        home,
        rollout={"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 64},
        train={"steps": steps, "learning_rate": 1e-3, "micro_batch_tokens": 256},
        cluster={"workers": 2, "slice_seconds": 0.02, "grace": 2.0, "patience": 20.0},
        speculation={"drafter": "suffix"},
    )


def trials(nodes: Nodes, steps: int) -> Iterator[dict[str, Any]]:
    recipe = recipe_of(nodes.home, steps)
    yield alone(recipe, nodes.home)
    nodes.start(0)
    nodes.start(1)
    yield Trial(nodes, recipe, "two nodes").run()
    third, half = (steps // 3, "rollout"), (steps // 2, "rollout")
    lost = {third: lambda: nodes.kill(1), half: lambda: nodes.start(1)}
    yield Trial(nodes, recipe, "a node lost and come back", lost).run()
    yield Trial(nodes, recipe, "a worker stopped", {third: lambda: nodes.stop(1)}).run()
    nodes.slow()
    yield Trial(nodes, recipe, f"a slow link of {_SLOW[2]}").run()
    nodes.fast()
    for phase in ("rollout", "update"):
        cut = {(steps // 3, phase): lambda: nodes.link("down")}
        yield Trial(nodes, recipe, f"a cable pulled amid {'an' if phase == 'update' else 'a'} {phase}", cut).run()
        nodes.kill(1)
        nodes.link("up")
        nodes.start(1)
    nodes.kill(1)
    nodes.start(1, "unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{_model_of(recipe)}" && exec "$@"', "sh")
    patient = ("--cluster.grace", "60")  # else the run may go on without it before it can say what it lacks
    yield Trial(nodes, recipe, "a node without the model", options=patient).run()


def faults_of(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each trial that did not end as it should."""
    expected, without_model = rows[0]["sha256"], rows[-1]
    found = [f"{row['name']} ended otherwise" for row in rows[:-1] if row.get("sha256") != expected]
    if without_model["exit"] != 2 or "model" not in without_model["said"]:
        found.append("a node without the model is not named")
    return found


def _model_of(recipe: Path) -> str:
    from tlt.config import load_config

    return str(load_config(recipe).model.path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    end_in_order()
    if not can_be_made():
        print("network namespaces cannot be made here: it takes root, ip and tc")
        return
    rows = []
    with nodes() as made:
        for row in trials(made, arguments.steps):
            rows.append(row)
            print(row, flush=True)
    if arguments.json:
        from tlt.metrics import provenance, write_json

        write_json(arguments.json, {"trials": rows, **provenance()})
    if faults := faults_of(rows):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
