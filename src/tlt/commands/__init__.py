"""Commands `tlt train`, `generate`, `estimate`, `export` and `draft`, one file each, and files that they share."""
