"""vLLM as the rollout engine. It samples with tlt's noise, so it draws the same tokens as tlt's own engine."""
