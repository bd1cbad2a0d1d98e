"""One file for each command of the command line that has no folder of its own."""
