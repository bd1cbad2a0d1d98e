"""Storage: checkpoints and their mirrors, saved responses (completions), downloads from the Hugging Face hub."""
