"""Commands of the command line that have no folder of their own, one file each."""
