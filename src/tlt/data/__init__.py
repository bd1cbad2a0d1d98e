"""Loading of prompts: data files and data sets, chat templates, and tokenizers."""
