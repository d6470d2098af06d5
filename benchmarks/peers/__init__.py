"""Headrace and what one would run instead, on the same machine, model and work, in one run."""
