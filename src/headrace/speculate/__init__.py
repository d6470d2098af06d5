"""Speculative decoding, as far as it is guessing: which tokens may come next, and which to try."""
