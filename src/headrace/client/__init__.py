"""Asking OpenAI-compatible endpoints: an answer's stream, read and timed as its bytes arrive."""
