"""Tiny models: one thread is fastest, and leaves the other core to whoever else is working."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TLT_AUDIT", "1")  # every engine checks its key-value cache after every round
sys.path.insert(0, str(Path(__file__).parent))  # shared helpers: tiny.py

import torch
from hypothesis import HealthCheck, Phase, settings

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
