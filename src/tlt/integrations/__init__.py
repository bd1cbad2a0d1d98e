"""tlt inside trainers of others, by the seams that they document: nothing is patched."""
