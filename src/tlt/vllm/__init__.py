"""vLLM as the rollout engine: the same noise, so the same tokens. Nothing here but `plugin` is imported without it."""
