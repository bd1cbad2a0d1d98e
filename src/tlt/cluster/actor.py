"""Ray actor that runs one `RunWorker` in its own process, with its own CPU cores, network interface and log file."""

from __future__ import annotations

import copy
import faulthandler
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlt.config import Config

log = logging.getLogger(__name__)
_FIRST_WORDS = "here is worker"


class Placement(NamedTuple):
    """Log file, CPU cores and shared folder of a worker's process."""

    log_file: str
    """path of the file that receives all output of the worker's process, including errors"""
    cores: Sequence[int] = ()
    """Indices of the CPU cores that the worker may use. Empty (default) means all cores. It is empty if the run joined
    a Ray cluster."""
    folder: str = ""
    """Folder of the Ray instance that the run started on this machine. Workers meet there to form process groups, so
    they open no port. Empty (default) if the run joined a Ray cluster."""


class Actor:
    """Ray actor that holds a `RunWorker`. The first call builds the worker and raises errors of its constructor."""

    def __init__(self, config: Config, index: int, policy_folder: str, placement: Placement) -> None:
        self._arguments = config, index, policy_folder
        self._placement = placement
        self._worker: Any = None
        _write_to(placement.log_file)
        log.warning("%s %d, process %d", _FIRST_WORDS, index, os.getpid())

    def call(self, method: str, *arguments: Any) -> Any:
        if self._worker is None:
            self._worker = self._build()
        try:
            return getattr(self._worker, method)(*arguments)
        except Exception as error:
            log.exception("%s failed", method)
            raise portable(error) from None

    def process(self) -> int:
        """Return the process id. This method, `interrupt` and `updated` may run while `call` runs."""
        return os.getpid()

    def interrupt(self, number: float) -> None:
        if self._worker is not None:
            self._worker.interrupt(number)

    def updated(self) -> float:
        return self._worker.updated if self._worker is not None else 0.0

    def _build(self) -> Any:
        if self._placement.cores:
            os.sched_setaffinity(0, self._placement.cores)
        import ray

        host = ray.util.get_node_ip_address()
        if interface := interface_of(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        import torch

        from tlt.cluster.run_worker import RunWorker

        if self._placement.cores:
            torch.set_num_threads(len(self._placement.cores))
        meets = Path(self._placement.folder) if self._placement.folder else host
        worker = RunWorker.of_run(*self._arguments, meets=meets)
        gc.collect()
        gc.freeze()  # else a collection during a rollout would scan all loaded objects for 0.25 s
        return worker


def portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a RuntimeError with its type and text. For an error that cannot be
    pickled, Ray would report a lost worker."""
    try:
        copy.deepcopy(error)  # uses the protocol of pickle
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _write_to(path: str) -> None:
    """Redirect all output of this process to this file, including output of libraries and of a crash."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    os.close(file)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    faulthandler.enable()


def interface_of(address: str) -> str | None:
    """Return the name of the network interface that has this address; None if none has it."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.family in (socket.AF_INET, socket.AF_INET6) and one.address == address for one in addresses):
            return name
    return None


def last_log_line(path: str) -> str:
    """Return a clause for error messages: the path of this log file of a worker, and its last line. Return an empty
    string if the worker has logged nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    written = [line.strip() for line in lines if line.strip()]
    return f"{path} ends with: {written[-1][:200]}" if written and _FIRST_WORDS not in written[-1] else ""
