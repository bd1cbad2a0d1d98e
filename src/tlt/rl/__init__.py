"""The update: advantages, losses, packed micro-batches, and the policy they train."""
