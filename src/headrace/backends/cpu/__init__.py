"""The CPU backend: a native program over packed weights."""
