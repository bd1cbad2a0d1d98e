"""tlt inside trainers of others, by the seams that they document: nothing is patched."""


class UnsupportedError(ValueError):
    """What a trainer was asked for and tlt does not do inside it; the message names it and the remedy."""
