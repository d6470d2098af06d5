"""Attention: rotation, the work list of a step's tiles, and the kernels."""
