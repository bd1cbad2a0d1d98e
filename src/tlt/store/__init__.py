"""Files on disk and in stores: checkpoints, completions, a run's journal, names on the Hugging Face hub."""
