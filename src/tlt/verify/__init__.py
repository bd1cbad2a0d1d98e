"""`tlt verify`: the ways to speculate, held against plain decoding."""
