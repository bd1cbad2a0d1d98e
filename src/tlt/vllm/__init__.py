"""vLLM as the rollout engine. It uses the same noise and therefore draws the same tokens."""
