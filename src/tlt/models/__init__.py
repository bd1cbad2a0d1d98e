"""The rollout decoder: one Llama/Qwen-family decoder, its options read from a Hugging Face config, its weights taken
by name."""
