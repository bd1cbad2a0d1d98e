"""Files on disk and in stores: checkpoints, completions, names on the Hugging Face hub."""
