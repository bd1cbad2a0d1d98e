"""Training of the drafter in idle time (spot training, TLT, arXiv 2511.16665): data, trainer, schedule."""
