"""`tlt bench`: both sides in one run, in turn, on the same tokens; medians and paired ratios, written as JSON."""
