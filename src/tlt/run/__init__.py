"""Training run in its folder: construction of the training loop, log files, resume, and live display."""
