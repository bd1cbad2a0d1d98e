"""Pool of workers on Ray: one actor (`actor.py`) for each worker, with its own CPU cores or its own device.

Without `cluster.address`, the run starts its own Ray on this machine. Only this user can open the folder of that Ray.
Ray listens on loopback and ends with the run. `sweeper` ends it even if the driver is killed.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from tlt.cluster.actor import Actor, Placement, last_log_line
from tlt.cluster.pool import ClusterError, Handle, WorkerLost, refuse_no_ray
from tlt.cluster.sweeper import MARK
from tlt.config import Config, ConfigError
from tlt.files import first_line
from tlt.stopping import GivenUp

T = TypeVar("T")
_WAIT = 0.2  # seconds


class HelperThread:
    """Thread in which Ray starts and ends. The main thread waits for it, so a signal reaches the run's handlers at
    once, and Ray does not replace them. Ray's processes end with the thread that started them, so this thread must live
    until Ray has ended. If the process ends earlier, it does not wait for this thread."""

    def __init__(self) -> None:
        self._calls = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while call := self._calls.get():
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call the function in the thread and return its result. If a signal handler raises, the call continues, and
        the next call begins after it."""
        future: Future[T] = Future()
        self._calls.put((future, function, arguments))
        while not wait([future], _WAIT).done:  # a signal that comes just before a wait does not end it
            pass
        return future.result()

    def end(self) -> None:
        self._calls.put(None)


@contextmanager
def unwrap_given_up() -> Iterator[None]:
    """Raise `GivenUp`, which ends the run after a signal, instead of a SystemError that it caused in the block. If a
    signal handler raises `GivenUp` while Ray waits, Ray raises a SystemError in its place."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, GivenUp):
            raise error.__cause__ from None
        raise


ALLOW_NO_TOKEN = "TLT_ALLOW_NO_TOKEN"
"""environment variable that is set to join a Ray cluster without authentication, on a private network"""
_EVERY = 5.0  # seconds between two checks
_MISSES = 3  # failed checks in a row after which Ray counts as lost; a busy cluster may miss one or two
_ANSWERS = 3.0  # timeout in seconds of one check
_REACHED_WITHIN = 10.0  # timeout in seconds for a connection to a cluster
_TOKEN_TIMEOUT = 120.0  # timeout in seconds for the process of `accepts_no_token`
_ASKS = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def refuse_unreachable(address: str) -> None:
    """Raise ClusterError if nothing answers at an address host:port. Ray checks other forms of an address."""
    if "/" in address or not address.rpartition(":")[2].isdigit():
        return
    try:
        socket.create_connection(_host_and_port(address), _REACHED_WITHIN).close()
    except OSError as error:
        raise ClusterError(f"cannot join a Ray cluster at {address} ({error}): check cluster.address") from None


def allows_no_token() -> bool:
    return bool(os.environ.get(ALLOW_NO_TOKEN))


def accepts_no_token(address: str) -> bool:
    """Return whether the cluster accepts a client without an authentication token. The client is a separate process,
    because Ray reads the token at import. Raises ClusterError if this cannot be determined."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    asked = [sys.executable, "-c", _ASKS, address]
    env = own | {"RAY_AUTH_MODE": "disabled"}
    try:
        done = subprocess.run(asked, env=env, capture_output=True, text=True, timeout=_TOKEN_TIMEOUT)
    except subprocess.TimeoutExpired:
        answer = f"no answer in {_TOKEN_TIMEOUT:g} s"
    else:
        if done.returncode == 0 or "AuthenticationError" in done.stderr:
            return done.returncode == 0
        answer = (done.stderr.strip().splitlines() or ["no output"])[-1]
    raise ClusterError(
        f"cannot determine whether the Ray cluster at {address} requires a token ({answer}): set "
        f"{ALLOW_NO_TOKEN}=1 if nobody else can reach it"
    )


class Control:
    """Monitor of Ray's control process at `address` (host:port).

    If the control process ends, workers still answer for about a minute. Then Ray ends the workers and the driver.
    Regular checks find the loss earlier, so there is time to save a checkpoint.
    """

    def __init__(self, address: str) -> None:
        self._at, self._address = _host_and_port(address), address
        self._next, self._missed = time.monotonic() + _EVERY, 0

    def check(self) -> None:
        """Check whether the control process accepts connections, at most every 5 s. After 3 failed checks in a row,
        raise ClusterError. The error is raised only once, so that the run can then save a checkpoint."""
        if time.monotonic() < self._next or self._missed >= _MISSES:
            return
        try:
            socket.create_connection(self._at, timeout=_ANSWERS).close()
            self._missed = 0
        except OSError:
            self._missed += 1
        self._next = time.monotonic() + _EVERY
        if self._missed == _MISSES:
            raise ClusterError(f"Ray's control process at {self._address} does not answer: restart the Ray cluster")


_STORE_BYTES = 128 * 2**20
_CONCURRENT = "concurrent"  # Ray's concurrency group for calls that run while another call runs
_LONGEST_FOLDER = 40  # characters, because Ray's sockets are below it and the system limits their paths to 107


class RayPool:
    is_concurrent = True

    def __init__(self, config: Config, folder: str | Path) -> None:
        """Start Ray, or join a cluster. `folder`: folder of the policy that the workers start from. Each worker is
        built by its first call. Raises ConfigError or ClusterError."""
        self.size = config.cluster.workers
        self._config = config
        self._sweeper: subprocess.Popen[bytes] | None = None
        self.folder = ""
        """folder of the run's own Ray; empty if the run joined a cluster"""
        self._helper = HelperThread()
        self._ray = self._helper.call(_import_ray, config.cluster.address is None)
        _keep_off_the_screen(self._ray, Path(config.run.folder) / "ray.log")
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the driver computes little, and a second thread would take a core from the workers
        try:
            if config.cluster.address:
                self._helper.call(self._join, config.cluster.address)
            else:
                self._helper.call(self._start)
            self._is_updating = False
            self._control = Control(self._ray.get_runtime_context().gcs_address)
            self._gpus = _gpus_of_worker(config, self._ray.cluster_resources())
            self._actors = [self._actor(index, str(Path(folder).resolve())) for index in range(self.size)]
            self._processes = [self._process(index) for index in range(self.size)]
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self.folder = _short_folder()
        rays = Path(folder) / "ray"  # Ray opens its folder to all users, but the one above is closed to others
        rays.mkdir()
        command = [sys.executable, "-m", "tlt.cluster.sweeper", str(os.getpid()), folder]
        self._sweeper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ[MARK] = folder
        try:
            self._ray.init(
                address="local",
                num_cpus=self.size,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                _temp_dir=str(rays),
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
                logging_level="ERROR",
            )
        except Exception as error:  # Ray has no narrower type for this
            raise ClusterError(
                f"Ray cannot start on this machine ({first_line(error)}): start again when the machine is less busy, "
                "or set cluster.workers = 1"
            ) from error
        finally:
            os.environ.pop(MARK)

    def _join(self, address: str) -> None:
        refuse_unreachable(address)  # else Ray tries for many minutes without a message
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ClusterError(
                f"cannot join a Ray cluster at {address} ({first_line(error)}): check cluster.address"
            ) from None
        if not allows_no_token() and accepts_no_token(self._ray.get_runtime_context().gcs_address):
            raise ConfigError(
                f"the Ray cluster at {address} requires no token, so anybody who reaches it can run code on its nodes: "
                f"start it with RAY_AUTH_MODE=token, or set {ALLOW_NO_TOKEN}=1 if nobody else can reach it"
            )

    def _actor(self, index: int, policy_folder: str) -> Any:
        cores = share_of_cores(index, self.size) if self.folder else ()
        placement = Placement(self._log_file(index), cores, self.folder)
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0}
        # calls are many and short, so recording them took a tenth of the CPU time
        actor = self._ray.remote(**options, enable_task_events=False, concurrency_groups={_CONCURRENT: 1})(Actor)
        return actor.remote(self._config, index, policy_folder, placement)

    def _log_file(self, index: int) -> str:
        return str(Path(self._config.run.folder).resolve() / f"worker_{index}.log")

    # -- the protocol --------------------------------------------------------------------------------------------------

    def submit(self, index: int, method: str, *arguments: Any) -> Handle:
        self._is_updating = method == "update"
        return self._actors[index].call.remote(method, *arguments)

    def interrupt(self, index: int, number: float) -> None:
        self._actors[index].interrupt.options(concurrency_group=_CONCURRENT).remote(number)

    def updated(self, index: int, seconds: float) -> float | None:
        handle = self._actors[index].updated.options(concurrency_group=_CONCURRENT).remote()
        try:
            with unwrap_given_up():
                return self._ray.get(handle, timeout=seconds)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def put(self, value: Any) -> Handle:
        return self._ray.put(value)

    def wait(self, handles: Collection[Handle], timeout: float | None = None) -> list[Handle]:
        if not self._is_updating:  # an update may still complete before Ray ends the workers, and then be saved
            self._control.check()
        waiting = list(handles)
        with unwrap_given_up():
            done, rest = self._ray.wait(waiting, num_returns=1, timeout=timeout)
        if done and rest:
            done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return done

    def result(self, handle: Handle) -> Any:
        errors = self._ray.exceptions
        try:
            with unwrap_given_up():
                return self._ray.get(handle)
        except errors.RayTaskError as error:
            if isinstance(error.cause, errors.RayError):
                raise WorkerLost(_why(error.cause)) from error
            raise error.cause from None
        except errors.RayError as error:
            raise WorkerLost(_why(error)) from error

    def replace(self, index: int) -> None:
        self._kill(index)
        # the checkpoint that the run resumed from may be deleted by now: the new worker starts from the recipe's model
        self._actors[index] = self._actor(index, self._config.model.path)
        self._processes[index] = self._process(index)

    def _process(self, index: int) -> Handle:
        return self._actors[index].process.options(concurrency_group=_CONCURRENT).remote()

    def _kill(self, index: int) -> None:
        """Kill a worker. If the run started its own Ray, also kill the process at once. Ray asks a worker to end first,
        so a hanging worker would keep its connections for some seconds, while other members of its group wait."""
        self._ray.kill(self._actors[index], no_restart=True)
        process = self._processes[index]
        if self.folder and self._ray.wait([process], timeout=0)[0]:
            with suppress(self._ray.exceptions.RayError, ProcessLookupError), unwrap_given_up():
                os.kill(self._ray.get(process), signal.SIGKILL)

    def has_begun(self, index: int) -> bool:
        return bool(self._ray.wait([self._processes[index]], timeout=0)[0])

    def capacity(self) -> str:
        there = self._ray.cluster_resources()
        return f"the workers need {self.size} CPUs and the cluster has {there.get('CPU', 0):g}"

    def last_log_line(self, index: int) -> str:
        return last_log_line(self._log_file(index))

    def close(self) -> None:
        """Disconnect from Ray, and end it if it is the run's own."""
        torch.set_num_threads(self._threads)
        self._helper.call(self._ray.shutdown)
        self._helper.end()
        if self._sweeper and self._sweeper.stdin:
            self._sweeper.stdin.close()
            self._sweeper.wait()


def _gpus_of_worker(config: Config, resources: Mapping[str, float]) -> int:
    """Return the number of GPUs of each worker, 0 or 1. Raises ConfigError if the cluster has too few resources for the
    workers that the run needs at its start."""
    cluster = config.cluster
    gpus = resources.get("GPU", 0) if config.model.device != "cpu" else 0
    needed = {"CPUs in the Ray cluster": resources.get("CPU", 0)} | ({"CUDA devices": gpus} if gpus else {})
    key = "min_workers" if cluster.address and cluster.min_workers else "workers"
    for what, count in needed.items():
        if count < getattr(cluster, key):
            least = f"cluster.{key} = {getattr(cluster, key)}"
            raise ConfigError(f"{least}, but there are {count:g} {what}: each worker needs one")
    return 1 if gpus else 0


def _why(error: Exception) -> str:
    """Return a clause with the reason why a worker was lost. Ray's list of possible causes is left out."""
    lines = str(error).partition("Worker exit detail: ")[2].splitlines() or str(error).splitlines() or [""]
    clause = lines[0].partition(". ")[0]
    return "its process is gone" if not clause or "connection error" in clause else clause


def share_of_cores(index: int, workers: int) -> list[int]:
    """Return the CPU cores of worker `index`: an equal part of this process's cores, or one shared core if there are
    too few."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // workers
    return cores[index * each : (index + 1) * each] if each else [cores[index % len(cores)]]


def _import_ray(alone: bool) -> Any:
    """Import Ray, after setting the environment variables that it reads at import. If Ray is the run's own (`alone`),
    it gets a new token, which is in no file. Raises ConfigError if Ray is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else Ray's workers have a low priority
    # else Ray prints the errors of workers whose calls are not waited for, after another worker has failed
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if alone:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # else Ray listens on all interfaces, not just loopback
    if alone and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    refuse_no_ray()
    import ray

    return ray


def _keep_off_the_screen(ray: Any, file: Path) -> None:
    """Write the messages of Ray's processes to this file, for example that a worker died. Ray has no setting for this.
    A version of Ray that prints in another way still prints to the screen."""

    def note(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        with suppress(OSError), file.open("a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in data["lines"])

    inside = ray._private.worker
    if hasattr(inside, "print_to_stdstream"):
        inside.print_to_stdstream = note


def _short_folder() -> str:
    """Make and return a temporary folder. Its name has this process's id, and its path is short enough for Ray's
    sockets."""
    prefix = f"tlt_{os.getpid()}_"
    folder = tempfile.mkdtemp(prefix=prefix)
    if len(folder) > _LONGEST_FOLDER:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix=prefix, dir="/tmp")
    return folder
