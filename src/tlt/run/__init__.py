"""A training run in its folder: parts, records, resume, live view."""
