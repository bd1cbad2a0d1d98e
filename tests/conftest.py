"""Tiny models: one thread is fastest, and leaves the other core to whoever else is working."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TLT_AUDIT", "1")  # every engine checks its key-value cache after every round
sys.path.insert(0, str(Path(__file__).parent))  # shared helpers: tiny.py

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
