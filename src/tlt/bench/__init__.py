"""`tlt bench`: measures both sides of a comparison in one run, in turn, on the same tokens. It writes medians and
paired ratios as JSON."""
