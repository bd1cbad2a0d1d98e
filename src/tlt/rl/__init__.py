"""Update of the policy: advantages, losses, packed micro-batches, and the policy that they train."""
