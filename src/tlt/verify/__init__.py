"""Comparison of all kinds of speculative decoding with plain decoding: `tlt verify`."""
