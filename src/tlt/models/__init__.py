"""Models: decoders of the engine, their options from a Hugging Face config, and their weights by name."""
