"""What is on disk: checkpoints, completions, the journal of a run, names on the Hugging Face hub."""
