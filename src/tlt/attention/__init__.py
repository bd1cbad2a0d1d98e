"""Keys and values of live rows, and attention over them: one protocol for the target and the learned drafter."""
