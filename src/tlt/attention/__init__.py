"""Attention over cached keys and values: one protocol for the target and the learned drafter."""
