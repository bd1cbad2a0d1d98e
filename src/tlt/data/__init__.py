"""Prompts: files and data sets, chat templates, tokenizers."""
