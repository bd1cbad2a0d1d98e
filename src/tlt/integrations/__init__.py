"""Integration of tlt into other trainers through their documented extension points. Nothing is patched."""


class UnsupportedError(ValueError):
    """Error for an option of a trainer that tlt does not support. The message names the option and the remedy."""
