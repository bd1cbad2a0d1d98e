"""Real worker processes of a Ray cluster that the run starts. Some are killed. The policy is the same, and no process
is left."""

from __future__ import annotations

import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import test_coordinator as in_process
import torch
from rich.console import Console
from test_recovery import recovery
from transformers import AutoModelForCausalLM

from tlt.cluster.actor import portable
from tlt.cluster.pool import ClusterError
from tlt.cluster.sweeper import marked
from tlt.cluster.worker import DecodeWork
from tlt.cluster.workers import RayPool, _gpus_of_worker, share_of_cores
from tlt.config import Config, ConfigError
from tlt.models.model_folder import ModelError
from tlt.models.weights import sha256
from tlt.run import opening
from tlt.run import train as run_module
from tlt.run.display import Display
from tlt.types import Prompt, Request, SamplingParams

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is an extra")
STEPS = 4


def config_of(home: Path, workers: int, folder: str, **sections: dict[str, Any]) -> Config:
    sections["run"] = {"folder": str(home / folder)} | sections.get("run", {})
    sections["train"] = {"steps": STEPS} | sections.get("train", {})
    sections["cluster"] = {"slice_seconds": 0.01} | sections.get("cluster", {})
    return in_process.config_of(home, workers, **sections)


def workers_of(folder: str) -> list[int]:
    return [pid for pid in marked(folder) if b"ray::Actor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def listeners(folder: str) -> set[str]:
    """Return the addresses on which this process and its Ray processes listen."""
    found: set[str] = set()
    for pid in (os.getpid(), *marked(folder)):
        with suppress(psutil.Error):
            sockets = psutil.Process(pid).net_connections(kind="inet")
            found |= {s.laddr.ip.removeprefix("::ffff:") for s in sockets if s.status == psutil.CONN_LISTEN}
    return found


class Killer(Display):
    """Display that kills a worker at the beginning of some phases, or a moment later."""

    def __init__(self, moments: dict[tuple[int, str], float], how: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(Console(quiet=True))
        self.moments, self.how, self.killed = moments, how, 0
        self.folder = ""
        self.heard: set[str] = set()
        """addresses at which any of the run's processes was to be reached"""

    def phase(self, step: int, name: str, total: int) -> None:
        super().phase(step, name, total)
        if self.folder:
            self.heard |= listeners(self.folder)
        if (step, name) in self.moments:
            threading.Timer(self.moments[step, name], self.kill).start()

    def kill(self) -> None:
        os.kill(sorted(workers_of(self.folder))[self.killed % 2], self.how)
        self.killed += 1


def watched_by(killer: Killer) -> Any:
    real = opening.join

    def join(pool: Any, *rest: Any) -> Any:
        killer.folder = pool.folder
        assert Path(pool.folder).stat().st_mode & 0o077 == 0, "others can open what Ray keeps there"
        return real(pool, *rest)

    return patch.object(opening, "join", join)


@pytest.fixture(scope="module")
def shm() -> Callable[[], set[str]]:
    """Return the new files in shared memory, without `multiprocessing` semaphores. Ray makes none, but concurrent tests
    do."""
    before = set(os.listdir("/dev/shm"))
    return lambda: {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} - before


@pytest.fixture(scope="module")
def expected(home: Path) -> str:
    """Return the sha256 of an undisturbed run."""
    return in_this_process(config_of(home, 2, "undisturbed"))


def test_workers_killed_in_a_rollout_and_in_an_update(home: Path, expected: str, shm: Callable[[], set[str]]) -> None:
    run = {"save_every": 1, "keep": 1}
    in_this_process(config_of(home, 2, "disturbed", train={"steps": 1}, run=run))
    killer = Killer({(1, "rollout"): 0.0, (2, "update"): 0.0})
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with watched_by(killer):
        disturbed = run_module.train(config_of(home, 2, "disturbed", run=run), True, killer)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert killer.killed == 2
    assert killer.heard == {"127.0.0.1"}
    assert disturbed["policy_sha256"] == expected
    assert disturbed["steps"] == STEPS
    assert not Path(killer.folder).exists()
    assert marked(killer.folder) == []
    assert shm() == set()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [(1, "rollout"), (1, "update")])
def test_a_worker_that_does_not_answer_is_replaced(home: Path, expected: str, moment: tuple[int, str]) -> None:
    """Its process is stopped, not dead, so that no call to it fails."""
    killer = Killer({moment: 0.0}, signal.SIGSTOP)
    with watched_by(killer):
        config = config_of(home, 2, "disturbed", cluster={"patience": 5.0}, run={"save_every": 1})
        disturbed = run_module.train(config, False, killer)
    assert killer.killed == 1
    assert "here is worker 0" in Path(config.run.folder, "worker_0.log").read_text()
    assert disturbed["policy_sha256"] == expected
    assert marked(killer.folder) == []


@pytest.mark.slow
def test_a_run_that_loses_rays_control_process_saves_and_reports_it(
    home: Path, expected: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tlt.cluster.workers._EVERY", 0.2)

    class Steers(Killer):
        def phase(self, step: int, name: str, total: int) -> None:
            if (step, name) in self.moments:
                (pid,) = [i for i in marked(self.folder) if b"gcs_server" in Path(f"/proc/{i}/cmdline").read_bytes()]
                os.kill(pid, signal.SIGKILL)
                time.sleep(2.0)

    killer, config = Steers({(1, "rollout"): 0.0}), config_of(home, 2, "disturbed", run={"save_every": 1})
    silent = r"control process at .* does not answer"
    with watched_by(killer), pytest.raises(ClusterError, match=silent) as lost:
        run_module.train(config, False, killer)
    assert re.match(rf"saved after step \d in {config.run.folder}: continue with --resume", lost.value.__notes__[0])
    assert marked(killer.folder) == []
    assert "gcs" not in "".join(capfd.readouterr())
    assert run_module.train(config, True, quiet())["policy_sha256"] == expected


@pytest.mark.slow
def test_a_training_worker_can_be_interrupted(home: Path) -> None:
    sections = {"speculation": {"drafter": "adaptive", "training": {"micro_batch_tokens": 8, "buffer_tokens": 64}}}
    config = config_of(home, 2, "run", **sections)
    params = SamplingParams(max_new_tokens=24)
    work = DecodeWork(1, [Request(Prompt(i, "", (i, 3)), 0, 0, i, params) for i in range(8)])
    pool = RayPool(config, config.model.path)
    try:
        pool.wait([harvest := pool.submit(1, "decode", work, 60.0)])
        assert len(pool.result(harvest).responses) == 8
        for version in (1, 2):  # what is trained on is of the rollouts before the last one
            pool.wait([pool.submit(1, "sync", version)])
        training = pool.submit(1, "train_drafter", None, 600.0, 1)
        assert not pool.wait([training], 1.0)
        pool.interrupt(1, 1)
        assert pool.wait([training], 30.0) == [training]
        assert pool.result(training).micro_batches > 0
    finally:
        pool.close()


@pytest.mark.slow
def test_a_run_with_a_sharded_policy_ends_at_a_loss_and_resumes_from_its_checkpoint(home: Path) -> None:
    train, run = {"steps": 3, "shard": True}, {"save_every": 1}
    expected = run_module.train(config_of(home, 2, "undisturbed", train=train, run=run), False, quiet())
    killer = Killer({(1, "update"): 0.0})
    config = config_of(home, 2, "disturbed", train=train, run=run)
    began = time.monotonic()
    with watched_by(killer), pytest.raises(ClusterError, match=r"lost during .*its shard"):
        run_module.train(config, False, killer)
    assert killer.killed == 1
    assert marked(killer.folder) == []
    assert time.monotonic() - began < 60
    assert run_module.train(config, True, quiet())["policy_sha256"] == expected["policy_sha256"]
    saved = Path(config.run.folder) / "checkpoints" / "step_00000003" / "policy"
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float64)
    assert sha256(model.state_dict()) == expected["policy_sha256"]


def quiet() -> Display:
    return Display(Console(quiet=True))


def in_this_process(config: Config) -> str:
    """Return the sha256 of the same run by two workers in this process, without sums between processes."""
    return in_process.train(config)[0]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["*/ray/session_*", "run/worker_0.log"])
def test_sigterm_stops_a_run_whose_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """It arrives while Ray starts, which has a handler of its own, and while the driver waits in Ray for the first
    answer."""
    monkeypatch.setenv("TMPDIR", folder := tempfile.mkdtemp(prefix="tlt", dir="/tmp"))
    path = recovery.write_recipe(tmp_path, cluster={"workers": 2}, train={"steps": 1000})
    command = [sys.executable, "-m", "tlt", "train", str(path), "--run.folder", f"{folder}/run"]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while run.poll() is None and not any(Path(folder).glob(moment)):
            time.sleep(0.02)
        time.sleep(0.5)
        run.terminate()
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert run.returncode == 128 + signal.SIGTERM, said
    assert "stopped by SIGTERM before the first step: nothing was changed" in said
    assert "Traceback" not in said


DRIVER = """
import time
from tlt.cluster.workers import RayPool
from tlt.config import parse_config
config = parse_config({"model": {"path": "no model here", "device": "cpu"}, "data": {"path": "-"},
                       "reward": {"name": "exact"}, "cluster": {"workers": 1}})
pool = RayPool(config, "nowhere")
print(pool.folder, flush=True)
time.sleep(600)
"""


def test_a_driver_that_is_killed_leaves_nothing(shm: Callable[[], set[str]]) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout
    folder = driver.stdout.readline().strip()
    assert Path(folder).is_dir()
    assert Path(folder).parent == Path(tempfile.gettempdir())
    assert marked(folder)
    driver.kill()
    driver.wait()
    until = time.monotonic() + 30
    while (marked(folder) or Path(folder).exists()) and time.monotonic() < until:
        time.sleep(0.1)
    assert marked(folder) == []
    assert not Path(folder).exists()
    assert shm() == set()


def test_an_error_of_a_second_worker_is_not_printed(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Only the first one ends the run. Ray logs errors whose calls are dropped.

    A worker is requested again even if its node is lost, because the node may return within `cluster.grace`."""
    pool = RayPool(config_of(home, 2, "two"), home / "no model")
    logging.getLogger("ray").addHandler(caplog.handler)
    try:
        calls = [pool.submit(index, "sha256") for index in range(2)]
        for call in (calls.pop(0), pool.submit(1, "sha256")):  # the call between them is dropped before it returns
            calls.clear()
            with pytest.raises(ModelError, match="no model"):
                pool.result(call)
        with patch.object(pool._ray, "cluster_resources", return_value={}):
            pool.replace(0)
            assert pool.capacity() == "the workers need 2 CPUs and the cluster has 0"
    finally:
        logging.getLogger("ray").removeHandler(caplog.handler)
        pool.close()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("cluster", "resources", "expected"),
    [
        ({"workers": 2}, {"CPU": 2.0}, 0),
        ({"workers": 2}, {"CPU": 2.0, "GPU": 2.0}, 1),
        ({"workers": 2, "device": "cpu"}, {"CPU": 2.0, "GPU": 1.0}, 0),
        ({"workers": 2}, {"CPU": 1.0}, "cluster.workers = 2, but there are 1 CPUs in the Ray cluster"),
        ({"workers": 2}, {"CPU": 8.0, "GPU": 1.0}, "cluster.workers = 2, but there are 1 CUDA devices"),
        ({"workers": 4, "min_workers": 2, "address": "10.0.0.1:6379"}, {"CPU": 2.0}, 0),
        ({"workers": 4, "min_workers": 2, "address": "10.0.0.1:6379"}, {"CPU": 1.0}, "cluster.min_workers = 2, but"),
    ],
)
def test_a_cluster_has_enough_for_the_workers_at_the_start(
    home: Path, cluster: dict[str, Any], resources: dict[str, float], expected: int | str
) -> None:
    model = {"path": str(home / "model"), "device": cluster.pop("device", "auto")}
    config = config_of(home, 2, "small", model=model, cluster=cluster)
    if isinstance(expected, int):
        assert _gpus_of_worker(config, resources) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            _gpus_of_worker(config, resources)


def test_a_failed_start_of_ray_is_an_error_of_one_sentence(home: Path) -> None:
    import ray

    with (
        patch.object(ray, "init", side_effect=Exception("The node timed out.\nSee its logs.")),
        pytest.raises(ClusterError, match=r"^Ray cannot start on this machine \(The node timed out\.\): start again"),
    ):
        RayPool(config_of(home, 2, "none"), home / "model")


class TwoArguments(Exception):
    """Error that cannot be unpickled, because pickle passes its message alone."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("it is locked")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("error", "said"),
    [(TwoArguments("disk", 3), "TwoArguments: disk 3"), (HoldsALock(), "HoldsALock: it is locked")],
)
def test_an_error_that_cannot_be_pickled_is_sent_as_text(error: Exception, said: str) -> None:
    found = pickle.loads(pickle.dumps(portable(error)))
    assert (type(found), str(found)) == (RuntimeError, said)
    full = OSError(28, "No space left on device")
    assert portable(full) is full


def test_cores_are_shared_evenly() -> None:
    with patch("os.sched_getaffinity", lambda pid: {3, 5, 6, 9}):
        assert [share_of_cores(index, 2) for index in (0, 1)] == [[3, 5], [6, 9]]
        assert [share_of_cores(index, 3) for index in range(3)] == [[3], [5], [6]]
    with patch("os.sched_getaffinity", lambda pid: {4}):
        assert [share_of_cores(index, 2) for index in (0, 1)] == [[4], [4]]


TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (TESTS / "cluster", TESTS, TESTS.parent / "src")))
JOINS = """
import os
import sys
from pathlib import Path
from test_workers import config_of, quiet
from tlt.run import train as run
home, workers, address, folder, allow = sys.argv[1:]
cluster = {"address": address}
if allow == "allow":
    os.environ["TLT_ALLOW_NO_TOKEN"] = "1"
config = config_of(Path(home), int(workers), folder, cluster=cluster, train={"steps": 1})
print(run.train(config, False, quiet())["policy_sha256"])
"""


def joined(
    home: Path, workers: int, address: str, environment: dict[str, str], *, allow: str = ""
) -> subprocess.CompletedProcess[str]:
    """Let a process train with workers of this cluster. `allow`: whether it needs a token."""
    command = [sys.executable, "-c", JOINS, str(home), str(workers), address, f"joined{workers}{allow}", allow]
    environment = environment | {"PYTHONPATH": PATHS}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_an_existing_ray_cluster_is_joined_if_it_is_large_enough(home: Path) -> None:
    """It stays as it was. If it has too few CPUs, an error names them."""
    import ray

    own = RayPool(config_of(home, 2, "own"), home)
    try:
        address, environment = ray.get_runtime_context().gcs_address, os.environ | {"RAY_AUTH_MODE": "token"}
        for actor in own._actors:
            ray.kill(actor)
        expected = in_this_process(config_of(home, 2, "undisturbed", train={"steps": 1}))
        ran = joined(home, 2, address, environment)
        assert ran.stdout.strip() == expected, ran.stderr[-2000:]
        assert "cluster.workers = 3, but there are 2 CPUs" in joined(home, 3, address, environment).stderr
        assert len(ray.nodes()) == 1
    finally:
        own.close()


SERVES = """
import ray, sys
options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "_temp_dir": sys.argv[1]}
ray.init(address="local", num_cpus=2, **options)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_ray_cluster_without_authentication_is_not_joined(home: Path) -> None:
    """An option allows it. The cluster is one of this test's own, on loopback."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": PATHS, "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        server = subprocess.Popen([sys.executable, "-c", SERVES, folder], env=environment, **pipes)
        try:
            assert server.stdout
            address = server.stdout.readline().strip()
            refused, allowed = (joined(home, 2, address, environment, allow=answer) for answer in ("", "allow"))
        finally:
            server.communicate("")
    assert "requires no token" in refused.stderr.splitlines()[-1]
    assert allowed.returncode == 0, allowed.stderr[-2000:]


def test_a_missing_ray_is_an_error_of_one_sentence(home: Path) -> None:
    with patch.dict(sys.modules, {"ray": None}), pytest.raises(ConfigError, match=r"cluster\.workers.*pip install"):
        RayPool(config_of(home, 2, "none"), home)


@pytest.mark.parametrize(("folder", "cores"), [("/tmp/r", [6, 9]), ("", ())], ids=["own Ray", "joined"])
def test_workers_of_the_runs_own_ray_have_their_own_cores(home: Path, folder: str, cores: Any) -> None:
    pool, given = object.__new__(RayPool), list[Any]()
    actor = SimpleNamespace(remote=lambda *arguments: given.extend(arguments))
    pool._config, pool.size, pool.folder, pool._gpus = config_of(home, 2, "cores"), 2, folder, 0
    pool._ray = SimpleNamespace(remote=lambda **options: lambda kind: actor)
    with patch("os.sched_getaffinity", lambda pid: {3, 5, 6, 9}):
        pool._actor(1, "model")
    assert given[3].cores == cores
