"""Drafters, which propose the next tokens. The target verifies them, so a faulty drafter cannot change a token."""
