"""Tiny models: one thread is fastest, and leaves the other core to whoever else is working."""

import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TLT_AUDIT", "1")  # every engine checks its key-value cache after every round
sys.path.insert(0, str(Path(__file__).parent))  # shared helpers: tiny.py

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch
from hypothesis import HealthCheck, Phase, settings

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# what a planted fault breaks need not be made small (tests/mutants/run.py): that takes minutes
phases = (Phase.explicit, Phase.generate) if os.environ.get("TLT_MUTANT") else settings.default.phases
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], phases=phases
)
settings.load_profile("repeatable")
