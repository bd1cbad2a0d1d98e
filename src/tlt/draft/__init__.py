"""Drafters guess the next tokens. They are outside the trusted base: whatever they propose, no token changes."""
