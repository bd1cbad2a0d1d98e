"""Training of the policy: advantages, losses, micro-batches, the update, and its division among workers."""
