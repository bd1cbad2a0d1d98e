"""Settings of all tests. Tiny models are fastest with one thread, which leaves the other cores to other processes."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TLT_AUDIT", "1")  # every engine checks its key-value cache after every round
sys.path.insert(0, str(Path(__file__).parent))  # shared helpers: tiny.py
sys.path.extend(sorted({str(path.parent) for path in Path(__file__).parent.glob("*/test_*.py")}))  # for each other

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

# one server for all: a process of it starts in a moment, because the server has imported torch and our modules
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pytest", "tiny_rewards", "tlt.rewards.isolated", "tlt.rl.sharded", "tiny"])

for number, default in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
    if signal.getsignal(number) == signal.SIG_IGN:  # as a shell starts what runs in the background, and nohup
        signal.signal(number, default)

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# a mutant's failing example is not shrunk (tests/mutants/run.py), because that takes minutes
phases = (Phase.explicit, Phase.generate) if os.environ.get("TLT_MUTANT") else settings.default.phases
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], phases=phases
)
settings.load_profile("repeatable")


@pytest.fixture(scope="module", autouse=True)
def quick_rewards(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork each reward process from a server that has its imports, which saves 0.3 s per run.

    tests/rewards uses the processes that users get."""
    if request.path.parent.name == "rewards":
        yield
        return
    with patch("tlt.rewards.isolated.multiprocessing", SimpleNamespace(get_context=lambda method: forks)):
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the model and the runs of a file's tests."""
    return tmp_path_factory.mktemp("home")
