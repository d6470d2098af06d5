"""The engine decides what is computed when: sequences, blocks, turns. No arrays, no text."""
