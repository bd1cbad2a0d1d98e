"""tlt: faster RL training of reasoning LLMs, with not one token changed."""

__version__ = "0.1.0"
