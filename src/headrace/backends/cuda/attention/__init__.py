"""Attention: rotation, the plan of a step's tiles, and the kernels that work through it."""
