"""Tiny models: one thread is fastest, and leaves the other core to whoever else is working."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
