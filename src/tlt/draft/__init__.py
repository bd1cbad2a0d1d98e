"""Drafters, which propose the next tokens. They are outside the trusted base: no token depends on their proposals."""
